"""The step loop: requests in, tokens out, one step at a time."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq

from llmlab.engine.choose import Sampled, ending_ids
from llmlab.engine.records import StepRecord
from llmlab.engine.request import (
    BadRequest,
    Finish,
    Output,
    SamplingParams,
    Sequence,
    TokenLogprobs,
)
from llmlab.engine.runner import Runner
from llmlab.engine.scheduler import Scheduled, Scheduler, Step
from llmlab.kv.allocator import BlockAllocator
from llmlab.kv.prefix import Root
from llmlab.settings import BatchingSettings


class NotFinite(ArithmeticError):
    """The logits of a request held NaN or infinity."""


class Engine:
    """Serves many requests on one model. Single-threaded: all methods from one thread.

    `clock` returns seconds. `max_seq_tokens` bounds prompt plus output of a request. With a
    `prefix_root`, which names what its keys and values depend on, it caches prefixes.
    """

    def __init__(
        self,
        runner: Runner,
        batching: BatchingSettings,
        max_seq_tokens: int,
        clock: Callable[[], float],
        prefix_root: Root | None = None,
    ) -> None:
        geometry = runner.pool.geometry
        self.runner = runner
        self.allocator = BlockAllocator(geometry.blocks, geometry.block_tokens)
        self.scheduler = Scheduler(
            self.allocator, batching.policy, batching.max_batch, batching.chunk_tokens, prefix_root
        )
        self.max_seq_tokens = max_seq_tokens
        self.sequences: dict[int, Sequence] = {}
        self.last_step: StepRecord | None = None
        self._clock = clock
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def add_request(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Queue a request and return its id.

        A request is one sequence of token ids: `params.n` and `params.stop` are for whoever makes
        requests out of prompts and texts out of tokens, and are only checked here.

        Raises BadRequest for values out of range and for requests that could never run: prompt
        plus max_tokens beyond `max_seq_tokens`, more cache than the whole pool has, or no token
        to choose before `min_tokens`.
        """
        config = self.runner.model.config
        params.check(config.vocab)
        if params.min_tokens and len(ending_ids(params, config.eos_ids)) >= config.vocab:
            raise BadRequest("stop_token_ids: with min_tokens, at least one id must be left out")
        self._check_fits(prompt_ids, params.max_tokens)
        request_id, self._next_id = self._next_id, self._next_id + 1
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        sequence = Sequence(request_id, len(prompt_ids), list(prompt_ids), params, seed)
        self.sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return request_id

    def _check_fits(self, prompt_ids: Seq[int], max_tokens: int) -> None:
        n = len(prompt_ids)
        if n == 0:
            raise BadRequest("prompt: must hold at least one token")
        vocab = self.runner.model.config.vocab
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab:
            raise BadRequest(f"prompt: token ids must be from 0 to {vocab - 1}")
        if n + max_tokens > self.max_seq_tokens:
            raise BadRequest(
                f"prompt of {n} tokens + max_tokens={max_tokens}: more than the "
                f"{self.max_seq_tokens} tokens a sequence may have"
            )
        capacity = self.runner.pool.geometry.capacity_tokens
        if n + max_tokens - 1 > capacity:
            raise BadRequest(
                f"prompt of {n} tokens + max_tokens={max_tokens}: more than the whole KV pool of "
                f"{capacity} tokens can hold"
            )

    def abort(self, request_id: int) -> None:
        """Give a request up, whatever its state, and free its blocks; unknown ids are ignored."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, if there is one. Live requests keep what they hold."""
        if self.scheduler.prefixes is not None:
            self.scheduler.prefixes.clear()

    def step(self) -> list[Output]:
        """Run one step; what it brought each request, in the order of the batch.

        An exception inside the step ends the requests that took part (finish `error`) and frees
        their blocks; the others go on.
        """
        start = self._clock()
        step = self.scheduler.plan()
        self.last_step = None
        if not step.parts:
            return []
        for part in step.parts:
            if part.sequence.first_scheduled_s is None:
                part.sequence.first_scheduled_s = start
        record = self._record(step, start)
        try:
            if unproven := self.scheduler.take_unproven():
                self.runner.pool.clear(unproven)
            sampled = self.runner.run(step.parts)
        except Exception as error:
            for part in step.parts:
                part.sequence.computed += part.n  # may have been written, with whatever
            return [self._fail(p.sequence, error) for p in step.parts]
        outputs = self._advance(step.parts, sampled)
        self.last_step = record(self._clock())
        return outputs

    def _advance(self, parts: list[Scheduled], result: Sampled) -> list[Output]:
        sampled = [p.samples for p in parts]
        drawn = iter(zip(result.tokens, result.finite, strict=True))
        outputs = []
        for part, samples in zip(parts, sampled, strict=True):
            sequence = part.sequence
            sequence.computed += part.n
            token, finite = next(drawn) if samples else (None, True)
            bad = self._keep_prompt_logprobs(sequence, result)
            if bad is None and not finite:
                bad = sequence.computed - 1
            if bad is not None:
                error = NotFinite(f"logits at position {bad} are not finite")
                outputs.append(self._fail(sequence, error))
            elif token is not None:
                self.scheduler.prove(sequence)
                logprobs = result.logprobs.get(sequence.request_id)
                outputs.append(self._accept(sequence, token, logprobs))
        return outputs

    def _keep_prompt_logprobs(self, sequence: Sequence, result: Sampled) -> int | None:
        """Add what the step found; the first position whose logits were not finite, if any."""
        scored = result.prompt_logprobs.get(sequence.request_id, [])
        first = len(sequence.prompt_logprobs)
        sequence.prompt_logprobs += scored
        bad = (i for i, s in enumerate(scored, first) if not math.isfinite(s.chosen.logprob))
        return next(bad, None)

    def _fail(self, sequence: Sequence, error: Exception) -> Output:
        self.abort(sequence.request_id)
        return Output(sequence.request_id, finish=Finish.error, error=error)

    def _accept(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Output:
        params = sequence.params
        ends = () if params.ignore_eos else self.runner.model.config.eos_ids
        sequence.tokens.append(token)
        finish = None
        if token in ends or token in params.stop_token_ids:
            finish = Finish.stop
        elif sequence.output_tokens >= params.max_tokens:
            finish = Finish.length
        if finish is not None:
            self.abort(sequence.request_id)
        first = sequence.output_tokens == 1 and params.prompt_logprobs is not None
        return Output(
            sequence.request_id,
            (token,),
            finish,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first else None,
        )

    def _record(self, step: Step, start: float) -> Callable[[float], StepRecord]:
        """The step's record, all but its duration; counted before the sequences move on."""
        decodes = [p for p in step.parts if p.n == 1 and p.samples and p.sequence.output_tokens > 0]
        prefill_tokens = sum(p.n for p in step.parts) - len(decodes)
        kind = "mixed" if decodes and prefill_tokens else "decode" if decodes else "prefill"
        running = self.scheduler.running
        scheduled = sum(p.n for p in step.parts)
        shared = self.allocator.saved_blocks * self.allocator.block_tokens  # full, counted twice
        live = sum(s.computed for s in running) + scheduled - shared
        longest = max(p.sequence.computed + p.n for p in step.parts)
        queue_len, n_running = len(self.scheduler.waiting), len(running)
        used, free = self.allocator.used_blocks, self.allocator.free_blocks

        def finished(end: float) -> StepRecord:
            return StepRecord(
                t_s=start,
                wall_s=end - start,
                kind=kind,
                n_prefill_tokens=prefill_tokens,
                n_decode=len(decodes),
                batch=len(step.parts),
                queue_len=queue_len,
                running=n_running,
                kv_tokens_live=live,
                kv_blocks_used=used,
                kv_blocks_free=free,
                ctx_max=longest,
                preemptions=step.preemptions,
            )

        return finished

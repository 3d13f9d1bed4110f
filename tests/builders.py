"""Small models, pools and engines for the tests, made the way the lab makes real ones.

TINY is the shape of the case list: 6 heads over 2 KV heads, so that heads / kv_heads (3) and
kv_heads (2) differ and no transposed grouping can hide.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from llmlab import ops
from llmlab.engine.engine import Engine
from llmlab.engine.request import SamplingParams
from llmlab.engine.request import Sequence as EngineSequence
from llmlab.engine.runner import Runner, build_batch
from llmlab.engine.scheduler import Scheduled
from llmlab.kv.allocator import BlockTable
from llmlab.kv.layouts import Geometry
from llmlab.kv.pool import KvPool
from llmlab.model import checkpoint
from llmlab.model.config import ModelConfig, from_hf, read_config
from llmlab.model.llama import Model, forward
from llmlab.ops.base import Array, Ops
from llmlab.settings import BatchingPolicy, BatchingSettings, Kernel

CPU = torch.device("cpu")
KERNELS = list(Kernel)

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": None,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass
class Loaded:
    """A model with the operators it was loaded for."""

    model: Model
    ops: Ops
    warnings: list[str]

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def load(
    folder: Path,
    kernel: Kernel = Kernel.torch,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
) -> Loaded:
    """The checkpoint in `folder`, through the package's own loader."""
    config = read_config(folder)
    operators = ops.make(kernel, CPU, dtype, dtype)
    made = checkpoint.skeleton(config, dtype, CPU)
    warnings = checkpoint.fill_from_folder(made, folder)
    model = checkpoint.finish(made, config, operators, max_positions or config.context_tokens)
    return Loaded(model, operators, warnings)


def random_model(
    kernel: Kernel = Kernel.torch,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> Loaded:
    """TINY with `fields` changed and weights large enough that logits differ clearly."""
    config = from_hf(TINY | fields)
    operators = ops.make(kernel, CPU, dtype, dtype)
    made = checkpoint.skeleton(config, torch.float32, CPU)
    fill_lively(made.places.items(), seed)
    cast = checkpoint.skeleton(config, dtype, CPU)
    for name, place in cast.places.items():
        place.copy_(made.places[name])
    return Loaded(checkpoint.finish(cast, config, operators, config.context_tokens), operators, [])


def fill_lively(tensors: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """Seeded weights under which every part of the model matters: norms off 1, biases off 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tensors:
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0.0, 0.5 if name.endswith(".bias") else 0.12, generator=generator)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def save_hf(
    folder: Path, fields: dict[str, Any], seed: int = 0, max_shard_size: int | str = "1GB"
) -> Any:
    """A lively Transformers model of `config.json` = fields, saved to `folder` and returned.

    The folder's `config.json` is ours, not the one Transformers rewrites in its own spelling.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    write_json(folder / "config.json", fields)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    fill_lively(model.named_parameters(), seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_json(folder / "config.json", fields)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


def make_pool(loaded: Loaded, blocks: int, block_tokens: int) -> KvPool:
    c = loaded.config
    shape = Geometry(block_tokens=block_tokens, blocks=blocks)
    return KvPool.allocate(loaded.ops, shape, c.layers, c.kv_heads, c.head_dim)


def make_engine(
    loaded: Loaded,
    *,
    blocks: int = 64,
    block_tokens: int = 16,
    policy: BatchingPolicy = BatchingPolicy.continuous,
    max_batch: int = 16,
    chunk_tokens: int = 512,
    max_seq_tokens: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """An engine over a pool of `blocks` blocks. A contiguous cache is block_tokens=max_seq."""
    runner = Runner(loaded.model, loaded.ops, make_pool(loaded, blocks, block_tokens))
    batching = BatchingSettings(policy, max_batch, chunk_tokens)
    return Engine(runner, batching, max_seq_tokens or loaded.config.context_tokens, clock)


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[int]]:
    """Send all prompts at once and run to the end; the output tokens of each, in order."""
    tokens: dict[int, list[int]] = {engine.add_request(p, params): [] for p in prompts}
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens[output.request_id] += output.tokens
    return list(tokens.values())


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """n greedy tokens per prompt, end ids ignored."""
    return generate(engine, prompts, SamplingParams(max_tokens=n, ignore_eos=True))


def random_prompts(lengths: Iterable[int], vocab: int = 300, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def all_logits(
    loaded: Loaded,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[int]] | None = None,
    block_tokens: int = 16,
    on_layer: Callable[[int, Array], None] | None = None,
) -> list[npt.NDArray[np.float32]]:
    """Logits [length, vocab] of every position of every sequence.

    `steps` says how many tokens of each sequence go into each packed step (0: not in it); by
    default everything in one step. Blocks lie scattered in the pool, as after long use.
    """
    steps = steps or [[len(s) for s in sequences]]
    needs = [-(-len(s) // block_tokens) for s in sequences]
    pool = make_pool(loaded, sum(needs) + 2, block_tokens)
    order = iter(np.random.default_rng(1).permutation(sum(needs) + 2).tolist())
    params = SamplingParams(max_tokens=1)
    running = [
        EngineSequence(i, len(s), list(s), params, 0, BlockTable([next(order) for _ in range(n)]))
        for i, (s, n) in enumerate(zip(sequences, needs, strict=True))
    ]
    rows: list[list[npt.NDArray[np.float32]]] = [[] for _ in sequences]
    for step in steps:
        parts = [Scheduled(s, n) for s, n in zip(running, step, strict=True) if n]
        parts.sort(key=lambda part: part.n > 1)  # sequences with one token come first
        batch = build_batch(parts, block_tokens, loaded.ops)
        every_row = loaded.ops.to_device(np.arange(sum(step), dtype=np.int64))
        batch = replace(batch, logit_rows=every_row)
        logits = to_numpy(forward(loaded.model, batch, pool.layers, loaded.ops, on_layer))
        start = 0
        for part in parts:
            rows[part.sequence.request_id].append(logits[start : start + part.n])
            part.sequence.computed += part.n
            start += part.n
    return [np.concatenate(r) for r in rows]


def to_numpy(array: Array) -> npt.NDArray[np.float32]:
    """An array of either kind, as fp32 on the host."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float32)
    result: npt.NDArray[np.float32] = array.detach().float().cpu().numpy()
    return result


def max_difference(a: Array, b: Array) -> float:
    """Largest absolute difference; shapes must agree."""
    left, right = to_numpy(a), to_numpy(b)
    assert left.shape == right.shape
    return float(np.abs(left - right).max())


def write_checkpoint(
    folder: Path,
    fields: dict[str, Any],
    seed: int = 0,
    shards: int = 1,
    drop: Sequence[str] = (),
    extra: dict[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """A lively Llama checkpoint of `fields` in Hugging Face layout, and the tensors put into it.

    `drop` leaves tensors out, `extra` adds some. With several shards, an index is written.
    """
    made = checkpoint.skeleton(from_hf(fields), torch.float32, CPU)
    fill_lively(made.places.items(), seed)
    tensors = {k: v.to(dtype).contiguous() for k, v in made.places.items() if k not in drop}
    tensors |= extra or {}
    write_json(folder / "config.json", fields)
    if shards == 1:
        save_file(tensors, folder / checkpoint.SINGLE)
        return tensors
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / checkpoint.INDEX, {"metadata": {}, "weight_map": weight_map})
    return tensors

"""Our forward pass against Transformers: random weights, fp32, every variant we claim to run.

Each variant's `config.json` is written by hand, so that the spelling of its keys is the tested
one, whatever the installed Transformers would write. The oracle is built from the same model in a
spelling that every Transformers reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmlab.settings import Kernel
from tests.builders import (
    KERNELS,
    LLAMA3_SCALING,
    TINY,
    Loaded,
    all_logits,
    greedy,
    load,
    make_engine,
    max_difference,
    random_prompts,
    save_hf,
    to_numpy,
    write_json,
)

# Of logits of size 5 or less: 1e-5 is some 20 units in the last place.
BOUND = 1e-5
STEPS = 64
# The first is longer than the original context of every scaling and than the sliding window.
LENGTHS = [140, 17, 1, 33]
MAX_TOKENS = 256
DOCS = Path(__file__).parents[2] / "docs" / "families.md"


@dataclass(frozen=True)
class Variant:
    """TINY with `fields` changed; `written` changes the config.json once more, None drops a key."""

    fields: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    max_shard_size: int | str = "1GB"


SCALED = {"rope_scaling": LLAMA3_SCALING}
WITH_TYPE = {k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"} | {"type": "llama3"}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT = {"max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": SHORT | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": DYNAMIC},
    "yarn": SHORT | {"rope_scaling": YARN},
    "llama3": SCALED,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "attention_bias": False, "head_dim": 16},
}
PHI3 = {"model_type": "phi3", "pad_token_id": None, "tie_word_embeddings": False}


def gqa(heads: int, kv_heads: int, **more: Any) -> Variant:
    return Variant({"num_attention_heads": heads, "num_key_value_heads": kv_heads} | more)


def yarn(**fields: Any) -> dict[str, Any]:
    return SHORT | {"head_dim": 16, "rope_scaling": YARN | fields}


def stretched_theta(tokens: int) -> float:
    """The theta that dynamic scaling makes of 10000 for `tokens` (bloc97's NTK formula)."""
    head_dim = 8
    grown: float = (4.0 * tokens / 64 - 3.0) ** (head_dim / (head_dim - 2))
    return 10000.0 * grown


VARIANTS = {
    "plain": Variant(),
    "old-key-type": Variant(SCALED, {"rope_scaling": WITH_TYPE}),
    "rope-parameters": Variant(
        SCALED | {"rope_theta": 5e5},
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5},
        },
    ),
    "rope-parameters-unscaled": Variant(
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "old-key-theta": Variant({"rope_theta": 5e5}),
    "untied": Variant({"tie_word_embeddings": False}),
    "sharded": Variant({"tie_word_embeddings": False}, max_shard_size=60_000),
    "explicit-head-dim": Variant({"head_dim": 16}),
    "missing-head-dim": Variant(written={"head_dim": None}),
    "gqa-4-to-1": gqa(8, 2),
    "gqa-3-to-1": gqa(6, 2),
    "gqa-8-to-1": gqa(8, 1),
    "gqa-1-to-1": gqa(6, 6),
    "gqa-9-over-3": gqa(9, 3, hidden_size=54),
    "gqa-15-over-5": gqa(15, 5, hidden_size=60),
    "head-dim-64": gqa(3, 1, head_dim=64),
    "coarse-epsilon": Variant({"rms_norm_eps": 1e-2}),
    "dynamic-extended": Variant(
        SHORT | {"rope_theta": stretched_theta(MAX_TOKENS)},
        {"rope_theta": 10000.0, "rope_scaling": DYNAMIC},
    ),
    "yarn-untruncated": Variant(yarn(beta_fast=4, beta_slow=0.5, truncate=False)),
    "yarn-mscale": Variant(yarn(mscale=0.7, mscale_all_dim=1.2)),
    "yarn-attention-factor": Variant(yarn(attention_factor=0.8)),
    "yarn-original-at-top": Variant(
        yarn(original_max_position_embeddings=9) | {"original_max_position_embeddings": 64}
    ),
    **{
        f"{family}-{scaling}": Variant(family_fields | scaling_fields)
        for family, family_fields in FAMILIES.items()
        for scaling, scaling_fields in SCALINGS.items()
    },
    "mistral": Variant({"model_type": "mistral", "sliding_window": None}),
    "mistral-window": Variant(FAMILIES["mistral"]),
    "qwen2": Variant(FAMILIES["qwen2"]),
    "qwen3": Variant(FAMILIES["qwen3"]),
    "phi3": Variant(PHI3),
    "phi3-window": Variant(PHI3 | {"sliding_window": 16, "num_key_value_heads": 6}),
}


@dataclass
class Oracle:
    """What Transformers says. Per prompt: logits [n, V], layer outputs [layers, n, hidden]."""

    prompts: list[list[int]]
    logits: list[npt.NDArray[np.float32]]
    layers: list[npt.NDArray[np.float32]]
    greedy: list[int]
    smallest_gap: float
    loaded: dict[Kernel, Loaded]


@pytest.fixture(scope="module", params=VARIANTS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    variant = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    fields = TINY | variant.fields
    model = save_hf(folder, fields, max_shard_size=variant.max_shard_size)
    shards = len(list(folder.glob("*.safetensors")))
    assert (shards > 3) == (request.param == "sharded")
    written = {k: v for k, v in (fields | variant.written).items() if v is not None}
    write_json(folder / "config.json", written)
    prompts = random_prompts(LENGTHS)
    logits, layers = zip(*(ask(model, prompt) for prompt in prompts), strict=True)
    tokens, gap = greedy_by_transformers(model, prompts[0])
    loaded = {kernel: load(folder, kernel, max_positions=MAX_TOKENS) for kernel in KERNELS}
    assert loaded[Kernel.torch].config.max_context_tokens >= MAX_TOKENS
    return Oracle(prompts, list(logits), list(layers), tokens, gap, loaded)


def ask(model: Any, prompt: list[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Logits and the output of each layer. The last of `hidden_states` is after the final norm,
    so layers are observed by hooks.
    """
    seen: list[npt.NDArray[np.float32]] = []

    def observe(module: Any, args: Any, output: Any) -> None:
        seen.append(to_numpy(output[0] if isinstance(output, tuple) else output).squeeze(0))

    hooks = [layer.register_forward_hook(observe) for layer in model.model.layers]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return to_numpy(logits), np.stack(seen)


def greedy_by_transformers(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """STEPS greedy tokens, and the smallest distance between the two best logits on the way."""
    done = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.cat(done.logits).topk(2, dim=-1).values
    return done.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_logits_agree_at_every_position_of_a_single_prompt(oracle: Oracle, kernel: Kernel) -> None:
    logits = all_logits(oracle.loaded[kernel], oracle.prompts[:1])
    assert max_difference(logits[0], oracle.logits[0]) <= BOUND


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_logits_and_layers_agree_at_every_position_of_a_packed_batch(
    oracle: Oracle, kernel: Kernel
) -> None:
    seen: list[npt.NDArray[np.float32]] = []
    # One-token prompts go first in a batch.
    order = sorted(range(len(LENGTHS)), key=lambda i: LENGTHS[i] > 1)
    logits = all_logits(
        oracle.loaded[kernel],
        [oracle.prompts[i] for i in order],
        on_layer=lambda index, x: seen.append(to_numpy(x)),
    )
    for i, ours in zip(order, logits, strict=True):
        assert max_difference(ours, oracle.logits[i]) <= BOUND
    expected = np.concatenate([oracle.layers[i] for i in order], axis=1)
    assert max_difference(np.stack(seen), expected) <= BOUND


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_greedy_tokens_are_identical_for_64_steps(oracle: Oracle, kernel: Kernel) -> None:
    # Else rounding could decide, and another seed for the weights is due.
    assert oracle.smallest_gap > 4 * BOUND
    engine = make_engine(oracle.loaded[kernel], max_seq_tokens=MAX_TOKENS)
    assert greedy(engine, oracle.prompts[:1], STEPS) == [oracle.greedy]


def test_the_three_kernels_agree(oracle: Oracle) -> None:
    """Prefill, chunks and decode of a mixed batch, position by position."""
    prompts = oracle.prompts[:2]
    steps = [[130, 9], [3, 1], [1, 3], *([[1, 1]] * 4), [2, 0]]
    results = [all_logits(oracle.loaded[k], prompts, steps) for k in KERNELS]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert max_difference(ours, theirs) <= BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_scaling_equals_transformers_at_the_length_it_was_loaded_for(
    tmp_path: Path, family: str
) -> None:
    """Transformers follows each sequence; we hold one length. Both sides of that, as documented."""
    fields = TINY | FAMILIES[family] | SHORT | {"rope_scaling": DYNAMIC}
    model = save_hf(tmp_path, fields)
    short, long = random_prompts([64, 140])
    for prompt, max_tokens in ((short, 64), (long, 140)):
        expected, _ = ask(model, prompt)
        for kernel in KERNELS:
            (ours,) = all_logits(load(tmp_path, kernel, max_positions=max_tokens), [prompt])
            assert max_difference(ours, expected) <= BOUND
    (other,) = all_logits(load(tmp_path, max_positions=MAX_TOKENS), [long])
    assert max_difference(other, expected) > 100 * BOUND


def test_the_documented_table_lists_exactly_the_variants_tested_here() -> None:
    table = DOCS.read_text("utf-8").partition("| family | variant |")[2]
    rows = re.findall(r"^\| (\w+) \| `([\w-]+)` \|", table, re.MULTILINE)
    tested = [(v.fields.get("model_type", "llama"), name) for name, v in VARIANTS.items()]
    assert sorted(rows) == sorted(tested)

"""The trained model inside the package says what Transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmlab.engine.request import SamplingParams
from llmlab.model.tokenizer import Tokenizer
from llmlab.settings import Kernel, embedded_folder
from tests.builders import (
    KERNELS,
    Loaded,
    all_logits,
    generate,
    load,
    make_engine,
    max_difference,
    random_prompts,
    to_numpy,
)

PROMPTS = ["Once upon a time", "The river rises in", "A short answer:"]
REFERENCES = [
    (name, case)
    for name in ("tiny", "tiny-draft")
    for case in json.loads((embedded_folder(name) / "reference.json").read_text("utf-8"))["cases"]
]


@pytest.fixture(scope="module")
def loaded() -> dict[tuple[str, Kernel], Loaded]:
    return {
        (name, kernel): load(embedded_folder(name), kernel)
        for name in ("tiny", "tiny-draft")
        for kernel in KERNELS
    }


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("name", "case"), REFERENCES, ids=[f"{n}-{c['prompt'][:12]}" for n, c in REFERENCES]
)
def test_reference_numbers_are_reproduced(
    loaded: dict[tuple[str, Kernel], Loaded], kernel: Kernel, name: str, case: dict[str, Any]
) -> None:
    model, ids = loaded[name, kernel], case["ids"]
    tokenizer = Tokenizer(embedded_folder(name), model.config)
    if not case["prompt"].startswith("chat: "):  # a label: the ids are the templated turn
        assert tokenizer.encode(case["prompt"]) == ids
    (logits,) = all_logits(model, [ids])
    best = np.argsort(-logits[-1])[:5]
    assert best.tolist() == case["last_top5_ids"]
    np.testing.assert_allclose(logits[-1][best], case["last_top5_logits"], atol=1e-4)
    assert np.linalg.norm(logits[-1]) == pytest.approx(case["last_logits_l2"], rel=1e-5)
    log_probs = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), -1).numpy()
    nll = -log_probs[np.arange(len(ids) - 1), ids[1:]]
    assert nll.sum() == pytest.approx(case["prompt_nll"], rel=1e-5)
    (tokens,) = generate(make_engine(model), [ids], SamplingParams(max_tokens=32))
    assert tokens == case["greedy32"]
    assert tokenizer.decode(tokens) == case["text"].replace("<|eot_id|>", "")


@pytest.fixture(scope="module")
def theirs(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def test_logits_agree_with_transformers_beyond_the_original_context(
    loaded: dict[tuple[str, Kernel], Loaded], theirs: Any
) -> None:
    """1,100 tokens, where llama3 scaling with an original context of 1,024 has to hold.

    Relative to the largest logit (17 here), since fp32 rounding grows with it.
    """
    prompt = [4080, *random_prompts([1099], vocab=4000)[0]]
    with torch.inference_mode():
        expected = to_numpy(theirs(torch.tensor([prompt])).logits[0])
    (ours,) = all_logits(loaded["tiny", Kernel.sdpa], [prompt])
    assert max_difference(ours, expected) <= 1e-5 * np.abs(expected).max()


def test_greedy_text_is_that_of_transformers(
    loaded: dict[tuple[str, Kernel], Loaded], theirs: Any, tiny_folder: Path
) -> None:
    """All prompts in one batch of ours, one by one there; up to 64 tokens or an end id."""
    their_tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    expected = []
    for prompt in PROMPTS:
        given = their_tokenizer(prompt, return_tensors="pt")
        done = theirs.generate(**given, max_new_tokens=64, do_sample=False)
        new = done[0, given["input_ids"].shape[1] :]
        expected.append(their_tokenizer.decode(new, skip_special_tokens=True))
    for kernel in (Kernel.torch, Kernel.sdpa):
        ours = loaded["tiny", kernel]
        tokenizer = Tokenizer(tiny_folder, ours.config)
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        tokens = generate(make_engine(ours), prompts, SamplingParams(max_tokens=64))
        assert [tokenizer.decode(t) for t in tokens] == expected

"""Loading: the index decides, every parameter is written once, and what is missing is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmlab.model import checkpoint
from llmlab.model.checkpoint import CheckpointError
from llmlab.model.config import from_hf, read_config
from llmlab.settings import Kernel
from tests.builders import (
    CPU,
    KERNELS,
    TINY,
    all_logits,
    load,
    max_difference,
    random_prompts,
    to_numpy,
    write_checkpoint,
)

UNTIED = TINY | {"tie_word_embeddings": False}
STALE_HEAD = {"lm_head.weight": torch.full((300, 48), 7.0)}


def logits(folder: Path) -> Any:
    return all_logits(load(folder), random_prompts([9]))[0]


# ---- D03: tied and untied heads


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_d03_a_tied_head_is_the_embedding(tmp_path: Path, kernel: Kernel) -> None:
    write_checkpoint(tmp_path, TINY)
    loaded = load(tmp_path, kernel)
    assert loaded.warnings == []
    assert loaded.model.head is loaded.model.embed
    assert loaded.model.weights_bytes == loaded.config.n_params * 4


def test_d03_a_stale_head_beside_tied_embeddings_is_ignored_with_one_warning(
    tmp_path: Path,
) -> None:
    plain, stale = tmp_path / "plain", tmp_path / "stale"
    for folder, extra in ((plain, {}), (stale, STALE_HEAD)):
        folder.mkdir()
        write_checkpoint(folder, TINY, extra=extra)
    loaded = load(stale)
    assert len(loaded.warnings) == 1
    assert "lm_head.weight" in loaded.warnings[0]
    assert loaded.model.head is loaded.model.embed
    assert loaded.model.weights_bytes == load(plain).model.weights_bytes
    assert max_difference(logits(stale), logits(plain)) == 0


def test_d03_an_untied_model_without_head_is_refused_by_tensor_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, UNTIED, drop=["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"1 tensors missing: lm_head\.weight$"):
        load(tmp_path)


def test_an_untied_head_is_its_own_matrix(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, UNTIED)
    loaded = load(tmp_path)
    torch.testing.assert_close(loaded.model.head, tensors["lm_head.weight"], rtol=0, atol=0)
    assert loaded.model.weights_bytes == loaded.config.n_params * 4


# ---- D04: shards


def test_d04_a_missing_shard_is_refused_by_file_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, UNTIED, shards=3)
    for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (tmp_path / name).unlink()
    expected = r"shards missing: model-00001-of-00003\.safetensors, model-00003-of-00003"
    with pytest.raises(CheckpointError, match=expected):
        load(tmp_path)


@pytest.mark.parametrize("name", ["aaa.safetensors", "zzz.safetensors", "model.safetensors"])
def test_d04_a_stray_file_beside_the_shards_is_ignored(tmp_path: Path, name: str) -> None:
    tensors = write_checkpoint(tmp_path, UNTIED, shards=3)
    expected = logits(tmp_path)
    save_file({k: torch.full_like(v, 9.0) for k, v in tensors.items()}, tmp_path / name)
    assert load(tmp_path).warnings == []
    assert max_difference(logits(tmp_path), expected) == 0


def test_d04_a_tensor_that_a_shard_holds_beside_the_index_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, UNTIED, shards=3)
    expected = logits(tmp_path)
    last = tmp_path / "model-00003-of-00003.safetensors"
    save_file(load_file(last) | {"lm_head.weight": torch.zeros(300, 48)}, last)
    assert max_difference(logits(tmp_path), expected) == 0


@pytest.mark.parametrize("shards", [1, 3])
def test_d04_a_tensor_missing_everywhere_is_refused_by_name(tmp_path: Path, shards: int) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_checkpoint(tmp_path, UNTIED, shards=shards, drop=[name], dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"1 tensors missing: {name}$"):
        load(tmp_path, dtype=torch.bfloat16)


def test_d04_a_tensor_that_the_index_promises_and_the_shard_lacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, UNTIED, shards=3)
    first = tmp_path / "model-00001-of-00003.safetensors"
    tensors = load_file(first)
    del tensors["lm_head.weight"]
    save_file(tensors, first)
    with pytest.raises(CheckpointError, match=r"model-00001.*lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_d04_every_parameter_is_read_and_written_exactly_once(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_checkpoint(tmp_path, UNTIED, shards=shards, extra={"unknown": torch.ones(2)})
    reads: Counter[str] = Counter()
    inner = checkpoint._copy

    def counting(shard: Any, name: str, place: torch.Tensor, file: Path) -> None:
        reads[name] += 1
        assert place.isnan().all()
        inner(shard, name, place, file)

    monkeypatch.setattr(checkpoint, "_copy", counting)
    made = checkpoint.skeleton(from_hf(UNTIED), torch.float32, CPU)
    for place in made.places.values():
        place.fill_(float("nan"))
    progress: list[tuple[int, int]] = []
    warnings = checkpoint.fill_from_folder(made, tmp_path, lambda *now: progress.append(now))
    assert reads == Counter(made.places.keys())
    assert progress == [(i + 1, len(reads)) for i in range(len(reads))]
    for name, place in made.places.items():
        torch.testing.assert_close(place, tensors[name], rtol=0, atol=0)
    assert len(warnings) == 1
    assert "unknown" in warnings[0]


# ---- broken files


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    write_checkpoint(tmp_path, TINY, extra={name: torch.zeros(48, 16)})
    expected = rf"model\.safetensors: {name} has shape \[48, 16\], the config says \[16, 48\]"
    with pytest.raises(CheckpointError, match=expected):
        load(tmp_path)


def test_a_query_norm_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    write_checkpoint(tmp_path, TINY, extra={name: torch.ones(1)})
    made = checkpoint.skeleton(from_hf(TINY | {"model_type": "qwen3"}), torch.float32, CPU)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[1\], the config says \[8\]"):
        checkpoint.fill_from_folder(made, tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    extra = {"model.norm.weight": torch.ones(48, dtype=torch.int8)}
    write_checkpoint(tmp_path, TINY, extra=extra)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.int8"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, 100_000])
def test_a_truncated_file_is_refused_by_path(tmp_path: Path, size: int) -> None:
    write_checkpoint(tmp_path, TINY)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused_by_path(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, TINY)
    (tmp_path / checkpoint.INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index"):
        load(tmp_path)


def test_a_folder_without_weights_names_the_files_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*index\.json"):
        load(tmp_path)


# ---- dtype and memory


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_once_to_the_final_dtype(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = write_checkpoint(tmp_path, TINY, dtype=stored)
    made = checkpoint.skeleton(read_config(tmp_path), wanted, CPU)
    checkpoint.fill_from_folder(made, tmp_path)
    for name, place in made.places.items():
        assert place.dtype is wanted
        torch.testing.assert_close(place, tensors[name].to(wanted), rtol=0, atol=0)


MEASURE = """
import sys
from pathlib import Path
import torch
from llmlab.model import checkpoint
from llmlab.model.config import read_config

def peak_bytes():
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))

torch.set_num_threads(1)
folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
config = read_config(folder)
before = peak_bytes()
made = checkpoint.skeleton(config, dtype, torch.device("cpu"))
checkpoint.fill_from_folder(made, folder)
print(peak_bytes() - before, config.n_params * dtype.itemsize)
"""

MIB = 2**20
# Layers of 24 MiB each in fp32: one per shard.
WIDE = UNTIED | {
    "vocab_size": 512,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3413,
    "num_hidden_layers": 4,
}


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, WIDE, shards=4)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_peaks_at_the_model_plus_one_shard(wide_checkpoint: Path, dtype: str) -> None:
    """In fp32 as stored, and in bf16 from fp32. The slack is under a shard: allocator, header."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(wide_checkpoint), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    growth, model = (int(word) for word in done.stdout.split())
    shard = max(f.stat().st_size for f in wide_checkpoint.glob("*.safetensors"))
    assert growth <= model + shard + 12 * MIB
    assert growth >= model // 2  # the measurement itself works


# ---- weights=random


def random_places(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = checkpoint.skeleton(from_hf(TINY | {"model_type": "qwen3"}), dtype, CPU)
    checkpoint.fill_random(made, seed)
    return made.places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_the_same_bytes_for_the_same_seed(dtype: torch.dtype) -> None:
    first, again, other = (random_places(seed, dtype) for seed in (1, 1, 2))
    for name, place in first.items():
        torch.testing.assert_close(place, again[name], rtol=0, atol=0)
        if not name.endswith("norm.weight"):
            assert (place != other[name]).float().mean() > 0.9


def test_random_weights_have_a_models_usual_scale() -> None:
    for name, place in random_places(0).items():
        if name.endswith("norm.weight"):
            assert (place == 1).all()
        else:
            assert abs(float(place.mean())) < 0.002
            assert abs(float(place.std()) - 0.02) < 0.002


def test_random_biases_are_zero() -> None:
    made = checkpoint.skeleton(from_hf(TINY | {"model_type": "qwen2"}), torch.float32, CPU)
    checkpoint.fill_random(made, 0)
    biases = [place for name, place in made.places.items() if name.endswith(".bias")]
    assert len(biases) == 6
    assert all((to_numpy(b) == 0).all() for b in biases)

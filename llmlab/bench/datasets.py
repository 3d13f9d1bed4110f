"""Public data sets: what they are, where they come from, and where they lie on this machine.

None is shipped. `python -m llmlab.data` brings them into a cache folder; a workload names a cached
one as `workload.path=data:NAME`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmlab.settings import ConfigError

PREFIX = "data:"


@dataclass(frozen=True)
class DataFile:
    """A file known by its exact content."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """A public data set.

    `url` delivers `download`. Where that is an archive, `member` is the file to take out of it, and
    `forms[0]` is that file; elsewhere `forms[0]` is the download itself. Any of `forms` may lie in
    the cache: they hold the same data.
    """

    name: str
    what: str
    licence: str
    source: str
    url: str
    download: DataFile
    forms: tuple[DataFile, ...]
    member: str | None = None


_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data"
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces"
_GGML = (
    "https://huggingface.co/datasets/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9"
)


def _trace(
    name: str, what: str, licence: str, source: str, folder: str, raw: DataFile, table: DataFile
) -> Dataset:
    return Dataset(name, what, licence, source, f"{folder}/{raw.name}", raw, (raw, table))


CATALOGUE: Mapping[str, Dataset] = {
    d.name: d
    for d in (
        _trace(
            "azure2023_conv",
            "An hour of Azure chat traffic, 19,366 requests (Splitwise, ISCA 2024)",
            "CC-BY-4.0",
            "github.com/Azure/AzurePublicDataset",
            _AZURE,
            DataFile(
                "AzureLLMInferenceTrace_conv.csv",
                719_188,
                "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            ),
            DataFile(
                "azure2023_conv.parquet",
                209_108,
                "76a335ce058e8c61d919db1003477caf57cbf573d46d96198d93e6842cc75ff8",
            ),
        ),
        _trace(
            "azure2023_code",
            "An hour of Azure code completion, 8,819 requests (Splitwise, ISCA 2024)",
            "CC-BY-4.0",
            "github.com/Azure/AzurePublicDataset",
            _AZURE,
            DataFile(
                "AzureLLMInferenceTrace_code.csv",
                320_117,
                "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            ),
            DataFile(
                "azure2023_code.parquet",
                99_331,
                "0519a4e0047a4adee3b52f669754c6079b649fbe3c1f7ed7978fb58ace6b052b",
            ),
        ),
        _trace(
            "mooncake_conversation",
            "An hour of Kimi chat traffic, 12,031 requests with block hashes (Mooncake, FAST 2025)",
            "Apache-2.0",
            "github.com/kvcache-ai/Mooncake",
            _MOONCAKE,
            DataFile(
                "conversation_trace.jsonl",
                3_029_533,
                "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            ),
            DataFile(
                "mooncake_conversation.parquet",
                760_555,
                "809c0fb3f2fb8a98bac783d570372f7a912e7440b05ed8f5648a79955f855693",
            ),
        ),
        _trace(
            "mooncake_synthetic",
            "3,993 requests of public long-context sets, with block hashes (Mooncake, FAST 2025)",
            "Apache-2.0",
            "github.com/kvcache-ai/Mooncake",
            _MOONCAKE,
            DataFile(
                "synthetic_trace.jsonl",
                1_136_313,
                "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
            ),
            DataFile(
                "mooncake_synthetic.parquet",
                179_043,
                "1e8cebe046ae40638a9d947469d2f4f6b9f7f4794e632b977031b2786740676e",
            ),
        ),
        Dataset(
            name="wikitext2",
            what="WikiText-2 raw, test split, for perplexity (Merity et al. 2016)",
            licence="CC-BY-SA-3.0",
            source="huggingface.co/datasets/ggml-org/ci",
            url=f"{_GGML}/wikitext-2-raw-v1.zip",
            download=DataFile(
                "wikitext-2-raw-v1.zip",
                4_721_645,
                "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
            ),
            forms=(
                DataFile(
                    "wiki.test.raw",
                    1_290_590,
                    "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
                ),
            ),
            member="wikitext-2-raw/wiki.test.raw",
        ),
    )
}


def cache_folder() -> Path:
    """Where data sets lie: `llmlab` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llmlab"


def cached(dataset: Dataset, cache: Path) -> Path | None:
    """The file of this data set in a cache folder, None when it is not there.

    A file gets there only after its content was checked, so its size is looked at, not its hash.
    """
    for form in dataset.forms:
        path = cache / dataset.name / form.name
        if path.is_file() and path.stat().st_size == form.bytes:
            return path
    return None


def find(name: str, cache: Path | None = None) -> Path | None:
    """The cached file of a data set, None when it is not on this machine.

    Raises ConfigError for a name that is not in the catalogue.
    """
    dataset = CATALOGUE.get(name)
    if dataset is None:
        raise ConfigError(f"{name}: no such data set (allowed: {', '.join(CATALOGUE)})")
    return cached(dataset, cache or cache_folder())


def why_missing(path: str) -> str | None:
    """What is wrong with a `workload.path`, None when its file is there."""
    if not path.startswith(PREFIX):
        return None if Path(path).expanduser().is_file() else "no such file"
    name = path.removeprefix(PREFIX)
    if name not in CATALOGUE:
        return f"no such data set (allowed: {', '.join(PREFIX + n for n in CATALOGUE)})"
    if find(name) is None:
        return f"is not on this machine yet (python -m llmlab.data get {name})"
    return None


def resolve(path: str) -> Path:
    """The file a `workload.path` names: a file, or a cached data set as `data:NAME`.

    Raises ConfigError, with the command that brings a data set which is not cached.
    """
    reason = why_missing(path)
    if reason is not None:
        raise ConfigError(f"workload.path={path}: {reason}")
    found = find(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else Path(path).expanduser()
    assert found is not None
    return found

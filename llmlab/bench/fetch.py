"""Bringing data sets into the cache: by download, or from a folder on this machine.

A file enters the cache under its final name only after its content was checked against its sha256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import urllib.request
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import IO

from llmlab.bench.datasets import DataFile, Dataset, cached

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0


class FetchError(RuntimeError):
    """A data set could not be brought here. Its text is one clear line."""


@dataclass
class Imported:
    """What an import did: files taken (data set, source), refused (source, why), ignored."""

    taken: list[tuple[str, Path]] = field(default_factory=list)
    refused: list[tuple[Path, str]] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)


def download(dataset: Dataset, cache: Path) -> Path:
    """Fetch a data set from its public source into `cache`; the path of its file.

    Nothing is left behind by a failure. Raises FetchError: no network, or unexpected content.
    """
    with _temporary(cache / dataset.name) as temporary:
        try:
            request = urllib.request.Request(dataset.url, headers={"User-Agent": "llmlab"})
            with (
                urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer,
                temporary.open("wb") as out,
            ):
                shutil.copyfileobj(answer, out, _CHUNK_BYTES)
        except (OSError, HTTPException) as error:
            raise FetchError(
                f"{dataset.name}: cannot download {dataset.url} ({_reason(error)}); bring "
                f"{dataset.download.name} here another way and run: "
                "python -m llmlab.data import FOLDER"
            ) from None
        check(temporary, dataset.download, f"{dataset.name}: {dataset.url}")
        return _place(temporary, dataset, dataset.download, cache)


def import_folder(folder: Path, catalogue: Iterable[Dataset], cache: Path) -> Imported:
    """Copy every known file under `folder` into `cache`.

    A file is known by its name or its size, and taken only if its sha256 is the expected one; a
    known name with other content is refused.
    """
    result = Imported()
    known = [(d, f) for d in catalogue for f in (*d.forms, *([d.download] if d.member else []))]
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        likely = [(d, f) for d, f in known if path.name == f.name or size == f.bytes]
        actual = sha256_of(path) if likely else ""
        match = next(((d, f) for d, f in likely if f.sha256 == actual), None)
        named = next((f for _, f in likely if f.name == path.name), None)
        if match is not None:
            dataset, form = match
            with _temporary(cache / dataset.name) as temporary:
                shutil.copyfile(path, temporary)
                check(temporary, form, str(path))
                _place(temporary, dataset, form, cache)
            result.taken.append((dataset.name, path))
        elif named is not None:
            result.refused.append((path, f"expected sha256 {named.sha256}, found {actual}"))
        else:
            result.ignored.append(path)
    return result


def intact(dataset: Dataset, cache: Path) -> Path | None:
    """The cached file if its content is the expected one, else None."""
    path = cached(dataset, cache)
    if path is None:
        return None
    expected = next(f.sha256 for f in dataset.forms if f.name == path.name)
    return path if sha256_of(path) == expected else None


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, expected: DataFile, origin: str) -> None:
    """Raise FetchError unless the file has the expected content; `origin` says where it is from."""
    actual = sha256_of(path)
    if actual != expected.sha256:
        raise FetchError(
            f"{origin}: not the expected content of {expected.name} (sha256 {actual}, expected "
            f"{expected.sha256}; {path.stat().st_size} bytes, expected {expected.bytes})"
        )


def _place(temporary: Path, dataset: Dataset, form: DataFile, cache: Path) -> Path:
    """Move a checked file into the cache, or the member of a checked archive."""
    folder = cache / dataset.name
    if dataset.member is None or form is not dataset.download:
        os.replace(temporary, folder / form.name)
        return folder / form.name
    member = dataset.forms[0]
    with _temporary(folder) as extracted:
        with zipfile.ZipFile(temporary) as archive, archive.open(dataset.member) as inside:
            _copy(inside, extracted)
        check(extracted, member, f"{dataset.name}: {dataset.member} in {form.name}")
        os.replace(extracted, folder / member.name)
    return folder / member.name


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        shutil.copyfileobj(source, out, _CHUNK_BYTES)


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A file in `folder` (made if need be) that is gone afterwards unless it was renamed."""
    path = folder / f".{uuid.uuid4().hex}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()  # not mkstemp, whose private mode would keep a shared cache from being shared
    except OSError as error:
        raise FetchError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _reason(error: Exception) -> str:
    """A short cause without nested exception names."""
    inner = getattr(error, "reason", None) or error
    return str(inner) or type(inner).__name__

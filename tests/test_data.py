"""`python -m llmlab.data`: list, get, import, against a local server and small files."""

from __future__ import annotations

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmlab.bench import datasets, workloads
from llmlab.bench.datasets import CATALOGUE, DataFile, Dataset
from llmlab.data import find, main
from llmlab.settings import Arrival, ConfigError, Settings, WorkloadKind, WorkloadSettings, validate

TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,2\n"
TABLE = b"the same in another form"
TEXT = b"some words\n"


def _zip(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
    return buffer.getvalue()


ARCHIVE = _zip("corpus/words.raw", TEXT)


def _file(name: str, content: bytes) -> DataFile:
    return DataFile(name, len(content), hashlib.sha256(content).hexdigest())


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address it is served at."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "trace.csv").write_bytes(TRACE)
    (folder / "corpus.zip").write_bytes(ARCHIVE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def catalogue(site: tuple[Path, str]) -> dict[str, Dataset]:
    _, url = site
    trace, corpus = _file("trace.csv", TRACE), _file("corpus.zip", ARCHIVE)
    return {
        "trace": Dataset(
            "trace",
            "a trace",
            "CC0",
            "example.org",
            f"{url}/trace.csv",
            trace,
            (trace, _file("trace.parquet", TABLE)),
        ),
        "corpus": Dataset(
            "corpus",
            "a corpus",
            "CC-BY-SA-3.0",
            "example.org",
            f"{url}/corpus.zip",
            corpus,
            (_file("words.raw", TEXT),),
            "corpus/words.raw",
        ),
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


Out = pytest.CaptureFixture[str]


def test_get_fetches_checks_and_says_where(
    catalogue: dict[str, Dataset], cache: Path, capsys: Out
) -> None:
    assert main(["get", "trace", "--cache", str(cache)], catalogue) == 0
    assert (cache / "trace" / "trace.csv").read_bytes() == TRACE
    out = capsys.readouterr().out
    assert str(cache / "trace" / "trace.csv") in out
    assert "CC0" in out
    assert files_in(cache) == ["trace/trace.csv"]


def test_get_takes_the_member_out_of_an_archive(catalogue: dict[str, Dataset], cache: Path) -> None:
    assert main(["get", "corpus", "--cache", str(cache)], catalogue) == 0
    assert files_in(cache) == ["corpus/words.raw"]
    assert (cache / "corpus" / "words.raw").read_bytes() == TEXT


def test_get_again_needs_no_network(
    catalogue: dict[str, Dataset], cache: Path, site: tuple[Path, str], capsys: Out
) -> None:
    main(["get", "trace", "--cache", str(cache)], catalogue)
    (site[0] / "trace.csv").unlink()
    assert main(["get", "trace", "--cache", str(cache)], catalogue) == 0
    assert "already here" in capsys.readouterr().out


def test_get_replaces_a_damaged_file(catalogue: dict[str, Dataset], cache: Path) -> None:
    main(["get", "trace", "--cache", str(cache)], catalogue)
    damaged = cache / "trace" / "trace.csv"
    damaged.write_bytes(TRACE[::-1])
    assert main(["get", "trace", "--cache", str(cache)], catalogue) == 0
    assert damaged.read_bytes() == TRACE


def test_unexpected_content_leaves_nothing_behind(
    catalogue: dict[str, Dataset], cache: Path, site: tuple[Path, str], capsys: Out
) -> None:
    (site[0] / "trace.csv").write_bytes(TRACE + b"more")
    assert main(["get", "trace", "--cache", str(cache)], catalogue) == 1
    error = capsys.readouterr().err
    assert catalogue["trace"].download.sha256 in error
    assert error.count("\n") == 1
    assert files_in(cache) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/trace.csv", "missing"])
def test_no_network_is_one_line_with_the_way_around(
    catalogue: dict[str, Dataset], cache: Path, site: tuple[Path, str], capsys: Out, url: str
) -> None:
    url = f"{site[1]}/missing.csv" if url == "missing" else url
    unreachable = {"trace": replace(catalogue["trace"], url=url)}
    assert main(["get", "trace", "--cache", str(cache)], unreachable) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error
    assert "python -m llmlab.data import FOLDER" in error
    assert files_in(cache) == []


def test_an_unknown_name_lists_the_allowed_ones(
    catalogue: dict[str, Dataset], cache: Path, capsys: Out
) -> None:
    assert main(["get", "azure", "--cache", str(cache)], catalogue) == 2
    assert capsys.readouterr().err == "azure: no such data set (allowed: trace, corpus)\n"


def test_import_takes_known_files_whatever_their_name(
    catalogue: dict[str, Dataset], cache: Path, tmp_path: Path, capsys: Out
) -> None:
    folder = tmp_path / "downloads"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "trace.parquet").write_bytes(TABLE)
    (folder / "renamed.bin").write_bytes(TEXT)
    (folder / "holiday.jpg").write_bytes(b"no")
    assert main(["import", str(folder), "--cache", str(cache)], catalogue) == 0
    assert files_in(cache) == ["corpus/words.raw", "trace/trace.parquet"]
    out = capsys.readouterr().out
    assert re.search(r"taken +trace: .*trace\.parquet", out)
    assert re.search(r"taken +corpus: .*renamed\.bin", out)
    assert re.search(r"ignored +.*holiday\.jpg", out)


def test_import_unpacks_a_downloaded_archive(
    catalogue: dict[str, Dataset], cache: Path, site: tuple[Path, str]
) -> None:
    assert main(["import", str(site[0]), "--cache", str(cache)], catalogue) == 0
    assert files_in(cache) == ["corpus/words.raw", "trace/trace.csv"]


def test_import_refuses_a_known_name_with_other_content(
    catalogue: dict[str, Dataset], cache: Path, tmp_path: Path, capsys: Out
) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "trace.csv").write_bytes(b"something else")
    assert main(["import", str(folder), "--cache", str(cache)], catalogue) == 1
    error = capsys.readouterr().err
    assert "refused" in error
    assert f"expected sha256 {catalogue['trace'].download.sha256}" in error
    assert not cache.exists()


def test_import_of_nothing_known_names_what_is_known(
    catalogue: dict[str, Dataset], cache: Path, tmp_path: Path, capsys: Out
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["import", str(tmp_path / "empty"), "--cache", str(cache)], catalogue) == 1
    assert "trace.parquet" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "gone"), "--cache", str(cache)], catalogue) == 2
    assert "no such folder" in capsys.readouterr().err


def test_list_shows_what_is_here(catalogue: dict[str, Dataset], cache: Path, capsys: Out) -> None:
    main(["get", "corpus", "--cache", str(cache)], catalogue)
    capsys.readouterr()
    assert main(["list", "--cache", str(cache)], catalogue) == 0
    out = capsys.readouterr().out
    assert "cached as words.raw" in out
    assert "not cached" in out
    for text in ("trace", "corpus", "CC0", "CC-BY-SA-3.0", "example.org", f"{len(TRACE)}"):
        assert text in out


def test_the_command_line_teaches(capsys: Out) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "python -m llmlab.data get azure2023_conv" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


def test_the_public_catalogue_is_complete() -> None:
    assert set(CATALOGUE) == {
        *("azure2023_conv", "azure2023_code"),
        *("mooncake_conversation", "mooncake_synthetic", "wikitext2"),
    }
    for d in CATALOGUE.values():
        assert d.url.startswith("https://")
        assert d.url.endswith(f"/{d.download.name}")
        for file in (d.download, *d.forms):
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            assert file.bytes > 0


# ---------------------------------------------------------------------------------------------
# Use in a workload


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "llmlab"


def test_a_workload_names_a_cached_data_set(
    user_cache: Path, catalogue: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "CATALOGUE", catalogue)
    workload = WorkloadSettings(
        kind=WorkloadKind.trace, path="data:trace", n_requests=None, arrival=Arrival.trace
    )
    assert find("trace") is None
    with pytest.raises(ConfigError, match=r"data:trace: .*python -m llmlab\.data get trace"):
        workloads.build(workload, 0, 2048, 100)
    assert [p.path for p in workloads.preflight(workload)] == ["workload.path"]

    assert main(["get", "trace"], catalogue) == 0
    assert find("trace") == user_cache / "trace" / "trace.csv"
    assert len(workloads.build(workload, 0, 2048, 100).requests) == 1
    assert workloads.preflight(workload) == []
    assert not any(p.path == "workload.path" for p in validate(Settings(workload=workload)))


def test_an_unknown_data_set_is_refused(user_cache: Path) -> None:
    workload = WorkloadSettings(kind=WorkloadKind.trace, path="data:azure", n_requests=None)
    with pytest.raises(ConfigError, match=r"data:azure: no such data set .*data:azure2023_conv"):
        workloads.build(workload, 0, 2048, 100)
    with pytest.raises(ConfigError, match=r"azure: no such data set"):
        find("azure")

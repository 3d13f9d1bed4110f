"""Where a row says that it comes from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llmlab.bench import provenance
from llmlab.bench.probes import GpuFacts
from llmlab.bench.schema import RUNS
from llmlab.settings import DeviceKind

GPU = GpuFacts(0, "GPU-1", "NVIDIA H100", 80 << 30, 1 << 20, 700.0)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean repository with one module, one kernel and one text."""
    files = {
        "llmlab/__init__.py": "x = 1\n",
        "kernels/a.cu": "// kernel\n",
        "conf/config.yaml": "a: 1\n",
        "README.md": "hello\n",
        ".gitignore": "__pycache__/\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "start")
    return tmp_path


def _git(root: Path, *args: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(root), *who, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_clean_checkout_names_its_commit(checkout: Path) -> None:
    facts = provenance.git_facts(checkout)
    sha = _git(checkout, "rev-parse", "HEAD").strip()
    assert facts == {"git_sha": sha, "git_dirty": False, "diff_hash": None}


@pytest.mark.parametrize(
    "name", ["llmlab/__init__.py", "llmlab/new.py", "kernels/a.cu", "conf/b.yaml"]
)
def test_changed_and_new_sources_make_it_dirty(checkout: Path, name: str) -> None:
    seen = set()
    for text in ("one\n", "two\n"):
        (checkout / name).write_text(text)
        facts = provenance.git_facts(checkout)
        assert facts["git_dirty"] is True
        seen.add(facts["diff_hash"])
    assert len(seen) == 2


def test_texts_and_caches_do_not(checkout: Path) -> None:
    (checkout / "README.md").write_text("other\n")
    (checkout / "llmlab/__pycache__").mkdir()
    (checkout / "llmlab/__pycache__/a.py").write_text("cache\n")
    assert provenance.git_facts(checkout)["git_dirty"] is False


def test_an_exported_tree_names_its_commit(tmp_path: Path) -> None:
    (tmp_path / "llmlab").mkdir()
    written = tmp_path / "llmlab" / "commit.txt"
    written.write_text("$Format:%H$\n")
    assert provenance.git_facts(tmp_path)["git_sha"] is None
    written.write_text("0123abcd\n")
    assert provenance.git_facts(tmp_path) == {
        "git_sha": "0123abcd",
        "git_dirty": None,
        "diff_hash": None,
    }


def test_without_git_or_inside_a_strangers_checkout_nothing_is_claimed(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = tmp_path_factory.mktemp("bare")
    (bare / "llmlab").mkdir()
    (bare / "llmlab/__init__.py").write_text("x = 1\n")
    inside = checkout / "venv"
    (inside / "llmlab").mkdir(parents=True)
    (inside / "llmlab/__init__.py").write_text("x = 1\n")
    for root in (bare, inside):
        assert set(provenance.git_facts(root).values()) == {None}


def test_the_code_hash_follows_sources_and_kernels_alone(checkout: Path) -> None:
    start = provenance.code_hash(checkout)
    (checkout / "conf/config.yaml").write_text("a: 2\n")
    (checkout / "llmlab/__pycache__").mkdir()
    (checkout / "llmlab/__pycache__/a.py").write_text("cache\n")
    assert provenance.code_hash(checkout) == start
    (checkout / "kernels/a.cu").write_text("// other\n")
    changed = provenance.code_hash(checkout)
    (checkout / "llmlab/__init__.py").rename(checkout / "llmlab/renamed.py")
    assert len({start, changed, provenance.code_hash(checkout)}) == 3


def test_every_fact_has_a_column_and_the_host_stays_unnamed() -> None:
    environ = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}
    facts = provenance.collect(environ, [GPU], "580.1")
    assert set(facts) <= set(RUNS.names)
    assert facts["slurm_job_id"] == "17"
    assert facts["slurm_array_task_id"] == "2"
    assert facts["slurm_partition"] is None
    assert facts["gpu_name"] == "NVIDIA H100"
    assert facts["cpu_cores"] >= 1
    assert json.loads(facts["versions_json"])["numpy"]
    assert len(facts["hostname_hash"]) == 12


def test_the_hardware_key_names_what_sets_the_speed() -> None:
    gpu = {
        "gpu_name": "H100",
        "gpu_count": 1,
        "driver": "580.1.2",
        "cpu_model": "A",
        "cpu_cores": 8,
    }
    key = provenance.hw_key(gpu, DeviceKind.auto)
    assert key == provenance.hw_key(gpu | {"driver": "580.9", "cpu_model": "B"}, DeviceKind.cuda)
    others = [
        provenance.hw_key(gpu | {"driver": "590.1"}, DeviceKind.auto),
        provenance.hw_key(gpu | {"gpu_name": "A100"}, DeviceKind.auto),
        provenance.hw_key(gpu, DeviceKind.cpu),
        provenance.hw_key(gpu | {"cpu_cores": 4}, DeviceKind.cpu),
    ]
    assert len({key, *others}) == 5


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_cgroup_quota_is_read(
    tmp_path: Path, files: dict[str, str], cpus: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert provenance._cgroup_cpus(tmp_path) == cpus

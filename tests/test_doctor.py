"""The doctor finds what is here, says what that allows, and survives what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from llmlab.doctor import advice, checkup, probes
from llmlab.doctor.__main__ import main
from llmlab.doctor.findings import Device, Findings, Gpu, HuggingFace, Library
from llmlab.doctor.show import page
from llmlab.settings import Kernel, Precision


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "llmlab.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def shown(findings: Findings) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(page(findings))
    return captured.get()


def device(gigabytes: float, read_bytes_per_s: float = 100e9) -> Device:
    return Device("cuda", "A GPU", int(gigabytes * 1e9), read_bytes_per_s, ["sdpa"], {})


def test_it_describes_this_machine(found: dict[str, Any]) -> None:
    assert found["errors"] == {}
    assert found["machine"]["memory_bytes"] == psutil.virtual_memory().total
    assert found["machine"]["cores"] >= 1
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu"
    assert set(cpu["kernels"]) == {k.name for k in Kernel if k.name in ("numpy", "torch", "sdpa")}
    assert 1e8 < cpu["read_bytes_per_s"] < 1e13
    versions = {x["name"]: x["version"] for x in found["libraries"]}
    assert versions["torch"] == torch.__version__
    assert all(place["free_bytes"] > 0 for place in found["places"])
    assert set(found["slurm"]) >= {"sbatch", "srun", "squeue"}


def test_every_model_is_judged_in_every_precision(found: dict[str, Any]) -> None:
    fits = {(f["model"], f["precision"]): f for f in found["models"] if f["device"] == "cpu"}
    assert {m for m, _ in fits} >= {"tiny", "llama3_2_1b", "mistral_7b"}
    assert {p for _, p in fits} <= {p.name for p in Precision}
    assert fits["tiny", "bf16"]["fits"]
    assert fits["llama3_2_1b", "bf16"]["weights_bytes"] == 2 * 1_235_814_400
    assert fits["llama3_2_1b", "fp32"]["weights_bytes"] == 4 * 1_235_814_400


def test_what_is_missing_comes_with_a_command(found: dict[str, Any]) -> None:
    lacking = {x["extra"] for x in found["libraries"] if not x["fits"]} - {None, "cuda", "cuda12"}
    commands = {m["command"] for m in found["missing"]}
    assert {f"pip install -e '.[{extra}]'" for extra in lacking} <= commands
    for name, here in found["datasets"].items():
        assert here != (f"python -m llmlab.data get {name}" in commands)


def test_a_probe_that_fails_is_named_and_the_rest_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> Any:
        raise OSError("planted\nsecond line")

    names = ("machine", "gpus", "devices", "libraries", "places", "cached_datasets", "slurm")
    for name in (*names, "hugging_face"):
        monkeypatch.setattr(probes, name, broken)
    findings = checkup.examine({})
    assert set(findings.errors.values()) == {"planted"}
    assert len(findings.errors) == len(names) + 1
    assert (findings.machine, findings.devices, findings.models) == (None, None, [])
    assert "planted" in shown(findings)
    assert main([]) == 0
    assert "Probes that failed" in capsys.readouterr().out


def test_models_that_do_not_fit_are_said_not_to() -> None:
    fits = {(f.model, f.precision): f for f in advice.models([device(8)])}
    eight = fits["llama3_1_8b", "bf16"]
    assert (eight.fits, eight.kv_tokens) == (False, 0)
    one = fits["llama3_2_1b", "bf16"]
    assert one.fits
    assert one.kv_tokens == int((8e9 - 2 * 1_235_814_400) * 0.8 / 32768)
    assert one.limit_tok_per_s == pytest.approx(100e9 / (2 * 1_235_814_400))
    assert fits["tiny", "bf16"].limit_tok_per_s is None
    text = shown(Findings(devices=[device(8)], models=list(fits.values())))
    assert "no: weights 16.1 GB" in text


@pytest.mark.parametrize(
    ("driver", "extra"), [("570.1.2", "cuda12"), ("580.95", "cuda"), (None, None)]
)
def test_cuda_libraries_are_advised_for_the_driver(driver: str | None, extra: str | None) -> None:
    lacking = [Library("cupy-cuda12x", ">=13.4", None, False, "cuda12")]
    lacking += [Library("cupy-cuda13x", ">=13.6", None, False, "cuda")]
    gpus = [] if driver is None else [Gpu("A GPU", None, driver)]
    commands = [m.command for m in advice.missing(Findings(gpus=gpus, libraries=lacking))]
    assert commands == ([] if extra is None else [f"pip install -e '.[{extra}]'"])


def test_a_gpu_that_torch_cannot_use_is_pointed_out() -> None:
    cpu = Device("cpu", None, 8 << 30, 1e10, ["sdpa"], {})
    findings = Findings(gpus=[Gpu("A GPU", None, "580.95")], devices=[cpu])
    assert [m.what for m in advice.missing(findings)] == ["torch with CUDA"]


def test_an_old_library_is_to_be_upgraded() -> None:
    old = Library("rich", ">=13.9", "12.0", False, None)
    (advised,) = advice.missing(Findings(libraries=[old]))
    assert advised.command == "pip install 'rich>=13.9'"
    assert advised.what == "rich 12.0 (too old)"


def test_the_login_is_seen_and_never_shown(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    assert probes.hugging_face(environ) == HuggingFace(False, None)
    (tmp_path / "token").write_text("hf_secret")
    for login in (
        probes.hugging_face(environ),
        probes.hugging_face({"HF_TOKEN": "hf_secret"}),
    ):
        assert login.logged_in
        assert "secret" not in shown(Findings(hugging_face=login))


def test_a_checkout_that_is_not_installed_knows_its_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {(x.name, x.extra) for x in probes.libraries()}

    def unknown(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    assert {(x.name, x.extra) for x in probes.libraries()} == installed

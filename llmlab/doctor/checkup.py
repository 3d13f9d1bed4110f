"""All probes, one after another; each may fail without harm to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from llmlab.doctor import advice, probes
from llmlab.doctor.findings import Findings

T = TypeVar("T")


def examine(environ: Mapping[str, str]) -> Findings:
    """Run every probe. Two to four seconds, most of them importing torch and reading memory."""
    found = Findings()

    def attempt(name: str, probe: Callable[[], T]) -> T | None:
        try:
            return probe()
        except Exception as error:  # one broken library must not hide the rest
            text = str(error).strip()
            found.errors[name] = text.splitlines()[0] if text else type(error).__name__
            return None

    found.machine = attempt("machine", probes.machine)
    found.gpus = attempt("gpus", probes.gpus)
    found.devices = attempt("devices", probes.devices)
    found.libraries = attempt("libraries", probes.libraries)
    found.places = attempt("places", lambda: probes.places(probes.hf_home(environ)))
    found.datasets = attempt("datasets", probes.cached_datasets)
    found.slurm = attempt("slurm", probes.slurm)
    found.hugging_face = attempt("hugging_face", lambda: probes.hugging_face(environ))
    found.models = attempt("models", lambda: advice.models(found.devices or []))
    found.missing = attempt("missing", lambda: advice.missing(found)) or []
    return found

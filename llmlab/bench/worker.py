"""The measured process: loads one backend, measures one run, tells its parent, and ends.

    python -m llmlab.bench.worker --settings FILE --run-id ID --fd N

Messages go as JSON lines to the inherited pipe `--fd`; stdout and stderr belong to the log. The
worker writes the `requests` and `steps` tables itself; the `runs` row is the parent's to write.
Exit codes: 0 ok, 1 crash, 2 invalid_config, 3 unsupported, 4 numerics, 42 oom_gpu, 43 oom_host,
75 preempted.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from llmlab.backends.base import NumericsError, Unsupported
from llmlab.bench.measure import Factory, Run
from llmlab.settings import ConfigError, from_dict

DEFAULT_FACTORY = "llmlab.backends:make"
EXIT_CODES = {
    "crash": 1,
    "invalid_config": 2,
    "unsupported": 3,
    "numerics": 4,
    "oom_gpu": 42,
    "oom_host": 43,
    "preempted": 75,
}


class Preempted(BaseException):
    """SIGTERM or SIGUSR2 (what Slurm sends before the end of the allocation) arrived."""


class Channel:
    """The worker's end of the pipe to its parent."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._file = os.fdopen(fd, "w", encoding="utf-8")

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises BrokenPipeError when the parent is gone, ValueError on NaN.

        The line break before it ends a message that a signal may have cut short.
        """
        self._file.write("\n" + json.dumps({"kind": kind, **fields}, allow_nan=False) + "\n")
        self._file.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; its exit code."""
    args = _parser().parse_args(argv)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # the parent asks where a timed-out worker hangs
    _die_with_parent()
    channel = Channel(args.fd)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, _on_preemption)
    try:
        settings = from_dict(json.loads(args.settings.read_text()))
        Run(settings, args.run_id, channel.send, _factory(args.backend_factory)).execute()
    except BaseException as error:
        status = status_of(error)
        if status in ("invalid_config", "unsupported"):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        if not isinstance(error, BrokenPipeError):
            name, text = type(error).__name__, str(error)[:2000]
            channel.send("error", status=status, error_type=name, error_msg=text)
        return EXIT_CODES[status]
    return 0


def status_of(error: BaseException) -> str:
    """The row's status for what ended the run. CUDA's exceptions are known by name and text."""
    known: tuple[tuple[type[BaseException], str], ...] = (
        (ConfigError, "invalid_config"),
        (Unsupported, "unsupported"),
        (NumericsError, "numerics"),
        (MemoryError, "oom_host"),
        (Preempted, "preempted"),
    )
    for kind, status in known:
        if isinstance(error, kind):
            return status
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or re.search(r"CUDA.*out of memory", text):
        return "oom_gpu"
    if "DefaultCPUAllocator" in text and "allocate memory" in text:
        return "oom_host"
    return "crash"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmlab.bench.worker", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON of the settings")
    parser.add_argument("--run-id", required=True, help="name of the run's files")
    parser.add_argument("--fd", type=int, required=True, help="pipe to the parent")
    parser.add_argument("--backend-factory", default=DEFAULT_FACTORY, help="module:function")
    return parser


def _factory(name: str) -> Factory:
    module, function = name.split(":")
    made: Factory = getattr(importlib.import_module(module), function)
    return made


def _on_preemption(number: int, frame: FrameType | None) -> None:
    raise Preempted(f"got {signal.Signals(number).name}")


def _die_with_parent() -> None:
    """On Linux have the kernel end this process with its parent, which alone knows its timeout."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

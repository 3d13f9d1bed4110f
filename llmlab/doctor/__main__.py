"""The command: `python -m llmlab.doctor [--json]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence

from rich.console import Console

from llmlab.doctor.checkup import examine
from llmlab.doctor.show import page

WIDTH_IN_FILES = 140

_DESCRIPTION = """\
What this machine has (devices, memory, libraries, kernels that work, read bandwidth, disks, Slurm,
Hugging Face login), which models that is enough for, and the commands that add what is missing.
Takes a few seconds and changes nothing. A probe that fails is named; the exit code is 0.
"""

_EPILOG = """\
"tok/s at most" is read bandwidth / bytes of the weights: what one request at a time cannot exceed.

examples:
  python -m llmlab.doctor
  python -m llmlab.doctor --json | jq '.devices[].read_bytes_per_s'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    args = parser.parse_args(argv)
    found = examine(os.environ)
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_IN_FILES)
    console.print(page(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The small JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """The object in a JSON file. Raises `error`, one line naming the file, for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise error(f"{path}: cannot be read as JSON ({reason})") from reason
    if not isinstance(data, dict):
        raise error(f"{path}: must hold a JSON object")
    return data

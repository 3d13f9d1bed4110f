"""From a command line to typed Settings: Hydra's composition, one clear line for each mistake.

Sweeps are expanded here, before anything runs, so that all points are known, checked, counted and
interleaved. Hydra's own sweep syntax and `hydra.sweeper.params` of experiment files are honoured.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmlab.settings import Problem, Settings

CONF = Path(__file__).resolve().parent.parent / "conf"
EXPERIMENT = "experiment"

# An assertion: OmegaConf merging a key below a null.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, AssertionError, TypeError)


class ComposeError(ValueError):
    """A command line that cannot be composed; `lines` say why, one mistake each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


@dataclass(frozen=True)
class Point:
    """One composed config, and the overrides that made it."""

    settings: Settings
    overrides: list[str]


def groups() -> dict[str, list[str]]:
    """Every config group and its choices, from the folder `conf/`."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name != "hydra"
    }


def choices_help(shown: Callable[[str], bool] = lambda group: True) -> list[str]:
    """Lines for a `--help`: each group that is `shown`, and its choices."""
    lines = ["config groups and their choices (files in conf/<group>/):"]
    for group, choices in groups().items():
        if shown(group):
            name = f"+{group}" if group == EXPERIMENT else group
            text = f"  {name:<12} {', '.join(choices)}"
            lines += textwrap.wrap(text, 96, subsequent_indent=" " * 15)
    return lines


def points(overrides: Sequence[str], multirun: bool = False) -> list[Point]:
    """Every point that the overrides (and the experiment they name) describe, in sweep order.

    Raises ComposeError.
    """
    if not CONF.is_dir():
        raise ComposeError([f"{CONF}: no such folder; llmlab runs from a clone of its repository"])
    ConfigStore.instance().store(name="schema", node=Settings)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return [
            Point(_compose(point), point)
            for choice in _per_experiment(_parse(overrides), multirun)
            for point in _points(choice, multirun)
        ]


def _per_experiment(parsed: list[Override], multirun: bool) -> list[list[Override]]:
    """One override list per experiment, so that each file's own sweep holds for it alone."""
    for index, override in enumerate(parsed):
        if override.key_or_group == EXPERIMENT and override.is_sweep_override() and multirun:
            chosen = [_parse([point]) for point in _expand_all([override])]
            return [[*parsed[:index], *choice, *parsed[index + 1 :]] for choice in chosen]
    return [parsed]


def _points(parsed: list[Override], multirun: bool) -> list[list[str]]:
    fixed = [o for o in parsed if not o.is_sweep_override()]
    _check(fixed)
    # Only an experiment, or Hydra's own keys, can make a sweep that no override shows.
    hidden = any(o.key_or_group == EXPERIMENT or _is_hydra(o.key_or_group) for o in fixed)
    swept, params = _experiment_sweep(fixed) if hidden else (False, [])
    if not multirun and not swept:
        ambiguous = [f"{_line(o)}: several values need -m" for o in parsed if o not in fixed]
        if ambiguous:
            raise ComposeError(ambiguous)
    expanded = _expand([*_parse(params), *parsed] if swept else parsed)
    for point in expanded:
        _check(_parse(point))
    return expanded


def to_yaml(settings: Settings) -> str:
    """The full resolved config, as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(_quoted(override)))
        except HydraException as error:
            problem = f"{override}: cannot be parsed (write key=value, or key=a,b with -m)"
            raise ComposeError([problem]) from error
    return parsed


def _quoted(override: str) -> str:
    """Values of text keys in quotes, so that an id such as 1_1_1 stays text (Hydra reads 111)."""
    key, equals, value = override.partition("=")
    plain = re.fullmatch(r"[\w.+-]+", value) is not None and value != "null"
    if equals and plain and _type_at(key.lstrip("+").split(".")) is str:
        return f"{key}='{value}'"
    return override


def _experiment_sweep(fixed: list[Override]) -> tuple[bool, list[str]]:
    """Whether the named experiment is a sweep, and its parameters that the user did not set."""
    try:
        config = compose("config", [_line(o) for o in fixed], return_hydra_config=True)
    except COMPOSE_ERRORS as error:
        raise ComposeError([_explain(error, [_line(o) for o in fixed])]) from error
    params = config.hydra.sweeper.params or {}
    typed = {o.get_key_element().lstrip("+") for o in fixed}
    mode = config.hydra.mode
    swept = mode is not None and mode.name == "MULTIRUN"
    return swept, [f"{k}={v}" for k, v in params.items() if k not in typed] if swept else []


def _line(override: Override) -> str:
    return override.input_line or ""


def _expand(parsed: list[Override]) -> list[list[str]]:
    # A sweep typed by the user replaces the experiment's sweep over the same key.
    last = {o.get_key_element(): index for index, o in enumerate(parsed)}
    kept = [o for index, o in enumerate(parsed) if last[o.get_key_element()] == index]
    return [list(point) for point in _split(kept)]


def _expand_all(parsed: list[Override]) -> list[str]:
    return [override for point in _split(parsed) for override in point]


def _split(parsed: list[Override]) -> list[list[str]]:
    try:
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise ComposeError([_first_line(error)]) from error
    return [point for batch in batches for point in batch]


def _compose(overrides: list[str]) -> Settings:
    try:
        settings: Any = OmegaConf.to_object(compose("config", overrides))
    except COMPOSE_ERRORS as error:
        raise ComposeError([_explain(error, overrides)]) from error
    assert isinstance(settings, Settings)
    return settings


# ---------------------------------------------------------------------------------------------
# One clear line for each mistake


def _check(overrides: list[Override]) -> None:
    """Keys and choices that do not exist. Raises ComposeError."""
    problems = [p for o in overrides if (p := _problem(o, groups())) is not None]
    if problems:
        raise ComposeError([str(p) for p in problems])


def _problem(override: Override, choices: dict[str, list[str]]) -> Problem | None:
    key, value = override.key_or_group, override.value()
    if override.is_delete():
        return Problem(_line(override), "", "nothing can be removed, only replaced")
    if _is_hydra(key):
        return None
    if key in choices:
        if isinstance(value, str) and value not in choices[key]:
            return Problem(key, value, "no such choice", f"allowed: {', '.join(choices[key])}")
        if not isinstance(value, str):
            return Problem(key, value, "not a name", f"allowed: {', '.join(choices[key])}")
        if key == EXPERIMENT and not _line(override).startswith("+"):
            return Problem(key, value, "an experiment is added", f"write +experiment={value}")
        return None
    return _unknown_key(key, value, choices)


def _is_hydra(key: str) -> bool:
    return key.startswith("hydra.")


def _unknown_key(key: str, value: Any, choices: dict[str, list[str]]) -> Problem | None:
    """Walk the key through the types of Settings; a problem names what is allowed at that place."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        here = _type_at(parts[:depth])
        if here is dict:
            return None
        if not dataclasses.is_dataclass(here):
            where = ".".join(parts[:depth])
            return Problem(key, value, "unknown key", f"{where} holds a value, not a group")
        fields = [f.name for f in dataclasses.fields(here)]
        if part not in fields:
            allowed = sorted(fields) if depth else sorted({*fields, *choices})
            close = difflib.get_close_matches(part, allowed, n=1)
            meant = f"did you mean {'.'.join([*parts[:depth], close[0]])}? " if close else ""
            return Problem(key, value, "unknown key", f"{meant}allowed: {', '.join(allowed)}")
    return None


def _type_at(parts: Sequence[str]) -> Any:
    """The type that Settings has at a path of keys; None where there is none."""
    here: Any = Settings
    for part in parts:
        if not dataclasses.is_dataclass(here):
            return dict if here is dict else None
        hint = typing.get_type_hints(here).get(part)
        here = None if hint is None else _plain_type(hint)
    return here


def _plain_type(hint: Any) -> Any:
    """The type behind an optional one; `dict` for any mapping."""
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return typing.get_origin(hint) or hint


def _explain(error: BaseException, overrides: Sequence[str]) -> str:
    """The most telling line of a Hydra or OmegaConf error: key and reason where it has them."""
    if isinstance(error, AssertionError):
        deep = [o for o in overrides if o.partition("=")[0].count(".") > 1]
        return f"{' '.join(deep)}: lies below a key that is null here"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return f"{cause.full_key}: {_first_line(cause)}"
        cause = cause.__cause__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__

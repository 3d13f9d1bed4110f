"""Chat messages to prompt text, by the template in a model's folder.

The templates are programs that come with downloaded models, so they run in Jinja's sandbox. The
environment follows what Transformers documents for chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmlab.model.control import RESERVED
from llmlab.model.tokenizer_files import check_unicode, read_tokenizer_config

_ROLE = re.compile(r"[A-Za-z0-9_-]+")


class ChatError(ValueError):
    """Messages that cannot become a prompt: the messages, the template, or that there is none."""


class ChatTemplate:
    """One compiled template and the special tokens that it may print, such as `bos_token`."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises ChatError for a template with a syntax error."""
        self.source = source
        self._special = dict(special)
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"chat template: {_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The prompt text. Raises ChatError with the template's reason."""
        try:
            return self._compiled.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise ChatError(f"chat template: {_line(error)}") from error


def read_template(folder: Path) -> str:
    """The template's text: chat_template.jinja, else `chat_template` of tokenizer_config.json.

    Of several named templates the one called default. Raises ChatError where there is none.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
        if found is None:
            names = ", ".join(map(str, named))
            raise ChatError(f"{folder}: no chat template called default (it has: {names})")
    if not isinstance(found, str):
        raise ChatError(
            f"{folder}: the model has no chat template (it would be in chat_template.jinja or in "
            "tokenizer_config.json); give a raw prompt instead"
        )
    return found


def check_messages(messages: object) -> None:
    """Raises ChatError naming the first bad message and what is allowed."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ChatError("messages: must be a list of at least one {role, content}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ChatError(f"messages[{index}]: must be an object with role and content alone")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            allowed = "a name such as system, user or assistant"
            raise ChatError(f"messages[{index}].role={role!r}: must be {allowed}")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise ChatError(f"messages[{index}].content: must be a string, not {kind}")
        _check_text(f"messages[{index}].content", content)


def _check_text(name: str, content: str) -> None:
    try:
        check_unicode(content, name)
    except ValueError as error:
        raise ChatError(str(error)) from None
    for character in RESERVED:
        if character in content:
            raise ChatError(f"{name}: must not hold U+{ord(character):X}, which is no character")


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own name and kind)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

"""`python -m llmlab.chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rich.console import Console

from llmlab import compose
from llmlab.engine_config import ENGINE_KEYS, engine_settings
from llmlab.settings import ConfigError

if TYPE_CHECKING:
    from llmlab.conversation import Conversation, Usage
    from llmlab.settings import Settings

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
CHAT_KEYS = (*ENGINE_KEYS, "decoding")

COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "time to first token and tokens per second, of the last answer and of the session",
    "/help": "this list",
    "/exit": "leave (so do Ctrl-D, and Ctrl-C at the prompt)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chat; its exit code: 0 left, 2 bad input, 130 interrupted while loading."""
    args = _parser().parse_intermixed_args(argv)
    for file in (sys.stdin, sys.stdout):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")
    console = Console(highlight=False, soft_wrap=True)
    try:
        settings = chat_settings(args.overrides)
        with console.status(f"loading {settings.model.name}"):
            conversation = _open(settings, args.system, args.max_tokens)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if sys.stdin.isatty():
        console.print(_banner(conversation), style="dim")
    talk(conversation, console)
    return 0


def chat_settings(overrides: Sequence[str]) -> Settings:
    """Settings for one conversation: sampled, ended by the model, prefixes kept between turns.

    Whatever `overrides` say wins. Raises ConfigError.
    """
    keys = {line.partition("=")[0].lstrip("+~") for line in overrides}
    lines = ["decoding.ignore_eos=false", "batching.max_batch=1"]
    if "decoding" not in keys:
        lines.append("decoding=sample")
    if not keys & {"kv", "kv.layout"}:
        lines.append("kv=paged_prefix")
    return engine_settings([*lines, *overrides], keys=CHAT_KEYS)


def _open(settings: Settings, system: str | None, max_tokens: int) -> Conversation:
    from llmlab.conversation import open_conversation  # torch: not needed by --help and mistakes

    return open_conversation(settings, system, max_tokens)


def talk(conversation: Conversation, console: Console) -> None:
    """Read lines and answer them until the user leaves."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        _edit_lines()
    try:
        while (line := input(prompt).strip()) != "/exit":
            if line.startswith("/") and "/" not in line[1:]:
                _command(line, conversation, console)
            elif line:
                _answer(line, conversation, console)
    except (EOFError, KeyboardInterrupt):
        if prompt:
            console.print()


def _edit_lines() -> None:
    """Arrow keys and recall at the prompt, where Python has readline."""
    try:
        import readline  # noqa: F401 (input() uses it once it is imported)
    except ImportError:
        return


def _command(line: str, conversation: Conversation, console: Console) -> None:
    if line == "/reset":
        conversation.reset()
        console.print("(the conversation is forgotten)", style="dim")
    elif line == "/stats":
        console.print(_stats(conversation), style="dim")
    elif line == "/help":
        for name, what in COMMANDS.items():
            console.print(f"{name:<8} {what}", style="dim")
    else:
        console.print(f"{line}: no such command ({', '.join(COMMANDS)})", style="dim", markup=False)


def _answer(line: str, conversation: Conversation, console: Console) -> None:
    """Stream the answer. Ctrl-C ends the answer, not the chat."""
    from llmlab.conversation import Refused

    try:
        with closing(conversation.say(line)) as pieces:
            for text in pieces:
                console.out(_visible(text), end="")
                console.file.flush()
    except Refused as error:
        console.print(f"({error})", style="dim", markup=False)
        return
    except KeyboardInterrupt:
        conversation.note("interrupted")
    console.print()
    for notice in conversation.take_notices():
        console.print(f"({notice})", style="dim", markup=False)


def _visible(text: str) -> str:
    """Without control characters: a model must not steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _banner(conversation: Conversation) -> str:
    llm = conversation.llm
    s = llm.settings
    lines = [
        f"{s.model.name}, {llm.config.n_params / 1e6:,.4g} M parameters in {s.precision.name.name} "
        f"on {llm.device.type}; {llm.context_tokens:,} tokens of context",
        *llm.warnings,
        "/help lists the commands; Ctrl-C ends an answer; Ctrl-D leaves",
    ]
    return "\n".join(lines)


def _stats(conversation: Conversation) -> str:
    past = conversation.usages
    if not past:
        return "nothing has been answered yet"
    used = past[-1].prompt_tokens + past[-1].output_tokens if conversation.turns else 0
    limit = conversation.llm.context_tokens
    return "\n".join(
        [
            f"last answer: {_speed(past[-1:])}",
            f"session:     {_speed(past)}; answers: {len(past)}",
            f"context:     {used:,} of {limit:,} tokens",
        ]
    )


def _speed(usages: Sequence[Usage]) -> str:
    """Mean TTFT; decode speed is the tokens after each first one by the time they took."""
    tokens = sum(u.output_tokens for u in usages)
    later = sum(u.output_tokens - 1 for u in usages if u.output_tokens > 1)
    took_s = sum(u.decode_s for u in usages)
    ttft_ms = 1e3 * sum(u.ttft_s for u in usages) / len(usages)
    speed = f"{later / took_s:,.1f} tok/s" if later and took_s > 0 else "– tok/s"
    return f"{tokens:,} tokens, TTFT {ttft_ms:,.1f} ms, {speed}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.chat",
        description="Talk to a model in the terminal. It sees the whole conversation; when that no "
        "longer fits its context, the oldest turns are dropped.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_epilog(),
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="as for llmlab.run: a group's choice (precision=fp32) or a value (decoding.top_p=0.9)",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        default=512,
        metavar="N",
        help="the longest answer (default: 512)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1")
    return int(text)


def _epilog() -> str:
    lines = ["commands:", *(f"  {name:<8} {what}" for name, what in COMMANDS.items())]
    lines += ["", *compose.choices_help(lambda group: group in CHAT_KEYS)]
    lines += [
        "",
        "examples:",
        "  python -m llmlab.chat                                    the model inside the package",
        "  python -m llmlab.chat decoding=greedy precision=fp32",
        "  python -m llmlab.chat decoding.temperature=0.5 --system 'Answer in one sentence.'",
        "  python -m llmlab.chat model.path=~/models/Qwen3-0.6B model.name=qwen",
        "  echo 'What is the capital of France?' | python -m llmlab.chat decoding=greedy",
        "",
        "Ctrl-C ends the answer being written, and at the prompt the chat.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

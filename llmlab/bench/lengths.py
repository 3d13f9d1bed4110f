"""Prompt and output lengths: how they are drawn, and how they are made to fit a context.

A request fits when prompt_tokens + output_tokens <= context_tokens. What does not fit is refused,
dropped or scaled, and the latter two leave a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from llmlab.settings import ConfigError, Overlong

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lengths:
    """Prompt and output tokens of each request; two int64 arrays of one length."""

    prompt: Ints
    output: Ints

    @property
    def total(self) -> Ints:
        """Tokens a request needs in the context."""
        return self.prompt + self.output

    def take(self, keep: Ints) -> Lengths:
        """The lengths of the requests with these indices."""
        return Lengths(self.prompt[keep], self.output[keep])


@dataclass(frozen=True)
class Fitted:
    """What is left after fitting: which requests, their lengths, the factor, and what was done."""

    keep: Ints
    lengths: Lengths
    scale: Fraction
    note: str | None


def fixed(n: int, prompt_tokens: int, output_tokens: int) -> Lengths:
    """The same lengths `n` times."""
    return Lengths(np.full(n, prompt_tokens, np.int64), np.full(n, output_tokens, np.int64))


def uniform(
    n: int, prompt: tuple[int, int], output: tuple[int, int], rng: np.random.Generator
) -> Lengths:
    """Lengths drawn uniformly from inclusive bounds; the first requests do not depend on `n`."""
    low, high = np.array([prompt, output]).T
    drawn = rng.integers(low, high, size=(n, 2), endpoint=True)
    return Lengths(drawn[:, 0], drawn[:, 1])


def fit(
    lengths: Lengths, context_tokens: int, policy: Overlong, where: Callable[[int], str]
) -> Fitted:
    """The requests as they fit into `context_tokens`.

    `where(i)` names request i for the message of `refuse`. `drop` leaves overlong requests out.
    `scale` multiplies every length by context / longest request, rounds down, and keeps at least 1;
    the product is formed in integers, so that no request exceeds the context by rounding.
    Raises ConfigError when a request is refused, or when none is left.
    """
    everyone = np.arange(len(lengths.prompt))
    total = lengths.total
    too_long = total > context_tokens
    if not too_long.any():
        return Fitted(everyone, lengths, Fraction(1), None)
    if policy is Overlong.refuse:
        raise ConfigError(_refusal(lengths, context_tokens, int(np.argmax(too_long)), where))
    if policy is Overlong.drop:
        keep = np.flatnonzero(~too_long)
        if not len(keep):
            raise ConfigError(
                f"workload.overlong=drop: none of the {len(total)} requests fits the context of "
                f"{context_tokens} tokens (shortest {total.min()}; allowed: refuse, drop, scale)"
            )
        note = (
            f"dropped {too_long.sum()} of {len(total)} requests longer than the context of "
            f"{context_tokens} tokens (longest {total.max()})"
        )
        return Fitted(keep, lengths.take(keep), Fraction(1), note)
    scale = Fraction(context_tokens, int(total.max()))
    scaled = Lengths(_scaled(lengths.prompt, scale), _scaled(lengths.output, scale))
    note = (
        f"all lengths scaled by {float(scale):.4g} (context {context_tokens} / longest request "
        f"{total.max()}), rounded down, at least 1: mean prompt {lengths.prompt.mean():.1f} -> "
        f"{scaled.prompt.mean():.1f}, mean output {lengths.output.mean():.1f} -> "
        f"{scaled.output.mean():.1f} tokens"
    )
    return Fitted(everyone, scaled, scale, note)


def _scaled(tokens: Ints, scale: Fraction) -> Ints:
    return np.maximum(1, tokens * scale.numerator // scale.denominator)


def _refusal(lengths: Lengths, context: int, i: int, where: Callable[[int], str]) -> str:
    prompt, output = int(lengths.prompt[i]), int(lengths.output[i])
    return (
        f"{where(i)}: prompt_tokens={prompt} + output_tokens={output} = {prompt + output} exceeds "
        f"the context of {context} tokens (allowed: a sum of at most {context}, or "
        "workload.overlong=drop or scale)"
    )

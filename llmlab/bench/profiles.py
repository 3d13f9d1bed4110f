"""Profiles: what is known about the traffic of a production trace, in a few dozen numbers.

A profile holds quantiles of prompt and output lengths, their rank correlation, the mean rate and
the burstiness. These are facts about a public trace, shipped with their source; the trace itself
is not shipped (`python -m llmlab.data` brings it).

`python -m llmlab.bench.profiles TRACE` prints the numbers of a trace file: this is how the shipped
ones were made.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlab.bench.lengths import Lengths
from llmlab.settings import ASSETS, ConfigError

FOLDER = ASSETS / "profiles"

PROBABILITIES = (
    *(0.0, 0.001, 0.005, 0.01, 0.02),
    *(round(0.05 * k, 2) for k in range(1, 20)),
    *(0.98, 0.99, 0.995, 0.999, 1.0),
)


@dataclass(frozen=True)
class Numbers:
    """What is measured on a trace.

    `probability` and the two quantile lists run side by side. `rate_rps` is one over the mean gap
    between arrivals, `interarrival_cv` the standard deviation of the gaps over their mean,
    `spearman` the rank correlation of prompt and output length.
    """

    requests: int
    rate_rps: float
    interarrival_cv: float
    spearman: float
    probability: tuple[float, ...]
    prompt_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """A named set of numbers and where they come from."""

    name: str
    what: str
    source: str
    licence: str
    method: str
    numbers: Numbers


def names() -> list[str]:
    """The shipped profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Profile:
    """The shipped profile of this name. Raises ConfigError, naming the allowed ones."""
    if name not in names():
        raise ConfigError(
            f"workload.profile={name}: no such profile (allowed: {', '.join(names())})"
        )
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    numbers: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.pop("numbers").items()
    }
    return Profile(**data, numbers=Numbers(**numbers))


def measure(arrival_s: NDArray[np.float64], lengths: Lengths) -> Numbers:
    """The numbers of a trace whose arrivals do not decrease; at least three requests.

    Quantiles interpolate linearly between order statistics (numpy's default, type 7 of Hyndman and
    Fan 1996). The deviation of the gaps is that of the population (divided by their count).
    """
    gaps = np.diff(arrival_s)
    return Numbers(
        requests=len(arrival_s),
        rate_rps=round(float(1 / gaps.mean()), 6),
        interarrival_cv=round(float(gaps.std() / gaps.mean()), 6),
        spearman=round(_spearman(lengths), 6),
        probability=PROBABILITIES,
        prompt_tokens=tuple(np.quantile(lengths.prompt, PROBABILITIES).round(3).tolist()),
        output_tokens=tuple(np.quantile(lengths.output, PROBABILITIES).round(3).tolist()),
    )


def _spearman(lengths: Lengths) -> float:
    from scipy.stats import spearmanr  # slow to import, and only needed here

    return float(spearmanr(lengths.prompt, lengths.output).statistic)


def sample(numbers: Numbers, n: int, rng: np.random.Generator) -> Lengths:
    """`n` requests whose lengths follow the quantiles and the rank correlation.

    Inverse-CDF sampling, linear between the quantiles, rounded to whole tokens; a Gaussian copula
    ties output to prompt length. Its correlation 2 sin(pi spearman / 6) gives the stated rank
    correlation (Kruskal 1958). How lengths vary along time is not modelled. The first requests do
    not depend on `n`.
    """
    from scipy.special import ndtr  # slow to import, and only needed here

    rho = 2 * math.sin(math.pi * numbers.spearman / 6)
    z = rng.standard_normal((n, 2))
    z[:, 1] = rho * z[:, 0] + math.sqrt(1 - rho**2) * z[:, 1]
    u = ndtr(z)
    prompt, output = (
        np.maximum(1, np.rint(np.interp(u[:, k], numbers.probability, quantiles))).astype(np.int64)
        for k, quantiles in enumerate((numbers.prompt_tokens, numbers.output_tokens))
    )
    return Lengths(prompt, output)


def main(argv: list[str]) -> int:
    """Print the numbers of the trace file named on the command line, as JSON."""
    from llmlab.bench.datasets import resolve
    from llmlab.bench.traces import read_trace

    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        trace = read_trace(resolve(argv[0]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if trace.arrival_s is None or len(trace.arrival_s) < 3:
        print(f"{argv[0]}: needs arrival times of at least 3 requests", file=sys.stderr)
        return 2
    print(json.dumps(asdict(measure(trace.arrival_s, trace.lengths)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

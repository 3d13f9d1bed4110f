"""llmlab: an LLM inference engine written from scratch, and the bench that measures it.

    from llmlab import LLM, SamplingParams

The names below are loaded when they are first used, so that `import llmlab` is quick and loads no
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmlab.engine.answers import Answer, Completion, Delta, GenerationError, Score
    from llmlab.engine.request import BadRequest, Logprob, SamplingParams, TokenLogprobs
    from llmlab.llm import LLM
    from llmlab.settings import ConfigError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Answer",
    "BadRequest",
    "Completion",
    "ConfigError",
    "Delta",
    "GenerationError",
    "Logprob",
    "SamplingParams",
    "Score",
    "TokenLogprobs",
]

_HOMES = {
    "LLM": "llmlab.llm",
    "Answer": "llmlab.engine.answers",
    "Completion": "llmlab.engine.answers",
    "Delta": "llmlab.engine.answers",
    "GenerationError": "llmlab.engine.answers",
    "Score": "llmlab.engine.answers",
    "BadRequest": "llmlab.engine.request",
    "Logprob": "llmlab.engine.request",
    "SamplingParams": "llmlab.engine.request",
    "TokenLogprobs": "llmlab.engine.request",
    "ConfigError": "llmlab.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

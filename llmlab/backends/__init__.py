"""What a run can measure, behind one interface.

To add a backend: a module here with a `Backend` class, its name in `llmlab.settings.Backend`, an
entry in `make`, and `conf/backend/<name>.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmlab.settings import Backend as Name

if TYPE_CHECKING:
    from llmlab.backends.base import Backend
    from llmlab.settings import Settings


def make(settings: Settings, clock: Callable[[], float]) -> Backend:
    """The backend that `settings.backend` names, not loaded yet. `clock` returns seconds."""
    if settings.backend.name is Name.hf:
        from llmlab.backends.hf import HfBackend

        return HfBackend(settings, clock)
    from llmlab.backends.llmlab import LlmlabBackend

    return LlmlabBackend(settings, clock)

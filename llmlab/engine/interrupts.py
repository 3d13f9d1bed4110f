"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Inside, a first Ctrl-C waits until the function that this yields is called.

    A step that is cut in half could lose blocks of the pool. A second Ctrl-C does not wait. Where
    Python does not raise KeyboardInterrupt itself (another thread, a handler of the program's
    own), nothing is changed.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def release() -> None:
        if pressed:
            raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield release
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

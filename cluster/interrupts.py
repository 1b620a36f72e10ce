"""Ctrl-C and SIGTERM, for procedures that clean up after themselves. In the main thread only."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def insistent(*, every_s: float = 1.0) -> Iterator[None]:
    """Raise what a signal's handler raises again and again, until this block has been left.

    Once is not enough: an exception that comes while Ray runs a callback of its own is printed or dropped there.
    """
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    asked: list[int] = []

    def again(number: int, frame: FrameType | None) -> None:
        if number in _SIGNALS:
            asked.append(number)
        signal.setitimer(signal.ITIMER_REAL, every_s)
        handler = handlers[asked[0]]
        if callable(handler):
            handler(asked[0], frame)

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, again)
    alarm = signal.signal(signal.SIGALRM, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave half of a cleaning undone."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

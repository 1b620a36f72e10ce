"""Signals that must not get lost."""

import signal
import threading
from contextlib import suppress

import pytest

from cluster.interrupts import insistent, undisturbed


def test_an_interrupt_that_was_swallowed_comes_again() -> None:
    handler = signal.getsignal(signal.SIGINT)
    waited = threading.Event()
    with pytest.raises(KeyboardInterrupt), insistent(every_s=0.05):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not waited.wait(10)
        waited.set()
    assert not waited.is_set()
    assert signal.getsignal(signal.SIGINT) is handler


def test_cleaning_up_is_not_interrupted() -> None:
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

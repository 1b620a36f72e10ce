"""Register of open handoffs, for any order of Open and Close."""

from __future__ import annotations

import pytest

from core.types.errors import HandoffExpired
from kvtransfer.protocol import register as register_module
from kvtransfer.protocol.register import Register


def test_second_open_keeps_the_first_entry() -> None:
    """The first entry holds the received data, and `close` must wait for its writes."""
    register: Register[str] = Register()
    register.open("h", "first")
    register.open("h", "second")
    assert register.find("h") == register.get("h") == "first"
    assert (len(register), register.close("h"), register.close("h")) == (1, "first", None)


def test_closed_handoff_cannot_be_reopened() -> None:
    """This holds even if it was never open, because an Open may be overtaken by its Close."""
    register: Register[str] = Register()
    register.open("h", "first")
    for handoff in ("h", "overtaken"):
        register.close(handoff)
        register.open(handoff, "late")
        with pytest.raises(HandoffExpired):
            register.find(handoff)
    assert register.handoffs == []


def test_number_of_remembered_closed_handoffs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_module, "_MAX_CLOSED", 2)
    register: Register[str] = Register()
    for number in range(3):
        register.close(str(number))
    for number in range(3):
        register.open(str(number), "")
    assert register.handoffs == ["0"]

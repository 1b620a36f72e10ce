"""Commands to a child process, and its exit."""

from __future__ import annotations

import pytest

from core.process.child_process import ChildProcess
from core.types.errors import ReplicaLost


def test_commands_are_answered_in_order_until_the_process_exits() -> None:
    process = ChildProcess("tests.core.process.obedient", "40", answer_s=30.0)
    try:
        process.tell("add", number=1)
        process.tell("add", number=1)
        assert (process.answer(), process.answer()) == (41, 42)
        with pytest.raises(ReplicaLost, match="has exited"):
            process.ask("leave")
        with pytest.raises(ReplicaLost, match="has exited"):
            while True:  # the first commands may still fit into a buffer
                process.tell("add", number=1)
        with pytest.raises(ReplicaLost, match="has exited"):
            process.answer()
    finally:
        process.close()

"""The life of a replica whose gang holds no process: what is said of a start that takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.control import replica_life
from cluster.control.desired import Desired
from cluster.control.replica_life import ReplicaLife
from cluster.words.credentials import Credentials
from cluster.words.errors import ReplicaFailed
from cluster.words.launch import Launch
from cluster.words.spec_file import parse_spec


class FakeGang:
    """Is placed at once, and never gets further than the stage given: "" for one whose processes do not even start."""

    home = None
    stage = ""

    def __init__(self, replica: str, desired: Desired) -> None:
        self.is_removed = False

    async def place(self, waiting: Callable[[str], None]) -> None:
        pass

    def spawn(self) -> None:
        pass

    async def ask_all(self, method: str, *args: Any, within_s: float | None = None) -> list[Any]:
        if method == "progress":
            return [{"stage": self.stage, "fraction": 0.5}, {"stage": "ready", "fraction": 1.0}]
        if method == "bind" and self.stage:
            return [{"pid": 1, "host": "node", "address": "127.0.0.1:1", "device": "cpu"}] * 2
        await asyncio.Event().wait()
        raise AssertionError

    async def remove(self, *, is_serving: bool) -> None:
        assert not is_serving
        self.is_removed = True


@pytest.mark.parametrize(("stage", "at"), [("", ""), ("reading weights", ", at 'reading weights'")])
async def test_a_start_that_takes_too_long_is_explained(monkeypatch: pytest.MonkeyPatch, stage: str, at: str) -> None:
    gangs: list[FakeGang] = []

    def make(replica: str, desired: Desired) -> FakeGang:
        gangs.append(FakeGang(replica, desired))
        gangs[-1].stage = stage
        return gangs[-1]

    monkeypatch.setattr(replica_life, "Gang", make)
    desired = Desired(
        launch=Launch(
            spec=parse_spec({"timeouts": {"start_s": 1.0}}), log_dir="", credentials=Credentials.new(index_url="")
        )
    )
    with pytest.raises(ReplicaFailed) as failure:
        await ReplicaLife("prefill-0", desired).live()
    assert str(failure.value) == f"not ready 1 s after it was placed (timeouts.start_s){at}"
    assert failure.value.will_repeat
    assert [gang.is_removed for gang in gangs] == [True]

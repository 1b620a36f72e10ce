"""Restarts of the embedded Redis when the machine lacks resources."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.index.embedded import EmbeddedIndex
from core.index.redis_server import RedisAddress, RedisServer
from core.process.ports import free_port
from tests.support.waiting import becomes


async def test_failed_start_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_starts = 0

    def start(server: RedisServer) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts == 1:
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(RedisServer, "start", start)
    monkeypatch.setattr(RedisServer, "wait", lambda server: 0)
    keeper = EmbeddedIndex.__new__(EmbeddedIndex)
    await keeper.__init__(RedisAddress(free_port()), str(tmp_path))  # type: ignore[misc,func-returns-value]
    with pytest.raises(OSError, match="Cannot allocate memory"):
        await keeper.ready()
    await becomes(lambda: num_starts > 1)

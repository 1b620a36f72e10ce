"""Audit log: one line per request, without any of its text."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from core.spec.schema import RouterSpec
from core.types.errors import RequestError
from frontend.text.completion_request import CompletionRequest
from frontend.text.usage import RequestAuditLog
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Serve
from tests.support.tiny_service import MakeCompletions

_SECRET = "my-secret-text"


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_served_rejected_and_unreadable_requests_are_recorded(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "audit_log" / "router.jsonl"
    http = (await serve(audit_log=path, spec=RouterSpec(unknown_fields="refuse"))).http
    bodies = [
        {"prompt": _SECRET, "max_tokens": 3, "n": 2, "user": _SECRET, "stop": _SECRET, "cache_salt": _SECRET},
        {"prompt": _SECRET, "temperature": -1},
        {"prompt": _SECRET, _SECRET: 1},
    ]
    for number, body in enumerate(bodies):
        await http.post("/v1/completions", json=body, headers={"x-request-id": f"r{number}"})
    served, rejected, unreadable = _lines(path)
    assert served.items() >= {"request": "r0", "outcome": "completed", "tenant": "", "n": 2, "max_tokens": 3}.items()
    assert served["completion_tokens"] == 6 and served["prompt_tokens"] > 0 and served["ms"] >= served["ttft_ms"] >= 0
    assert rejected.items() >= {"request": "r1", "outcome": "invalid_value", "param": "temperature"}.items()
    assert unreadable["outcome"] == "invalid_value"
    for line in (served, rejected, unreadable):
        assert line["peer"].startswith("127.0.0.1:") and line["time"] > 1e9
    assert _SECRET not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_key_and_cancellation_are_recorded(completions: MakeCompletions, tmp_path: Path) -> None:
    fake = FakeTokenService(hang_after=1)
    service = completions(fake, audit_log=tmp_path / "audit.jsonl")
    request = CompletionRequest(id="r", prompt="abc", tenant="acme", key_id="k-1", peer="10.0.0.7:1")

    async def ask() -> None:
        completion = await service.open(request)
        async with completion.run() as events:
            async for _ in events:
                pass

    asking = asyncio.create_task(ask())
    await fake.is_hanging.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    with pytest.raises(RequestError):
        await service.open(CompletionRequest(id="r2", prompt="", key_id="k-1"))
    cancelled, rejected = _lines(tmp_path / "audit.jsonl")
    assert (cancelled["key"], cancelled["tenant"], cancelled["peer"]) == ("k-1", "acme", "10.0.0.7:1")
    assert (cancelled["outcome"], rejected["key"], rejected["param"]) == ("cancelled", "k-1", "prompt")
    service.close()


def test_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        audit_log = RequestAuditLog(tmp_path / "audit.jsonl", max_bytes=200)
        for number in range(20):
            audit_log.unreadable(f"r{number}", RequestError("no"), key=None, peer="10.0.0.7:1")
        audit_log.close()
    finally:
        os.umask(before)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in range(1, 5))]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert _lines(files[0])[-1]["request"] == "r19"

"""`cluster keys`: what an operator is told of a change that routers have not heard of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.cli import keys
from cluster.cli.app import run
from cluster.host import driver
from cluster.words.api_key import ApiKey, KeyChange, new_key, new_secret

_KEY = new_key("acme", new_secret())


@pytest.fixture(params=[True, False])
def is_told(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the controller has been able to tell the routers."""
    told: bool = request.param

    def ask(controller: object, method: str, key: Any) -> KeyChange:
        return KeyChange(key=key if isinstance(key, ApiKey) else _KEY, is_told=told)

    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(keys, "find_state", lambda name: None)
    monkeypatch.setattr(keys, "join_controller", lambda state: None)
    monkeypatch.setattr(driver, "ask", ask)
    return told


def test_a_revoked_key_that_routers_still_take_is_an_error(is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(["keys", "revoke", "acme"]), capsys.readouterr()
    assert (code == 0) == is_told
    assert printed.out == (f"{_KEY.id} of acme is revoked\n" if is_told else "")
    assert ("Redis is away: routers that run let it in until" in printed.err) != is_told


def test_a_new_key_that_routers_do_not_know_yet_says_so(is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "create", "acme"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("sk-")
    assert ("Redis is away: routers take this key when it is back" in printed.err) != is_told

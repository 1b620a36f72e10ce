"""The operator's key, and warnings about missing client keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.control.key_registry import key_file
from cluster.launch import operator_key
from cluster.launch import state as states
from core.types.api_key import ApiKey, KeyRegistry, digest_of, new_key, new_secret

pytestmark = pytest.mark.usefixtures("state_root")


def make(book: KeyRegistry, monkeypatch: pytest.MonkeyPatch) -> tuple[KeyRegistry, list[str]]:
    """Make the key with a controller that has this registry. Returns the registry afterwards, and the messages."""
    messages: list[str] = []

    def ask(controller: object, method: str, *args: ApiKey) -> Any:
        nonlocal book
        change = {"add_key": KeyRegistry.with_key, "revoke_key": KeyRegistry.without}.get(method)
        book = change(book, *args) if change else book
        return book

    monkeypatch.setattr("cluster.launch.driver.ask", ask)
    operator_key.make(None, "a", say=messages.append)
    return book, messages


def test_operator_secret_is_stored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    first, messages = make(KeyRegistry(), monkeypatch)
    assert messages[0].startswith("no client of a has an API key yet; create one with `cluster keys create NAME` (if ")
    assert make(first, monkeypatch)[0] == first
    for left in ("", "sk-of-another-deployment"):
        states.operator_key_file("a").write_text(left)
        new, _ = make(first, monkeypatch)
        secret = operator_key.read("a")
        assert secret and [key.digest for key in new.keys] == [digest_of(secret)] != [key.digest for key in first.keys]
    assert states.operator_key_file("a").stat().st_mode & 0o777 == 0o600
    assert make(new.with_key(new_key("acme", new_secret())), monkeypatch)[1] == []


def test_keys_of_an_earlier_deployment_are_found(state_root: Path) -> None:
    file = key_file(str(states.log_dir("a")))
    assert not operator_key.has_keys("a")
    file.parent.mkdir(parents=True)
    file.write_text(KeyRegistry().with_key(new_key("acme", new_secret())).to_json())
    assert operator_key.has_keys("a")

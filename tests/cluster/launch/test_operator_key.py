"""The operator's key, and warnings about missing client keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.control.key_registry import key_file
from cluster.launch import operator_key
from cluster.launch import state as states
from core.types.api_key import ApiKey, KeyRegistry, digest_of, new_key, new_secret
from core.types.errors import DeployError


class FakeController:
    """Controller with a key registry."""

    def __init__(self, book: KeyRegistry) -> None:
        self.book = book

    def ask(self, controller: object, method: str, *args: ApiKey) -> Any:
        """Stand-in for cluster.launch.driver.ask with this controller."""
        match method:
            case "add_key":
                self.book = self.book.with_key(*args)
            case "revoke_key":
                self.book = self.book.without(*args)
        return self.book


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))


def make(book: KeyRegistry, monkeypatch: pytest.MonkeyPatch) -> tuple[KeyRegistry, list[str]]:
    """Return the registry afterwards and the messages."""
    controller, messages = FakeController(book), list[str]()
    monkeypatch.setattr("cluster.launch.driver.ask", controller.ask)
    operator_key.make(controller, "a", say=messages.append)
    return controller.book, messages


def test_operator_secret_is_stored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = make(KeyRegistry(), monkeypatch)
    again, _ = make(first, monkeypatch)
    assert again == first
    states.operator_key_file("a").unlink()
    third, _ = make(first, monkeypatch)
    secret = operator_key.read("a")
    assert secret and [key.digest for key in third.keys] == [digest_of(secret)] != [key.digest for key in first.keys]
    assert states.operator_key_file("a").stat().st_mode & 0o777 == 0o600


def test_missing_client_keys_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    book, messages = make(KeyRegistry(), monkeypatch)
    assert (
        "no client of a has an API key yet; create one with `cluster keys create NAME` (if keys existed, "
        in messages[0]
    )
    assert make(book.with_key(new_key("acme", new_secret())), monkeypatch)[1] == []


def test_unreadable_key_file_is_an_error() -> None:
    file = key_file(str(states.log_dir("a")))
    assert not operator_key.has_keys("a")
    file.parent.mkdir()
    file.write_text(KeyRegistry().with_key(new_key("acme", new_secret())).to_json())
    assert operator_key.has_keys("a")
    file.write_text("")
    with pytest.raises(DeployError, match=r"keys\.json: not a registry of API keys"):
        operator_key.has_keys("a")

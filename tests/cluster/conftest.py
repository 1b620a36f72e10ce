"""Fixtures of all tests of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.ray import store
from tests.cluster.control.deploying import deploy  # noqa: F401


@pytest.fixture
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the state files of this machine's deployments."""
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def ray_store(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], bytes]:
    """Stand-in for Ray's store, by namespace and key."""
    stored: dict[tuple[str, str], bytes] = {}

    def put(space: str, key: str, text: str) -> None:
        stored[space, key] = text.encode()

    def put_new(space: str, key: str, text: str) -> bool:
        return stored.setdefault((space, key), new := text.encode()) is new

    monkeypatch.setattr(store, "put", put)
    monkeypatch.setattr(store, "put_new", put_new)
    monkeypatch.setattr(store, "get", lambda space, key: stored.get((space, key)))
    monkeypatch.setattr(store, "keys_in", lambda space: sorted(key for other, key in stored if other == space))
    monkeypatch.setattr(store, "delete", lambda space, key: stored.pop((space, key), None))
    return stored

"""Where the actors of a deployment are started."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from cluster.control.placement import on_the_head
from cluster.host.driver import start_controller


class FakeActorClass:
    """Notes with which of Ray's options an actor is made."""

    def __init__(self) -> None:
        self.chosen: dict[str, Any] = {}

    def options(self, **chosen: Any) -> FakeActorClass:
        self.chosen = chosen
        return self

    def remote(self, *arguments: object) -> None:
        pass


def test_a_controller_starts_again_where_its_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeActorClass()
    monkeypatch.setattr(ray, "remote", lambda actor: made)
    start_controller("a")
    assert made.chosen["resources"] == on_the_head()["resources"]
    assert made.chosen["max_restarts"] == -1 and "scheduling_strategy" not in made.chosen

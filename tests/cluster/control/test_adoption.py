"""A controller that Ray has started again, while Ray itself has only just come back."""

from __future__ import annotations

import pytest
from ray.exceptions import RpcError

from cluster.control import controller, ray_internals
from cluster.control.controller import Controller
from cluster.words.errors import DeployError


async def test_what_lives_is_looked_for_until_ray_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | Exception] = [RpcError("the control store is away"), ["decode-3"], []]
    removed: list[str] = []

    def find_replicas(name: str) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for function in ("put", "get", "delete"):
        monkeypatch.setattr(ray_internals, function, lambda *key, namespace: None)
    monkeypatch.setattr(controller, "find_replicas", find_replicas)
    monkeypatch.setattr(controller, "remove_leftovers", lambda replica, name: removed.append(replica))
    starting = Controller.__new__(Controller)
    await starting.__init__("a")  # type: ignore[misc,func-returns-value]
    with pytest.raises(DeployError, match="nothing has been deployed yet"):
        await starting.status()
    assert removed == ["decode-3"], "nobody wants it: but it was found"
    await starting.stop()
    assert not answers

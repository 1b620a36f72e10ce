"""Calls to a controller while Ray's head is away."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import GetTimeoutError, RaySystemError, RpcError

from cluster.ray.controller_call import ask_controller
from core.types.errors import DeployError


@pytest.mark.parametrize("error", [GetTimeoutError("gone"), RpcError("gone"), RaySystemError(OSError("gone"))])
def test_an_unreachable_head_is_a_deploy_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, namespace: str) -> None:
        raise error

    monkeypatch.setattr(ray, "get_actor", get_actor)
    with pytest.raises(DeployError, match=r"demo's controller: members: .*gone"):
        ask_controller("demo", "members")


def test_a_missing_controller_is_a_deploy_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, namespace: str) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", get_actor)
    with pytest.raises(DeployError, match="it does not run"):
        ask_controller("demo", "members")

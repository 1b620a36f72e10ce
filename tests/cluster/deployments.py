"""Launches, desired states and state files of deployments that do not run."""

from __future__ import annotations

from typing import Any

from cluster.control.desired_state import Desired
from cluster.launch import state as states
from cluster.launch.state import State
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.types.launch import Launch


def make_launch(
    tree: dict[str, Any] | None = None, *, log_dir: str = "", index_url: str = "redis://127.0.0.1:1"
) -> Launch:
    """Return a launch of the spec `tree`."""
    return Launch(spec=parse_spec(tree or {}), log_dir=log_dir, credentials=DeploymentSecrets.new(index_url=index_url))


def make_desired(tree: dict[str, Any] | None = None, *, log_dir: str = "", **more: Any) -> Desired:
    return Desired(launch=make_launch(tree, log_dir=log_dir), **more)


def make_state(name: str = "a", **fields: Any) -> State:
    """Return the state of a deployment on another machine's Ray."""
    usual = {"ray_address": "10.0.0.1:6379", "local_ray": None, "grpc": "g:1", "http": "http://h:2", "deploying": None}
    return State(**{"name": name, **usual, **fields})


def save_state(name: str = "a", **fields: Any) -> State:
    """Write a state file. The fixture `state_root` chooses the directory."""
    state = make_state(name, **fields)
    states.save(state)
    return state

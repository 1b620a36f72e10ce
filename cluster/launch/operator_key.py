"""API key of this machine's operator, for deployments that require keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.control.key_registry import key_file, read_registry
from cluster.launch import state as states
from core.process.atomic_file import write_whole
from core.types.api_key import OPERATOR, KeyRegistry, digest_of, new_key, new_secret


def make(controller: Any, name: str, *, say: Callable[[str], None]) -> None:
    """Ensure that the operator has a valid key, stored in a private file.

    Warns if no client has a key. Raises DeployError.
    """
    from cluster.launch import driver

    registry: KeyRegistry = driver.ask(controller, "keys")
    secret = read(name)
    known = [key for key in registry.keys if key.name == OPERATOR]
    if len(registry.keys) == len(known):
        say(
            f"no client of {name} has an API key yet; create one with `cluster keys create NAME` (if keys existed, "
            "their keys.json is on another head or in another CLUSTER_STATE_DIR)"
        )
    if known and secret and known[0].digest == digest_of(secret):
        return
    if known:
        driver.ask(controller, "revoke_key", known[0])
    secret = new_secret()
    driver.ask(controller, "add_key", new_key(OPERATOR, secret))
    write_whole(states.operator_key_file(name), secret)


def read(name: str) -> str | None:
    """Return the operator's secret, or None if this machine has none."""
    try:
        return states.operator_key_file(name).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def has_keys(name: str) -> bool:
    """Return whether an earlier deployment of this name left keys on this machine. Raises DeployError."""
    return bool(read_registry(key_file(str(states.log_dir(name)))).keys)

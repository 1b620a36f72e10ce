"""The API key with which this machine's operator asks, where a deployment lets nobody in without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.control.key_registry import key_file, read_registry
from cluster.launch import state as states
from core.process.atomic_file import write_whole
from core.types.api_key import OPERATOR, KeyRegistry, digest_of, new_key, new_secret


def make(controller: Any, name: str, *, say: Callable[[str], None]) -> None:
    """See that there is one, and that this machine has its secret: in a file of its owner's alone. And say so where no
    client has a key. Raises DeployError."""
    from cluster.launch import driver

    registry: KeyRegistry = driver.ask(controller, "keys")
    secret = read(name)
    known = [key for key in registry.keys if key.name == OPERATOR]
    if len(registry.keys) == len(known):
        say(
            f"no client of {name} has an API key yet: `cluster keys create NAME` makes one (if some had, keys.json of "
            "then is on another head, or in another CLUSTER_STATE_DIR)"
        )
    if known and secret and known[0].digest == digest_of(secret):
        return
    if known:
        driver.ask(controller, "revoke_key", known[0])
    secret = new_secret()
    driver.ask(controller, "add_key", new_key(OPERATOR, secret))
    write_whole(states.operator_key_file(name), secret)


def read(name: str) -> str | None:
    """Its secret; None where this machine has none."""
    try:
        return states.operator_key_file(name).read_text().strip() or None
    except OSError:
        return None


def are_there_keys(name: str) -> bool:
    """Whether clients have keys from an earlier deployment of this name; as far as this machine is the head. Raises
    DeployError."""
    return bool(read_registry(key_file(str(states.log_dir(name)))).keys)

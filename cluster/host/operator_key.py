"""The API key with which this machine's operator asks, where a deployment lets nobody in without one."""

from __future__ import annotations

import json
import os
from typing import Any

from cluster.control.key_keeper import key_file
from cluster.host import state as states
from cluster.words.api_key import KeyBook, digest_of, new_key, new_secret

OPERATOR = "operator"


def make(controller: Any, name: str) -> None:
    """See that there is one, and that this machine has its secret: in a file of its owner's alone."""
    from cluster.host import driver

    book: KeyBook = driver.ask(controller, "keys")
    secret = read(name)
    known = [key for key in book.keys if key.name == OPERATOR]
    if known and secret and known[0].digest == digest_of(secret):
        return
    if known:
        driver.ask(controller, "revoke_key", known[0])
    secret = new_secret()
    driver.ask(controller, "add_key", new_key(OPERATOR, secret))
    file = states.operator_key_file(name)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(secret)


def read(name: str) -> str | None:
    """Its secret; None where this machine has none."""
    try:
        return states.operator_key_file(name).read_text().strip() or None
    except OSError:
        return None


def are_there_keys(name: str) -> bool:
    """Whether clients have keys from an earlier deployment of this name; as far as this machine is the head."""
    try:
        tree = json.loads(key_file(str(states.log_dir(name))).read_text())
    except (OSError, ValueError):
        return False
    return bool(tree.get("keys"))

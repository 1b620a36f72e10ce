"""Audit log of operator commands: one JSON line per command that changes a deployment, in
$CLUSTER_STATE_DIR/commands.jsonl."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from cluster.launch import state as states
from core.types.errors import SpecError

_CHANGES = {"deploy", "down", "scale", "drain", "keys"}
_SECRET_OPTION = "--api-key"
# In URLs: everything before the last @ (a password may contain one), and password or user name parameters.
_BEFORE_HOST = re.compile(r"(?<=://)\S*@")
_NAMED = re.compile(r"(?i)(?<=[?&;])((?:\w*password|username)=)[^&;\s]*")


def note_command(arguments: Sequence[str], *, exit_code: int, seconds: float, error: str = "") -> None:
    """Log user, command, time and outcome of a command that changes something; read-only commands are skipped.

    A failed write is ignored: a full disk must not prevent taking a deployment down.
    """
    if _command(arguments) not in _CHANGES:
        return
    line = {
        "time": round(time.time(), 3),
        "user": user_name(),
        "host": socket.gethostname(),
        "from": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
        "command": _without_secrets(arguments),
        "exit_code": exit_code,
        "error": _without_password(error),
        "seconds": round(seconds, 1),
    }
    with suppress(SpecError):  # no state directory; the command has reported it
        _append(states.audit_log_path(), line)


def _command(arguments: Sequence[str]) -> str:
    """Return the command's name, which follows the global options; each of those takes a value."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        rest = rest[1:] if "=" in rest[0] else rest[2:]
    return rest[0] if rest else ""


def user_name() -> str:
    """Return the user name of this process, with the original user if it runs under sudo."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):
        # The user id has no name, as in containers.
        name = str(os.getuid())
    return f"{name} by {sudo}" if (sudo := os.environ.get("SUDO_USER")) else name


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == _SECRET_OPTION:
            argument = "***"
        elif argument.startswith(f"{_SECRET_OPTION}="):
            argument = f"{_SECRET_OPTION}=***"
        shown.append(_without_password(argument))
    return shown


def _without_password(text: str) -> str:
    return _NAMED.sub(r"\1***", _BEFORE_HOST.sub("***@", text))


def _append(path: Path, line: Mapping[str, object]) -> None:
    """Append the line atomically. Write errors are ignored: a full disk must not block the operator."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "a", opener=partial(os.open, mode=0o600)) as file:
            file.write(json.dumps(line) + "\n")

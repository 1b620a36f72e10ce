"""The trail of operators: one line of JSON for each command that changes a deployment, beside what is remembered of
them: $CLUSTER_STATE_DIR/commands.jsonl."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
from collections.abc import Sequence

from cluster.launch import state as states
from core.process.json_lines import append_line

_CHANGES = {"deploy", "down", "scale", "drain", "keys"}
_SECRET_OPTION = "--api-key"
# Of a URL: what is before its last @, for a password may have one, and what is called a password behind it.
_BEFORE_HOST = re.compile(r"(?<=://)\S*@")
_NAMED = re.compile(r"(?i)(?<=[?&;])((?:\w*password|username)=)[^&;\s]*")


def note_command(arguments: Sequence[str], *, exit_code: int, seconds: float, error: str = "") -> None:
    """Who, what, when, and what came of it. Commands that only look are not noted; nor is what cannot be written: a
    full disk must not keep anyone from taking a deployment down."""
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
    append_line(states.audit_log_path(), line)


def _command(arguments: Sequence[str]) -> str:
    """Its name, behind the options that all commands have: each of them has a value."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        rest = rest[1:] if "=" in rest[0] else rest[2:]
    return rest[0] if rest else ""


def user_name() -> str:
    """Of this process, and who became that user by sudo."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
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

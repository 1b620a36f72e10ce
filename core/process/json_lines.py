"""A file of JSON, one object to a line, that only its owner can read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Add it whole. What cannot be written is left out: a full disk must keep nobody from operating."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)

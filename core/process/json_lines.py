"""JSON-lines file with one object per line, readable by its owner only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Append the line atomically. Write errors are ignored: a full disk must not block the operator."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)

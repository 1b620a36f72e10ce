"""Files and directories that are there whole or not at all, also after a power cut.

A rename by itself does not see to that: it may be on the disk before what the file holds is.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from core.types.errors import DeployError


def write_whole(path: Path, text: str) -> None:
    """Put `text` where `path` is, for its owner alone; directories that are missing are made, likewise. Whoever reads
    finds all of it, or what was there before. Raises DeployError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            move_whole(Path(new), path)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise
    except OSError as error:
        raise DeployError(f"{path}: {error.strerror}") from error


def move_whole(made: Path, to: Path) -> None:
    """Rename a file, or a directory with all that it holds, when it is on the disk. Raises OSError."""
    for directory, _, files in os.walk(made):
        for file in files:
            _sync(Path(directory, file))
        _sync_directory(Path(directory))
    if not made.is_dir():
        _sync(made)
    made.replace(to)
    _sync_directory(to.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    with suppress(OSError):  # there are filesystems that know of no such thing; and what was renamed is there
        _sync(path)

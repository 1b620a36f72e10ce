"""Atomic writes of files and directories that also survive a power failure; and the directories of this process's user.

A rename alone is not enough: it may reach the disk before the file's content does.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from core.types.errors import DeployError, SpecError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` atomically. New files have mode 0600, new directories 0700. Raises DeployError."""
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
    """Sync a file, or a directory with its content, then rename it to `to`. Raises OSError."""
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
    with suppress(OSError):  # some filesystems cannot sync a directory; the rename itself succeeded
        _sync(path)


def user_dir(variable: str, *below_home: str) -> Path:
    """Return the absolute directory that the environment variable names, or the one below the user's home.

    Raises SpecError if there is neither, as for a container's user id without a passwd entry.
    """
    if directory := os.environ.get(variable):
        return Path(directory).expanduser().absolute()
    try:
        return Path.home().joinpath(*below_home)
    except RuntimeError:
        raise SpecError(
            f"HOME is not set and user id {os.getuid()} has no passwd entry; set {variable} to a writable directory"
        ) from None

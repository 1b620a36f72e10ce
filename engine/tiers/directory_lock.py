"""Exclusive directory for one rank's block files, locked while its process lives.

    <root>/key                      key that signs the blocks; 32 bytes
    <root>/<slot>/rank-<k>/         block files
    <root>/<slot>/rank-<k>.lock     locked by the process that uses them

A replica takes over the blocks of an ended replica on its node, whatever its name. `root` is shared by the replicas of
one deployment and role. All ranks of a replica use the slot that rank 0 chooses. Blocks outlive deployments, so their
key is stored beside them instead of in the deployment. Only the owner can read any of it.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

_KEY_FILE = "key"
_KEY_BYTES = 32


@dataclass(frozen=True)
class DirectoryLock:
    """Lock on one rank's directory. Held until `release` or the end of the process."""

    name: str
    directory: Path
    lock: FileLock

    def release(self) -> None:
        self.lock.release()


def open_key(root: Path) -> bytes:
    """Return the key of all blocks below `root`; the first caller creates it.

    Raises OSError, and PermissionError if other users could have read it.
    """
    _make_private(root)
    path = root / _KEY_FILE
    with suppress(FileExistsError):
        _write_key(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        key = file.read(_KEY_BYTES + 1)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) != _KEY_BYTES:
        raise PermissionError(f"{path} must be a file of {_KEY_BYTES} bytes owned by this user, mode 0600; remove it")
    return key


def choose_lock(root: Path, *, replica: str, rank: int = 0) -> DirectoryLock:
    """Lock the most recently used free slot, or a new one. Raises OSError."""
    _make_private(root)
    for directory in sorted((path for path in root.iterdir() if path.is_dir()), key=_age):
        if found := take_lock(root, name=directory.name, rank=rank):
            return found
    for number in range(1000):
        name = f"{replica}-{number}" if number else replica
        if not (root / name).exists() and (made := take_lock(root, name=name, rank=rank)):
            return made
    raise FileExistsError(f"{root}: all 1000 slots of {replica} are locked")


def take_lock(root: Path, *, name: str, rank: int) -> DirectoryLock | None:
    """Lock this slot. Returns None if another process holds it. Raises OSError."""
    directory = root / name / f"rank-{rank}"
    _make_private(directory.parent)
    _make_private(directory)
    lock = FileLock(root / name / f"rank-{rank}.lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return DirectoryLock(name, directory, lock)


def _make_private(directory: Path) -> None:
    """Create the directory if needed, and make it private to this user. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} must be a directory owned by the serving user")
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def _write_key(path: Path) -> None:
    """Write a new key atomically. Raises FileExistsError if there is one."""
    # mkstemp creates the file with mode 0600.
    descriptor, new = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        os.link(new, path)
    finally:
        os.unlink(new)


def _age(path: Path) -> float:
    """Return a sort key that puts the most recently written slot first."""
    directory = path / "rank-0"
    return -directory.stat().st_mtime if directory.exists() else 0.0

"""A directory for one rank's blocks, which is nobody else's as long as the process lives.

    <root>/key                       seals the blocks; 32 bytes
    <root>/<claim>/rank-<k>/         block files
    <root>/<claim>/rank-<k>.lock     locked by the process that uses them

A replica takes over the blocks of one that has ended on its node, whatever that was called; `root` is for replicas of
one deployment and role. All ranks of a replica use the same claim: rank 0 chooses it. Blocks outlive replicas and
deployments, so their key is not a deployment's: it lies where they lie. All of it is for its owner's eyes alone.
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
    """Held until it is released, or the process has ended."""

    name: str
    directory: Path
    lock: FileLock

    def release(self) -> None:
        self.lock.release()


def open_key(root: Path) -> bytes:
    """The key of all blocks below `root`; made by whoever comes first. Raises OSError, PermissionError where somebody
    else could have read it."""
    _make_private(root)
    path = root / _KEY_FILE
    with suppress(FileExistsError):
        _write_key(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        key = file.read(_KEY_BYTES + 1)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) != _KEY_BYTES:
        raise PermissionError(f"{path} must be a file of {_KEY_BYTES} bytes that its owner alone can read; remove it")
    return key


def choose_lock(root: Path, *, replica: str, rank: int = 0) -> DirectoryLock:
    """A claim that nobody holds, the one used last if there are several; or a new one. Raises OSError."""
    _make_private(root)
    for directory in sorted((path for path in root.iterdir() if path.is_dir()), key=_age):
        if found := take_lock(root, name=directory.name, rank=rank):
            return found
    for number in range(1000):
        name = f"{replica}-{number}" if number else replica
        if not (root / name).exists() and (made := take_lock(root, name=name, rank=rank)):
            return made
    raise FileExistsError(f"{root}: a thousand claims of {replica}")


def take_lock(root: Path, *, name: str, rank: int) -> DirectoryLock | None:
    """This very claim; None if somebody holds it. Raises OSError."""
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
    """Be there, ours, and closed to everybody else. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} must be a directory of the user that serves")
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def _write_key(path: Path) -> None:
    """Whole, or not at all. Raises FileExistsError where there is one."""
    descriptor, new = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        os.link(new, path)
    finally:
        os.unlink(new)


def _age(path: Path) -> float:
    """Smaller if it was written to later."""
    directory = path / "rank-0"
    return -directory.stat().st_mtime if directory.exists() else 0.0

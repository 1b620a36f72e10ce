"""A directory for one rank's blocks, which is nobody else's as long as the process lives.

    <root>/<claim>/rank-<k>/         block files
    <root>/<claim>/rank-<k>.lock     locked by the process that uses them

A replica takes over the blocks of one that has ended on its node, whatever that was called; `root` is for replicas of
one deployment and role. All ranks of a replica use the same claim: rank 0 chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout


@dataclass(frozen=True)
class Claim:
    """Held until it is released, or the process has ended."""

    name: str
    directory: Path
    lock: FileLock

    def release(self) -> None:
        self.lock.release()


def choose_claim(root: Path, *, replica: str, rank: int = 0) -> Claim:
    """A claim that nobody holds, the one used last if there are several; or a new one. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    for directory in sorted((path for path in root.iterdir() if path.is_dir()), key=_age):
        if found := take_claim(root, name=directory.name, rank=rank):
            return found
    for number in range(1000):
        name = f"{replica}-{number}" if number else replica
        if not (root / name).exists() and (made := take_claim(root, name=name, rank=rank)):
            return made
    raise FileExistsError(f"{root}: a thousand claims of {replica}")


def take_claim(root: Path, *, name: str, rank: int) -> Claim | None:
    """This very claim; None if somebody holds it. Raises OSError."""
    directory = root / name / f"rank-{rank}"
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / name / f"rank-{rank}.lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return Claim(name, directory, lock)


def _age(path: Path) -> float:
    """Smaller if it was written to later."""
    directory = path / "rank-0"
    return -directory.stat().st_mtime if directory.exists() else 0.0

"""Fake disks: a full one, and one that records what is synced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsync fail with ENOSPC while `monkeypatch` lasts: filesystems may detect a full disk only then."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


class FakeDisk:
    """Disk that records each synced path, and whether `renamed` existed by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, renamed: Path) -> None:
        self._renamed = renamed
        self.synced: list[tuple[Path, bool]] = []
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), self._renamed.exists()))

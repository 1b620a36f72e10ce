"""Disks on which there is no room, and those that note what has reached them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as `monkeypatch` lasts: only when it is told to write does a filesystem find that it has no room."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


class FakeDisk:
    """Notes what is synced, and whether anything was called `renamed` by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, renamed: Path) -> None:
        self._renamed = renamed
        self.synced: list[tuple[Path, bool]] = []
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), self._renamed.exists()))

"""Fake disks: a full one, one that hangs, and one that records what is synced."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsync fail with ENOSPC while `monkeypatch` lasts: filesystems may detect a full disk only then."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def hang_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let reads of the disk tiers in this process wait, at most 30 s each, until the event is set."""
    from engine.tiers.disk_store import DiskStore  # here: it imports torch

    goes_on, get = threading.Event(), DiskStore.get

    def hang(store: DiskStore, place: int, prefix_hash: bytes) -> Any:
        goes_on.wait(30)
        return get(store, place, prefix_hash)

    monkeypatch.setattr(DiskStore, "get", hang)
    return goes_on


class FakeDisk:
    """Disk that records each synced path, and whether `renamed` existed at that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, renamed: Path) -> None:
        self._renamed = renamed
        self.synced: list[tuple[Path, bool]] = []
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), self._renamed.exists()))

"""Atomic writes under power failures, full disks and concurrent readers; and a user's directories."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from core.process.atomic_file import move_whole, user_dir, write_whole
from core.types.errors import DeployError, SpecError
from tests.support.disks import FakeDisk, fill_disk


def test_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "state.json"
    for text in ("one", "zwölf"):
        write_whole(file, text)
        assert file.read_text() == text and list(file.parent.iterdir()) == [file]
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]


def test_content_is_synced_before_the_rename_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk(monkeypatch, renamed=tmp_path / "file")
    write_whole(tmp_path / "file", "text")
    [(content, is_early), name] = disk.synced
    assert content.parent == tmp_path and content.name.startswith(".file-") and not is_early
    assert name == (tmp_path, True)


def test_directory_is_moved_after_its_content_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, place = tmp_path / "made", tmp_path / "place"
    paths = [made, made / "a", made / "deeper", made / "deeper" / "b"]
    paths[2].mkdir(parents=True)
    for file in (paths[1], paths[3]):
        file.write_text("text")
    disk = FakeDisk(monkeypatch, renamed=place)
    move_whole(made, place)
    assert sorted(disk.synced[:-1]) == [(path, False) for path in paths] and disk.synced[-1] == (tmp_path, True)
    assert (place / "deeper" / "b").read_text() == "text" and not made.exists()


def test_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    fill_disk(monkeypatch)
    with pytest.raises(DeployError, match=f"{file}: No space left on device"):
        write_whole(file, "after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_filesystem_without_directory_sync_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_variable_comes_before_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CLUSTER_X", raising=False)
    assert user_dir("CLUSTER_X", ".cache", "xpyd") == tmp_path / ".cache" / "xpyd"
    monkeypatch.setenv("CLUSTER_X", "~/elsewhere")
    assert user_dir("CLUSTER_X", ".cache") == tmp_path / "elsewhere"


def test_user_id_without_a_home_is_told_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("CLUSTER_X", raising=False)
    with pytest.raises(SpecError, match=r"HOME is not set and user id \d+ has no passwd entry; set CLUSTER_X to a"):
        user_dir("CLUSTER_X")

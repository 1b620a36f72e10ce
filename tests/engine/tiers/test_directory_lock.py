"""Directory locks on one node: exclusive while held, and reused afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.tiers.directory_lock import choose_lock, open_key, take_lock


def test_replicas_get_separate_directories(tmp_path: Path) -> None:
    one, other = (choose_lock(tmp_path, replica=name) for name in ("prefill-0", "prefill-1"))
    assert one.directory != other.directory
    one.release()
    other.release()


def test_successor_locks_the_most_recent_slot(tmp_path: Path) -> None:
    first, second = (choose_lock(tmp_path, replica=name) for name in ("prefill-0", "prefill-1"))
    os.utime(first.directory, (2000, 2000))
    os.utime(second.directory, (1000, 1000))
    first.release()
    second.release()
    successors = [choose_lock(tmp_path, replica=f"prefill-{number}") for number in (2, 3, 4)]
    assert [lock.name for lock in successors] == ["prefill-0", "prefill-1", "prefill-4"]
    for lock in successors:
        lock.release()


def test_new_slot_name_is_unique(tmp_path: Path) -> None:
    old = choose_lock(tmp_path, replica="prefill-0")
    new = choose_lock(tmp_path, replica="prefill-0")
    assert (old.name, new.name) == ("prefill-0", "prefill-0-1")
    old.release()
    new.release()


def test_ranks_of_a_replica_share_a_slot(tmp_path: Path) -> None:
    leader = choose_lock(tmp_path, replica="decode-0")
    follower = take_lock(tmp_path, name=leader.name, rank=1)
    assert follower and follower.directory.parent == leader.directory.parent != follower.directory
    assert take_lock(tmp_path, name=leader.name, rank=1) is None
    leader.release()
    follower.release()


def test_killed_process_releases_its_lock(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys; from engine.tiers.directory_lock import choose_lock;"
        "choose_lock(pathlib.Path(sys.argv[1]), replica='prefill-0'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    lock = choose_lock(tmp_path, replica="prefill-1")
    assert lock.name == "prefill-0"
    lock.release()


def _modes(root: Path) -> set[int]:
    """Return the group and other permission bits of `root` and everything below."""
    return {path.stat().st_mode & 0o077 for path in (root, *root.rglob("*"))}


def test_directories_and_locks_are_private(tmp_path: Path) -> None:
    root = tmp_path / "blocks"
    (root / "prefill-0" / "rank-0").mkdir(parents=True, mode=0o755)
    for directory in (root, root / "prefill-0", root / "prefill-0" / "rank-0"):
        directory.chmod(0o777)
    open_key(root)
    claims = [choose_lock(root, replica="prefill-0"), choose_lock(root, replica="prefill-1")]
    assert _modes(root) == {0}
    for lock in claims:
        lock.release()


def test_key_is_created_once_and_outlives_replicas(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: open_key(tmp_path / "blocks"), range(8)))
    assert len(keys) == 1 and keys == {open_key(tmp_path / "blocks")} and len(next(iter(keys))) == 32
    assert [path.name for path in (tmp_path / "blocks").iterdir()] == ["key"]
    assert open_key(tmp_path / "others") not in keys


def test_key_readable_or_owned_by_others_is_rejected(tmp_path: Path) -> None:
    open_key(tmp_path)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(PermissionError, match="mode 0600"):
        open_key(tmp_path)
    (tmp_path / "key").unlink()
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        open_key(tmp_path)
    (tmp_path / "key").unlink()
    (tmp_path / "key").touch(mode=0o600)
    with pytest.raises(PermissionError, match="32 bytes"):
        open_key(tmp_path)

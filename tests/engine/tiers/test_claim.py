"""Directories on one node: nobody shares one, and nobody's blocks are forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.tiers.claim import choose_claim, take_claim


def test_two_replicas_have_two_directories(tmp_path: Path) -> None:
    one, other = (choose_claim(tmp_path, replica=name) for name in ("prefill-0", "prefill-1"))
    assert one.directory != other.directory
    one.release()
    other.release()


def test_a_successor_takes_over_what_was_used_last(tmp_path: Path) -> None:
    first, second = (choose_claim(tmp_path, replica=name) for name in ("prefill-0", "prefill-1"))
    os.utime(first.directory, (2000, 2000))
    os.utime(second.directory, (1000, 1000))
    first.release()
    second.release()
    successors = [choose_claim(tmp_path, replica=f"prefill-{number}") for number in (2, 3, 4)]
    assert [claim.name for claim in successors] == ["prefill-0", "prefill-1", "prefill-4"]
    for claim in successors:
        claim.release()


def test_a_new_claim_never_has_the_name_of_one_that_is_held(tmp_path: Path) -> None:
    old = choose_claim(tmp_path, replica="prefill-0")
    new = choose_claim(tmp_path, replica="prefill-0")
    assert (old.name, new.name) == ("prefill-0", "prefill-0-1")
    old.release()
    new.release()


def test_the_ranks_of_a_replica_use_one_claim(tmp_path: Path) -> None:
    leader = choose_claim(tmp_path, replica="decode-0")
    follower = take_claim(tmp_path, name=leader.name, rank=1)
    assert follower and follower.directory.parent == leader.directory.parent != follower.directory
    assert take_claim(tmp_path, name=leader.name, rank=1) is None
    leader.release()
    follower.release()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys; from engine.tiers.claim import choose_claim;"
        "choose_claim(pathlib.Path(sys.argv[1]), replica='prefill-0'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    claim = choose_claim(tmp_path, replica="prefill-1")
    assert claim.name == "prefill-0"
    claim.release()

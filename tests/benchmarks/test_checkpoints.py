"""Prefix reuse that `python -m benchmarks checkpoints` reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.app import run
from benchmarks.checkpoints.replay import routes
from core.trace.trace import read_trace
from planner.simulator.prefix_hashes import hashes_of

# Arrivals in ms, prompts and answers in tokens, ids of 128 tokens. The second request is the next turn of the first.
# The last two share only 128 tokens with others.
_REQUESTS = [
    (0, 300, 200, [0, 1, 2]),
    (10_000, 510, 10, [0, 1, 3, 4]),
    (20_000, 300, 10, [0, 5, 6]),
    (30_000, 300, 10, [0, 7, 8]),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [dict(zip(keys, request, strict=True)) | {"tokens_per_id": 128} for request in _REQUESTS]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reuse_by_rule(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "end": 256,
        "sight": 256 + 128,
        "sight+answers": 384 + 128,
        "128": 256 + 128 + 128,
        "free": 448 + 128 + 128,
    }
    options = ["--rules", ",".join(expected), "--shares", "default,50", "--replicas", "1", "--gib", "8"]
    assert run(["checkpoints", str(trace), *options, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row in rows:
        assert row["reused"] == pytest.approx(expected[row["rule"]] / 1410, abs=1e-4) and row["evicted"] == 0
    assert [row["share"] for row in rows] == ["default", "50"] * 4 + ["0"]
    # 30 layers of 2 MiB and 48 KiB per state, 10 of 2 KiB per token.
    assert {(row["states"], row["blocks"]) for row in rows} == {(66, 3311), (0, 6553)}
    end, *_ = rows
    assert (end["checkpoints"], end["used"]) == (4, 1)


def test_states_evict_each_other(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rules", "end", "--shares", "1", "--replicas", "1", "--gib", "12"]
    assert run(["checkpoints", str(trace), *options]) == 0
    line = capsys.readouterr().out
    assert "2 states of 0.12 GiB; 18.16% of prompt tokens reused; 4 checkpoints made, 1 used, 3 evicted" in line


def test_next_turn_contains_the_answer(trace: Path) -> None:
    first, second, *others = hashes_of(read_trace(trace), 64)
    assert first == second[:7] and first[:2] == others[0][:2] == others[1][:2]
    assert first[2] != others[0][2] != others[1][2]


def test_conversations_stay_on_a_replica(trace: Path) -> None:
    assert routes(read_trace(trace), 2) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--rules", "start"], "--rules start: join some of end, sight"),
        (["--rules", "100"], "--rules 100: checkpoints are at multiples of the block size, 64 tokens"),
        (["--shares", "100"], "--shares 100: write default, or percents below 100"),
    ],
)
def test_invalid_options_are_rejected(
    options: list[str], error: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", str(trace), *options]) == 2
    assert error in capsys.readouterr().err

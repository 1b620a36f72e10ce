"""Reading of traces, and the prompts synthesized from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench.replay import prompt_of
from core.trace.trace import TraceRequest, poisson, read_trace
from core.types.errors import SpecError


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}]
    rows.append({"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [7]})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_traces_of_both_formats_are_read(mooncake: Path) -> None:
    first, second = read_trace(mooncake, speedup=2.0)
    assert (first.ids, first.arrival_s, first.num_output, second.arrival_s) == ((7,), 0.0, 1, 1.0)
    assert read_trace(mooncake, max_requests=1) == [read_trace(mooncake)[0]]
    azure = mooncake.with_suffix(".csv")
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert read_trace(azure)[0].num_tokens == 374
    for broken in ("not json", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', ""):
        mooncake.write_text(broken)
        with pytest.raises(SpecError):
            read_trace(mooncake)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", '{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}'),
        ("t.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}'),
        ("t.jsonl", '{"timestamp": 0, "input_length": Infinity, "output_length": 1, "hash_ids": [1]}'),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1e30, "hash_ids": [1]}'),
        ("t.jsonl", '{"timestamp": "now", "input_length": 1, "output_length": 1, "hash_ids": [1]}'),
        ("t.jsonl", "[1, 2]"),
        ("t.jsonl", "[" * 100_000),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,99999999999,1\n"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n"),
        ("t.csv", "TIMESTAMP,ContextTokens\n" + "x" * 200_000),
    ],
)
def test_invalid_values_are_one_line(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(SpecError, match="not a trace in"):
        read_trace(path)


def test_a_scaled_trace_has_shorter_blocks(mooncake: Path) -> None:
    _, request = read_trace(mooncake, scale="1/16")
    assert (request.num_tokens, request.num_output, request.tokens_per_id) == (38, 1, 32)
    for scale in ("1/3", "0", "-1/16", "much", "1/0"):
        with pytest.raises(SpecError, match="--scale-tokens"):
            read_trace(mooncake, scale=scale)


def test_random_arrivals_have_the_requested_rate() -> None:
    trace = poisson(rate=10.0, num_requests=2000, num_tokens=8, num_output=4, seed=1)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals) and arrivals[-1] / 2000 == pytest.approx(0.1, rel=0.1)
    assert trace == poisson(rate=10.0, num_requests=2000, num_tokens=8, num_output=4, seed=1)


def test_prompts_are_equal_for_equal_ids_only() -> None:
    def tokens(number: int, ids: tuple[int, ...] | None, *, seed: int = 0) -> list[int]:
        request = TraceRequest(number=number, arrival_s=0, num_tokens=50, num_output=1, ids=ids, tokens_per_id=32)
        return prompt_of(request, seed=seed)

    assert tokens(0, (1, 2)) == tokens(1, (1, 2)) and len(tokens(0, (1, 2))) == 50
    assert tokens(0, (1, 2))[:32] == tokens(0, (1, 3))[:32] and tokens(0, (1, 2))[32:] != tokens(0, (1, 3))[32:]
    assert tokens(0, (1, 2)) != tokens(0, (1, 2), seed=1)
    others = [tokens(0, None), tokens(1, None), tokens(0, (0, 1))]
    assert len({tuple(other[:32]) for other in others}) == 3

"""Traffic traces: arrival times, lengths and shared prefixes of requests.

mooncake   JSONL: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens: equal ids, equal prefixes);
           tokens_per_id overrides the 512, as in files of `cluster capture`
azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; without shared prefixes

`cluster bench` replays them against a deployment, `cluster simulate` against a simulated one.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path

from core.types.errors import SpecError

TOKENS_PER_ID = 512
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """Request of a trace. `ids` name its blocks of `tokens_per_id` tokens; None: it shares no prefix."""

    number: int
    arrival_s: float  # after the first request
    num_tokens: int
    num_output: int
    ids: tuple[int, ...] | None
    tokens_per_id: int = TOKENS_PER_ID


def read_trace(
    path: Path, *, speedup: float = 1.0, scale: str = "1", max_requests: int | None = None
) -> list[TraceRequest]:
    """Return the requests in order of arrival, `speedup` times as fast, with all lengths times `scale`.

    A .csv file is in Azure's format, any other in Mooncake's. scale: such as "1/16"; the scaled blocks must have whole
    numbers of tokens. Raises SpecError.
    """
    factor = _fraction(scale)
    if not 0 < speedup < math.inf:
        raise SpecError(f"--speedup {speedup:g}: must be above 0, and finite")
    kind = "azure" if path.suffix == ".csv" else "mooncake"
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = sorted(_azure(lines) if kind == "azure" else _mooncake(lines), key=lambda row: row[0])
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        raise SpecError(f"{path}: not a trace in {kind} format: {error}") from None
    if not rows:
        raise SpecError(f"{path}: contains no requests")
    begin = rows[0][0]
    return [
        TraceRequest(
            number=number,
            arrival_s=(when - begin) / speedup,
            num_tokens=math.ceil(num_tokens * factor),
            num_output=math.ceil(num_output * factor),
            ids=ids,
            tokens_per_id=_scaled(tokens_per_id, factor),
        )
        for number, (when, num_tokens, num_output, ids, tokens_per_id) in enumerate(rows[:max_requests])
    ]


def poisson(*, rate: float, num_requests: int, num_tokens: int, num_output: int, seed: int) -> list[TraceRequest]:
    """Return requests without shared prefixes, with Poisson arrivals at `rate` per second, all equally long."""
    draw = random.Random(seed)
    arrivals = [0.0, *itertools.accumulate(draw.expovariate(rate) for _ in range(num_requests - 1))]
    return [
        TraceRequest(number=number, arrival_s=when, num_tokens=num_tokens, num_output=num_output, ids=None)
        for number, when in enumerate(arrivals)
    ]


def _fraction(scale: str) -> Fraction:
    try:
        factor = Fraction(scale)
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if factor <= 0 or (TOKENS_PER_ID * factor).denominator != 1:
        raise SpecError(
            f"--scale-tokens {scale}: write a share such as 1/16 that leaves {TOKENS_PER_ID} a whole number"
        )
    return factor


def write_trace(trace: Sequence[TraceRequest], path: Path) -> None:
    """Write the trace in mooncake format. Requests without ids get unique ones."""
    unknown = 1 + max((id for request in trace for id in request.ids or ()), default=0)
    with path.open("w", encoding="utf-8") as lines:
        for request in trace:
            num_ids = -(-request.num_tokens // request.tokens_per_id)
            ids = request.ids or range(unknown, unknown := unknown + num_ids)
            row = {
                "timestamp": round(request.arrival_s * 1e3, 3),
                "input_length": request.num_tokens,
                "output_length": request.num_output,
                "hash_ids": [*ids[:num_ids]],
                "tokens_per_id": request.tokens_per_id,
            }
            print(json.dumps(row), file=lines)


def _scaled(tokens_per_id: int, factor: Fraction) -> int:
    scaled = tokens_per_id * factor
    if scaled.denominator != 1:
        raise SpecError(f"--scale-tokens {factor}: blocks of {tokens_per_id} tokens must stay whole numbers")
    return int(scaled)


_Row = tuple[float, int, int, tuple[int, ...] | None, int]


def _mooncake(lines: Iterator[str]) -> Iterator[_Row]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            ids = tuple(int(id) for id in row["hash_ids"])
            num_tokens = int(row["input_length"])
            tokens_per_id = _count(int(row.get("tokens_per_id", TOKENS_PER_ID)))
            if len(ids) * tokens_per_id < num_tokens:
                raise ValueError(f"{len(ids)} hash_ids do not cover {num_tokens} tokens")
            if not math.isfinite(when := row["timestamp"] / 1e3):
                raise ValueError(f"timestamp {when} is not finite")
            yield when, _count(num_tokens), _count(int(row["output_length"])), ids, tokens_per_id


def _azure(lines: Iterator[str]) -> Iterator[_Row]:
    for row in csv.DictReader(lines):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield when, _count(int(row["ContextTokens"])), _count(int(row["GeneratedTokens"])), None, TOKENS_PER_ID


def _count(number: int) -> int:
    """Check a number of tokens; the minimum is one."""
    if number > _MAX_TOKENS:
        raise ValueError(f"{number} tokens exceed the limit of {_MAX_TOKENS}")
    return max(1, number)

"""Traces of real traffic: when requests came, how long they were, and which of them began alike.

mooncake   JSONL: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens: equal ids, equal prefixes)
azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing is known of shared prefixes
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cluster.errors import SpecError
from cluster.hashing import HASH_BYTES

_TOKENS_PER_ID = 512
_MIX = 0x9E3779B97F4A7C15F39CC0605CEDC835  # odd: spreads consecutive ids over all bits of a hash


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One request of a trace. `ids` name its 512-token blocks; None: it shares nothing with anyone."""

    number: int
    arrival_s: float  # after the first
    num_tokens: int
    num_output: int
    ids: tuple[int, ...] | None


def read_trace(path: Path, *, format: str | None = None, speedup: float = 1.0) -> list[TraceRequest]:
    """All requests in order of arrival, `speedup` times as fast. Raises SpecError.

    format: "mooncake" or "azure"; None: what the file's name says.
    """
    kind = format or ("azure" if path.suffix == ".csv" else "mooncake")
    try:
        with path.open(newline="") as lines:
            rows = sorted(_azure(lines) if kind == "azure" else _mooncake(lines), key=lambda row: row[0])
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: not a trace in {kind} format: {error}") from None
    if not rows:
        raise SpecError(f"{path}: holds no request")
    begin = rows[0][0]
    return [
        TraceRequest(
            number=number, arrival_s=(when - begin) / speedup, num_tokens=num_tokens, num_output=num_output, ids=ids
        )
        for number, (when, num_tokens, num_output, ids) in enumerate(rows)
    ]


class PrefixHashes:
    """The prefix hashes of a trace's requests. An id already names everything before it, so nothing is chained."""

    def __init__(self, block_size: int) -> None:
        """Raises SpecError unless `block_size` divides 512."""
        if _TOKENS_PER_ID % block_size:
            raise SpecError(f"block size {block_size} does not divide the trace's {_TOKENS_PER_ID}")
        self._block_size = block_size
        self._blocks_per_id = _TOKENS_PER_ID // block_size
        self._of_id: dict[int, list[bytes]] = {}

    def of(self, request: TraceRequest) -> list[bytes]:
        """One hash per full block of the prompt."""
        num_full = request.num_tokens // self._block_size
        ids = request.ids
        if ids is None:  # negative ids are nobody else's
            first = -(request.number + 1) << 16
            ids = tuple(range(first, first + request.num_tokens // _TOKENS_PER_ID + 1))
        hashes: list[bytes] = []
        for id in ids:
            hashes += self._of_id.get(id) or self._expand(id)
        return hashes[:num_full]

    def _expand(self, id: int) -> list[bytes]:
        first = id * self._blocks_per_id + 1
        hashes = [
            (number * _MIX % (1 << 8 * HASH_BYTES)).to_bytes(HASH_BYTES, "big")
            for number in range(first, first + self._blocks_per_id)
        ]
        if id >= 0:
            self._of_id[id] = hashes
        return hashes


_Row = tuple[float, int, int, tuple[int, ...] | None]


def _mooncake(lines: Iterator[str]) -> Iterator[_Row]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            ids = tuple(int(id) for id in row["hash_ids"])
            num_tokens = int(row["input_length"])
            if len(ids) * _TOKENS_PER_ID < num_tokens:
                raise ValueError(f"{len(ids)} hash_ids do not cover {num_tokens} tokens")
            yield row["timestamp"] / 1e3, max(1, num_tokens), max(1, int(row["output_length"])), ids


def _azure(lines: Iterator[str]) -> Iterator[_Row]:
    for row in csv.DictReader(lines):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield when, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), None

"""The unit that travels: a run of layers and positions, how its arrival is proved, and how long it may take. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A link slower than this counts as broken. With a round trip of 40 ms and one packet in a hundred lost, CUBIC has 0.4
# to 0.9 MB/s of 100 Mbit/s (docs/OPERATING.md, "Slow networks").
_MIN_BYTES_PER_S = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of layers, a run of positions, and a run of the heads of one rank."""

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.first_head + self.num_heads)


def combine_checksums(checksums: Iterable[int]) -> int:
    """The checksum of a commit: of its segments' checksums in their order."""
    return sum(value * (2 * i + 1) for i, value in enumerate(checksums)) % 2**64


def operation_timeout(timeout_s: float, num_bytes: int) -> float:
    """The deadline of one operation: `timeout_s` for the peer to answer at all, and time for the bytes themselves."""
    return timeout_s + num_bytes / _MIN_BYTES_PER_S

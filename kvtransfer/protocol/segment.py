"""Segment of KV that one payload carries, its checksums and its deadline. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A slower link counts as broken. With a round trip of 40 ms and 1 % packet loss, CUBIC reaches 0.4 to 0.9 MB/s on
# 100 Mbit/s (docs/OPERATING.md, "Slow networks").
_MIN_BYTES_PER_S = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Contiguous ranges of layers and positions.

    Layers with a window, if their blocks are freed, have only the positions from `window_start` on.
    """

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    window_start: int = 0  # the same for all segments of a handoff; see CacheShape.window_start

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def first_window_token(self) -> int:
        """First position of layers with a window."""
        return max(self.first_token, self.window_start)

    @property
    def num_window_tokens(self) -> int:
        """Number of positions of layers with a window."""
        return max(0, self.end_token - self.first_window_token)


def combine_checksums(checksums: Iterable[int]) -> int:
    """Return a commit's checksum. It depends on the order of the segments' checksums."""
    return sum(value * (2 * i + 1) for i, value in enumerate(checksums)) % 2**64


def operation_timeout(timeout_s: float, num_bytes: int) -> float:
    """Return the timeout of one link operation in seconds.

    timeout_s: time for the peer to respond; the time to move `num_bytes` is added.
    """
    return timeout_s + num_bytes / _MIN_BYTES_PER_S

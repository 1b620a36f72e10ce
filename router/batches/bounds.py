"""How much is kept of batches, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

ENTRY_BYTES = 1024  # that a file or a batch counts beside what is in it
PART_BYTES = 128  # that a part of a file counts beside what is in it: a short line costs Redis about as much
MAX_FILE_BYTES = 100 * 2**20
MAX_LINES = 50_000  # of an input file, as OpenAI has it
MAX_LINE_BYTES = 2**20
MAX_CUSTOM_ID = 512  # characters
MAX_FILES, MAX_BATCHES = 1000, 200  # of one tenant, whatever has become of them
KEEP_S = 7 * 86_400.0  # a file after it was made, a batch after its end
WINDOW_S = 86_400.0  # a batch has so long


@dataclass(frozen=True, kw_only=True)
class BatchBounds:
    """Of all that is kept in Redis. Nothing goes before its time: what is full refuses."""

    max_bytes: int  # of all tenants; 0: there are no batches
    keep_s: float = KEEP_S
    window_s: float = WINDOW_S
    max_files: int = MAX_FILES
    max_batches: int = MAX_BATCHES
    max_lines: int = MAX_LINES

    @property
    def max_of_tenant(self) -> int:
        """Bytes, of input and answers."""
        return self.max_bytes // 2

    @property
    def max_file_bytes(self) -> int:
        return min(MAX_FILE_BYTES, self.max_of_tenant)

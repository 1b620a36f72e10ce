"""Disk tier: block files, written asynchronously."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from engine.tiers.block_file import Stamp, read_block, read_hash, write_block

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
_MAX_QUEUED_BYTES = 256 << 20
_CLOSE_S = 5.0


class DiskStore:
    """Implements BlockStore with one file per place, in a directory that belongs to this rank alone.

    A background thread first scans the files of an earlier process (`take_found`), then writes. `put` drops blocks
    while the scan runs and when the queue is full. The first write error disables writing, with one warning; existing
    files stay readable.
    """

    def __init__(
        self,
        directory: Path,
        stamp: Stamp,
        *,
        num_places: int,
        max_queued_bytes: int = _MAX_QUEUED_BYTES,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """ended: called on the writer thread when it no longer touches the directory."""
        self.num_places = num_places
        self.num_dropped = 0
        self._directory = directory
        self._stamp = stamp
        self._max_queued = max(1, max_queued_bytes // stamp.payload_bytes)
        # By place, including the block being written.
        self._queued: dict[int, tuple[bytes, Tensor]] = {}
        self._order: deque[int] = deque()
        # Guards all of these.
        self._changed = threading.Condition()
        self._found: dict[int, bytes] = {}
        self._lost: list[tuple[int, bytes]] = []
        self._has_looked = False
        self._is_writable = True
        self._is_closing = False
        self._ended = ended
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        self._thread.start()

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        with self._changed:
            is_known = place in self._queued
            has_room = is_known or len(self._queued) < self._max_queued
            if not (self._has_looked and self._is_writable and has_room):
                self.num_dropped += 1
                return False
            self._queued[place] = (prefix_hash, payload.to("cpu", copy=True))
            if place not in self._order:
                self._order.append(place)
            self._changed.notify_all()
            return True

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        with self._changed:
            queued = self._queued.get(place)
        if queued:
            return queued[1] if queued[0] == prefix_hash else None
        path = self._path(place)
        try:
            payload = read_block(path, self._stamp, prefix_hash)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("KV block %s cannot be read: %s", path, error)
            return None
        if payload is None:
            logger.warning("deleted KV block %s: content does not match its header", path)
            self._delete(path)
        return payload

    @property
    def num_free_in_queue(self) -> int:
        """Number of further blocks that `put` would accept now."""
        with self._changed:
            is_taking = self._has_looked and self._is_writable
            return self._max_queued - len(self._queued) if is_taking else 0

    def take_found(self) -> dict[int, bytes]:
        """Return blocks of an earlier process by place, the oldest first, and clear the list."""
        with self._changed:
            found, self._found = self._found, {}
        return found

    def take_lost(self) -> list[tuple[int, bytes]]:
        """Return accepted blocks that could not be written, and clear the list."""
        with self._changed:
            lost, self._lost = self._lost, []
        return lost

    def wait_until_written(self, *, timeout_s: float) -> bool:
        """Wait until the scan is done and the queue is empty. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_looked and not self._queued, timeout_s)

    def close(self) -> None:
        """Write the queued blocks, for at most _CLOSE_S seconds, and stop the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        found = self._look()
        with self._changed:
            self._found, self._has_looked = found, True
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._order or self._is_closing)
                if not self._order:
                    break
                place = self._order.popleft()
                prefix_hash, payload = block = self._queued[place]
            is_written = self._write(place, prefix_hash, payload)
            with self._changed:
                if self._queued[place] is block:
                    del self._queued[place]
                if not is_written:
                    self._lost.append((place, prefix_hash))
                self._changed.notify_all()
        self._ended()

    def _look(self) -> dict[int, bytes]:
        """Return the valid files of an earlier process, by age; deletes invalid files and those without a place."""
        found: list[tuple[float, int, bytes]] = []
        for path in self._directory.iterdir():
            try:
                is_place = path.suffix == _SUFFIX and path.stem.isdigit() and int(path.stem) < self.num_places
                prefix_hash = read_hash(path, self._stamp) if is_place else None
                if prefix_hash:
                    found.append((path.stat().st_mtime, int(path.stem), prefix_hash))
                else:
                    self._delete(path)
            except OSError as error:
                logger.warning("KV block %s cannot be read: %s", path, error)
        return {place: prefix_hash for _, place, prefix_hash in sorted(found)}

    def _write(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        if self._is_writable:
            try:
                write_block(self._path(place), self._stamp, prefix_hash, payload)
                return True
            except OSError as error:
                self._is_writable = False
                logger.warning("stopped writing KV blocks to %s: %s", self._directory, error)
        # The file of the previous block in this place.
        self._delete(self._path(place))
        return False

    def _path(self, place: int) -> Path:
        return self._directory / f"{place:08d}{_SUFFIX}"

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", path, error)

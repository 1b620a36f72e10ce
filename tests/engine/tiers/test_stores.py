"""Conformance suite of block stores, and faults of files."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from engine.tiers import disk_store
from engine.tiers.block_file import Stamp, write_block
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import BlockStore, HostStore

_LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=(2, 1), head_dim=(8, 32), block_size=4, dtype="fp8_e4m3")
_KEY = bytes(range(32))
_STAMP = Stamp(_LAYOUT, rank=0, key=_KEY)
_NUM_PLACES = 6
_WAIT_S = 10.0


def _hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _payload(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (_LAYOUT.block_bytes,), dtype=torch.uint8, generator=generator)


def _disk(directory: Path, stamp: Stamp = _STAMP, **changes: Any) -> DiskStore:
    store = DiskStore(directory, stamp, num_places=_NUM_PLACES, **changes)
    assert store.wait_until_written(timeout_s=_WAIT_S)
    return store


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    if request.param == "host":
        made: BlockStore = HostStore(
            num_places=_NUM_PLACES, place_bytes=_LAYOUT.place_bytes, device=torch.device("cpu")
        )
    else:
        made = _disk(tmp_path)
    yield made
    made.close()


def _settle(store: BlockStore) -> None:
    if isinstance(store, DiskStore):
        assert store.wait_until_written(timeout_s=_WAIT_S)


@pytest.mark.parametrize("is_settled", [True, False])
def test_get_returns_the_stored_bytes(store: BlockStore, is_settled: bool) -> None:
    for number in range(_NUM_PLACES):
        assert store.put(number, _hash(number), _payload(number))
    if is_settled:
        _settle(store)
    for number in range(_NUM_PLACES):
        payload = store.get(number, _hash(number))
        assert payload is not None and torch.equal(payload, _payload(number))


def test_another_block_is_a_miss(store: BlockStore) -> None:
    assert store.get(0, _hash(0)) is None
    store.put(0, _hash(0), _payload(0))
    assert store.get(0, _hash(1)) is None
    assert store.get(1, _hash(0)) is None


def test_put_replaces_the_block_of_a_place(store: BlockStore) -> None:
    for number in range(5):
        store.put(3, _hash(number), _payload(number))
    _settle(store)
    assert store.get(3, _hash(3)) is None
    store.put(3, _hash(9), _payload(9))
    _settle(store)
    payload = store.get(3, _hash(9))
    assert payload is not None and torch.equal(payload, _payload(9))


def test_caller_may_reuse_the_payload(store: BlockStore) -> None:
    payload = _payload(1)
    store.put(1, _hash(1), payload)
    payload.zero_()
    _settle(store)
    found = store.get(1, _hash(1))
    assert found is not None and torch.equal(found, _payload(1))


# Disk store only.


def _write(directory: Path, *numbers: int) -> None:
    store = _disk(directory)
    for number in numbers:
        assert store.put(number, _hash(number), _payload(number))
    store.close()


def _file(directory: Path, place: int) -> Path:
    return directory / f"{place:08d}.kv"


def test_later_process_finds_the_blocks(tmp_path: Path) -> None:
    _write(tmp_path, 4, 2, 0)
    for age, place in enumerate((0, 4, 2)):
        os.utime(_file(tmp_path, place), (1000 - age, 1000 - age))
    store = _disk(tmp_path)
    assert list(store.take_found().items()) == [(2, _hash(2)), (4, _hash(4)), (0, _hash(0))]
    assert store.take_found() == {}
    payload = store.get(4, _hash(4))
    assert payload is not None and torch.equal(payload, _payload(4))
    store.close()


def _flip(position: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return flip


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


_HARM: dict[str, Callable[[Path], None]] = {
    "payload": _flip(200),
    "end": _flip(-1),
    "magic": _flip(0),
    "version": _flip(8),
    "prefix hash": _flip(45),
    "signature of the payload": _flip(60),
    "signature of the header": _flip(100),
    "truncated": _truncate,
    "longer": _lengthen,
    "empty": lambda path: path.write_bytes(b""),  # type: ignore[dict-item, return-value]
    "header alone": lambda path: path.write_bytes(path.read_bytes()[:116]),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("harm", _HARM.values(), ids=_HARM)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_harmed_file_is_a_miss_and_is_deleted(
    tmp_path: Path, harm: Callable[[Path], None], is_restarted: bool
) -> None:
    store = _disk(tmp_path)
    store.put(1, _hash(1), _payload(1))
    _settle(store)
    if is_restarted:
        store.close()
    harm(_file(tmp_path, 1))
    if is_restarted:
        store = _disk(tmp_path)
    assert store.get(1, _hash(1)) is None
    assert not _file(tmp_path, 1).exists()
    store.close()


@pytest.mark.parametrize(
    "stamp",
    [
        Stamp(replace(_LAYOUT, model="other"), 0, _KEY),
        # Same size, different meaning.
        Stamp(replace(_LAYOUT, dtype="int8"), 0, _KEY),
        Stamp(_LAYOUT, rank=1, key=_KEY),
        Stamp(_LAYOUT, rank=0, key=bytes(32)),
    ],
    ids=["model", "dtype", "rank", "key"],
)
def test_foreign_file_is_deleted(tmp_path: Path, stamp: Stamp) -> None:
    _write(tmp_path, 0, 1)
    (tmp_path / "00000002.part").write_bytes(b"half")
    (tmp_path / "note.txt").write_text("nothing of ours")
    store = _disk(tmp_path, stamp)
    assert store.take_found() == {} and list(tmp_path.iterdir()) == []
    store.close()


def test_a_block_that_was_moved_or_made_without_the_key_is_a_miss(tmp_path: Path) -> None:
    """An attacker with write access to the directory can only cause misses."""
    _write(tmp_path, 0, 1)
    forged = Stamp(_LAYOUT, rank=0, key=bytes(32))
    write_block(_file(tmp_path, 0), forged, _hash(0), _payload(7))
    ours, theirs = _file(tmp_path, 1).read_bytes(), _payload(7).numpy().tobytes()
    # Keep the header and replace the payload.
    _file(tmp_path, 1).write_bytes(ours[: -len(theirs)] + theirs)
    store = _disk(tmp_path)
    assert store.get(0, _hash(0)) is None and store.get(1, _hash(1)) is None
    store.close()


def test_nobody_else_can_read_a_block_and_a_link_to_elsewhere_is_neither_read_nor_written(tmp_path: Path) -> None:
    blocks, elsewhere = tmp_path / "blocks", tmp_path / "elsewhere"
    blocks.mkdir()
    elsewhere.write_text("not ours")
    store = _disk(blocks)
    _file(blocks, 0).with_suffix(".part").symlink_to(elsewhere)
    store.put(0, _hash(0), _payload(0))
    _settle(store)
    assert stat.S_IMODE(_file(blocks, 0).stat().st_mode) == 0o600
    assert store.get(0, _hash(0)) is not None and elsewhere.read_text() == "not ours"
    _file(blocks, 1).symlink_to(_file(blocks, 0))
    assert store.get(1, _hash(0)) is None
    store.close()


def test_smaller_store_deletes_files_without_a_place(tmp_path: Path) -> None:
    _write(tmp_path, 1, 5)
    store = DiskStore(tmp_path, _STAMP, num_places=3)
    assert store.wait_until_written(timeout_s=_WAIT_S)
    assert store.take_found() == {1: _hash(1)} and not _file(tmp_path, 5).exists()
    store.close()


def test_a_disk_that_takes_no_more_ends_the_writing_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, 0, 1)
    store = _disk(tmp_path)
    for place in (1, 2, 3):
        _file(tmp_path, place).with_suffix(".part").mkdir()
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            store.put(number, _hash(10 + number), _payload(number))
            _settle(store)
    assert len(caplog.records) == 1 and "stopped writing KV blocks" in caplog.text
    assert store.take_lost() == [(1, _hash(11))]
    assert not store.put(4, _hash(4), _payload(4))
    assert store.get(0, _hash(0)) is not None and store.get(1, _hash(1)) is None
    store.close()


def test_what_does_not_fit_into_the_queue_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _disk(tmp_path, max_queued_bytes=2 * _LAYOUT.block_bytes)
    goes_on = threading.Event()
    monkeypatch.setattr(disk_store, "write_block", lambda *_: goes_on.wait(_WAIT_S))
    assert [store.put(number, _hash(number), _payload(number)) for number in range(4)] == [True, True, False, False]
    assert store.num_dropped == 2
    goes_on.set()
    _settle(store)
    assert store.put(3, _hash(3), _payload(3))
    store.close()

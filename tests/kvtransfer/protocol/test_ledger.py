"""Acceptance and rejection of frames by the ledger, any order of Open and Close, and results of ranks that differ."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.errors import ChecksumMismatch, HandoffExpired, TransferError
from engine.kv.block_manager import BlockManager
from kvtransfer.protocol import ledger as ledger_module
from kvtransfer.protocol.frames import CommitFrame, Opening, Segment, SegmentFrame, combine_checksums
from kvtransfer.protocol.incoming_transfers import IncomingTransfer, IncomingTransfers
from kvtransfer.protocol.ledger import Landing, Ledger, LedgerState, Register
from kvtransfer.protocol.plan import HeadCopy

_OPENING = Opening(handoff="h", num_tokens=6, max_tokens=6, block_ids=(0, 1, 2))
_COPY = HeadCopy(sender=0, receiver=0, sender_heads=(range(1),) * 2, receiver_heads=(range(1),) * 2)


def _frame(
    start: int, end: int, *, number: int = 0, epoch: int = 1, layers: range = range(2), window_start: int = 0
) -> SegmentFrame:
    segment = Segment(
        first_layer=layers.start,
        num_layers=len(layers),
        first_token=start,
        num_tokens=end - start,
        window_start=window_start,
    )
    return SegmentFrame(handoff="h", epoch=epoch, number=number, segment=segment, num_bytes=1, checksum=10 + number)


def _segment(number: int, *, epoch: int) -> SegmentFrame:
    """Return one of the two segments of every sender."""
    return _frame(*((0, 4), (4, 6))[number], number=number, epoch=epoch)


def _commit(*, epoch: int) -> CommitFrame:
    checksum = combine_checksums([10, 11])
    return CommitFrame(handoff="h", epoch=epoch, num_segments=2, checksum=checksum, num_tokens=6, next_tokens=(epoch,))


def test_first_frame_of_a_newer_epoch_fences_the_older_sender() -> None:
    ledger = Ledger(_OPENING)
    assert ledger.accept(_segment(0, epoch=1), copy=_COPY)
    assert ledger.accept(_segment(0, epoch=2), copy=_COPY), "the newer sender starts over"
    with pytest.raises(HandoffExpired, match="fenced"):
        ledger.accept(_segment(1, epoch=1), copy=_COPY)  # would fit after the first segment
    assert ledger.accept(_segment(1, epoch=2), copy=_COPY)
    with pytest.raises(HandoffExpired, match="fenced"):
        ledger.commit(_commit(epoch=1), copy=_COPY, num_sources=1)  # would fit, too
    landing = ledger.commit(_commit(epoch=2), copy=_COPY, num_sources=1)
    assert landing and (landing.epoch, landing.next_tokens) == (2, (2,))


def test_commit_of_an_older_epoch_after_landing_is_rejected() -> None:
    ledger = Ledger(_OPENING)
    for number in range(2):
        ledger.accept(_segment(number, epoch=2), copy=_COPY)
    ledger.commit(_commit(epoch=2), copy=_COPY, num_sources=1)
    assert ledger.state is LedgerState.LANDED
    with pytest.raises(HandoffExpired, match="fenced"):
        ledger.commit(_commit(epoch=1), copy=_COPY, num_sources=1)
    newer = ledger.commit(_commit(epoch=3), copy=_COPY, num_sources=1)
    assert newer and newer.next_tokens == (3,), "the newest sender reports the next tokens"


def test_an_epoch_is_one_replicas() -> None:
    """Otherwise two replicas could fill a handoff together, or one could corrupt another's."""
    ledger = Ledger(_OPENING)
    ledger.admit(1, sender="prefill-0")
    with pytest.raises(TransferError, match="from prefill-1 rejected: another replica sends it"):
        ledger.admit(1, sender="prefill-1")
    ledger.admit(2, sender="prefill-1")
    with pytest.raises(TransferError, match="another replica sends it"):
        ledger.admit(2, sender="prefill-0")
    ledger.admit(1, sender="prefill-0")  # admitted, and rejected later by `accept`, because its epoch is fenced
    ledger.admit(2, sender="prefill-1")


def test_a_handoff_that_names_its_sender_takes_nothing_from_others() -> None:
    ledger = Ledger(replace(_OPENING, sender="decode-1"))
    for epoch in (1, 9):
        with pytest.raises(TransferError, match="another replica sends it"):
            ledger.admit(epoch, sender="prefill-0")
    ledger.admit(1, sender="decode-1")
    assert ledger.accept(_segment(0, epoch=1), copy=_COPY), "another replica's epoch must not fence it"


def test_layers_with_a_window_begin_later() -> None:
    """Layer 1 has a window; its positions before 4 are not shipped."""
    ledger = Ledger(_OPENING, windowed=frozenset({1}), window_start=4)
    with pytest.raises(TransferError, match="from position 2, not from 4"):
        ledger.accept(_frame(0, 3, window_start=2), copy=_COPY)
    assert ledger.accept(_frame(0, 3, window_start=4), copy=_COPY)
    with pytest.raises(ChecksumMismatch):
        ledger.accept(_frame(3, 4, number=1, layers=range(1, 2), window_start=4), copy=_COPY)  # carries nothing
    with pytest.raises(ChecksumMismatch):
        ledger.accept(_frame(5, 6, number=1, layers=range(1, 2), window_start=4), copy=_COPY)  # position 4 is missing
    assert ledger.accept(_frame(3, 6, number=1, layers=range(1), window_start=4), copy=_COPY)
    with pytest.raises(ChecksumMismatch, match="before all segments"):
        ledger.commit(_commit(epoch=1), copy=_COPY, num_sources=1)
    assert ledger.accept(_frame(3, 6, number=2, layers=range(1, 2), window_start=4), copy=_COPY)
    checksum = combine_checksums([10, 11, 12])
    commit = CommitFrame(handoff="h", epoch=1, num_segments=3, checksum=checksum, num_tokens=6)
    assert ledger.commit(commit, copy=_COPY, num_sources=1)


def test_second_open_keeps_the_first_entry() -> None:
    """The first entry holds the received data, and `close` must wait for its writes."""
    register: Register[str] = Register()
    register.open("h", "first")
    register.open("h", "second")
    assert register.find("h") == register.get("h") == "first"
    assert (len(register), register.close("h"), register.close("h")) == (1, "first", None)


def test_closed_handoff_cannot_be_reopened() -> None:
    """This holds even if it was never open, because an Open may be overtaken by its Close."""
    register: Register[str] = Register()
    register.open("h", "first")
    for handoff in ("h", "overtaken"):
        register.close(handoff)
        register.open(handoff, "late")
        with pytest.raises(HandoffExpired):
            register.find(handoff)
    assert not len(register)


def test_number_of_remembered_closed_handoffs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MAX_CLOSED", 2)
    register: Register[str] = Register()
    for number in range(3):
        register.close(str(number))
    for number in range(3):
        register.open(str(number), "")
    assert list(register) == ["0"]


def _incoming_transfers(num_ranks: int = 2) -> tuple[IncomingTransfers[str], IncomingTransfer[str], BlockManager]:
    blocks = BlockManager(8)
    taken, _ = blocks.allocate([], 3) or ([], 0)
    receiver: Any = SimpleNamespace(open=lambda opening: None, close=lambda handoff: None)
    incoming_transfers: IncomingTransfers[str] = IncomingTransfers(
        receiver, blocks, num_ranks=num_ranks, close_elsewhere=lambda handoff, then: then()
    )
    opening = Opening(handoff="h", num_tokens=20, max_tokens=24, block_ids=tuple(taken))
    return incoming_transfers, incoming_transfers.open(opening, owner="request", expires_at=1000.0), blocks


def _landing(num_tokens: int, *, epoch: int = 1) -> Landing:
    return Landing(handoff="h", epoch=epoch, num_tokens=num_tokens)


@pytest.mark.parametrize("counts", [(20, 21), (19, 19), (25, 25), (0, 0)])
def test_handoff_fails_at_once_if_ranks_report_unexpected_positions(counts: tuple[int, int]) -> None:
    incoming_transfers, incoming, blocks = _incoming_transfers()
    assert [incoming_transfers.landed(rank, _landing(count)) for rank, count in enumerate(counts)] == [None, None]
    assert incoming_transfers.expired(0.0) == [incoming] and str(counts[0]) in incoming.problem
    incoming_transfers.give_up(incoming)
    assert incoming_transfers.expired(0.0) == []
    assert blocks.num_available == 8
    blocks.check_integrity()


@pytest.mark.parametrize("pending_peer", [2, -1, 1 << 31])
def test_landing_of_an_unknown_rank_is_ignored(pending_peer: int) -> None:
    incoming_transfers, incoming, _ = _incoming_transfers()
    assert incoming_transfers.landed(1, _landing(22)) is None
    assert incoming_transfers.landed(pending_peer, _landing(22)) is None
    assert incoming_transfers.expired(0.0) == []
    assert incoming_transfers.landed(0, _landing(22)) is incoming and incoming.landing.num_tokens == 22

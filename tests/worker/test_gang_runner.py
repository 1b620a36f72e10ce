"""Gang runner: all ranks execute the same orders in the same steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from core.process.background import BackgroundThread
from core.types.errors import ReplicaFailed
from core.types.handoff import Handoff
from core.types.request import SequenceRequest
from core.types.tier import Tier
from engine.batch.batch import Batch, DeviceTokens
from engine.batch.rows import Row, RowChanges
from engine.kv.layout import KVLayout
from engine.scheduler.prompts import Prompt
from engine.scheduler.row_updates import LastRows
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import BeginOrder, CommitOrder, DeviceTokenOrder, DraftOrder, Orders, ShipOrder
from engine.spec_decode.heads.head_row import HeadRow
from engine.tiers.commands import LoadOrder, LoadSource, Save, TierOrders
from tests.worker.rank_of_one import FakeSender
from worker.gang_runner import GangRunner, encode_step

_NUM_LAYERS = 2
_LAYOUT = KVLayout(model="m", num_layers=_NUM_LAYERS, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


class FakeGangRank:
    """Fake ModelRunner and process group of a rank. All broadcasts go through one queue."""

    size = 2
    device = torch.device("cpu")
    heads = None
    max_drafted = 0

    def __init__(self, broadcasts: deque[bytes], chosen: deque[Tensor] | None = None) -> None:
        """chosen: token ids broadcast between devices."""
        self.did: list[object] = []
        self._chosen = chosen if chosen is not None else deque()
        self._leads = False
        self.batches: list[Batch] = []
        self.is_by_layer: list[bool] = []  # per batch: computed layer by layer, without a CUDA graph
        self.parallel = self.pool = self
        self.layout = _LAYOUT
        self.num_blocks, self.num_states = 12, 0
        self.config = SimpleNamespace(vocab_size=100, max_context=64)
        self._broadcasts = broadcasts

    def broadcast_bytes(self, data: bytes | None = None) -> bytes:
        if data is None:
            return self._broadcasts.popleft()
        self._leads = True
        self._broadcasts.append(data)
        return data

    def broadcast_on_device(self, x: Tensor) -> Tensor:
        self.did.append("handed on")
        if self._leads:
            self._chosen.append(x.clone())
            return x
        return x.copy_(self._chosen.popleft())

    def draft(self, rows: list[HeadRow], max_tokens: int, choose: object) -> None:
        self.did.append([tuple(row) for row in rows])

    def settle(self) -> None:
        pass

    def copy(self, orders: Orders) -> None:
        self.did += orders.copies + orders.state_copies

    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None, on_logits: object = None) -> str:
        self.did.append(batch.token_ids.tolist())
        self.batches.append(batch)
        self.is_by_layer.append(on_layer is not None)
        for layer in range(_NUM_LAYERS) if on_layer else ():
            on_layer(layer)
        return "logits"


def _follower(broadcasts: deque[bytes]) -> tuple[FakeGangRank, GangRunner]:
    rank = FakeGangRank(broadcasts)
    return rank, GangRunner(rank, FakeSender(), None)  # type: ignore[arg-type]


def _handoff(id: str, num_tokens: int) -> Handoff:
    return Handoff(
        id=id,
        epoch=1,
        replica="decode-0",
        ranks=("127.0.0.1:1",),
        layout="",
        num_tokens=num_tokens,
        max_tokens=num_tokens,
        first_token=0,
        ttl_s=1.0,
    )


def _step(tokens: list[int]) -> ScheduledStep:
    request = SequenceRequest(id="r", token_ids=tuple(tokens), num_prompt_tokens=len(tokens))
    sequence = Sequence(request, 0, model="m", block_size=4, max_context=64)
    sequence.start_with([3, 4], 0)
    return ScheduledStep(decoding=[], prompts=[(Prompt(sequence), len(tokens))], last_rows=LastRows(4))


def test_ranks_execute_the_same_orders_in_the_same_steps() -> None:
    broadcasts: deque[bytes] = deque()
    ranks = [FakeGangRank(broadcasts) for _ in range(2)]
    senders = [FakeSender() for _ in range(2)]
    leader, follower = (
        GangRunner(rank, sender, None)  # type: ignore[arg-type]
        for rank, sender in zip(ranks, senders, strict=True)
    )
    prompt, served, moving, unwanted = (_handoff(id, 6) for id in ("prompt", "served", "moving", "unwanted"))
    leader.execute(None, Orders(copies=[(1, 2)], served_fetches=[BeginOrder(served, [5, 6], 6)]))
    begins = [BeginOrder(prompt, [3, 4], 0), BeginOrder(moving, [7, 8], 4), BeginOrder(unwanted, [9], 0)]
    assert leader.execute(_step([10, 11, 12, 13, 14, 15]), Orders(begins=begins, rows=[prompt.key])) == "logits"
    leader.commit(prompt.key, [16])
    ships, commits = [ShipOrder(moving.key, [7, 8, 2], 4, 6)], [CommitOrder(moving.key, 6, [17])]
    leader.execute(None, Orders(ships=ships, commits=commits, aborts=[unwanted.key]))
    leader.execute(None, Orders(stop=True))
    follower.follow()

    assert ranks[0].did == ranks[1].did == [(1, 2), [10, 11, 12, 13, 14, 15]] and not broadcasts
    for key in (served.key, prompt.key, moving.key, unwanted.key):
        ours, theirs = (sender.transfers[key] for sender in senders)
        assert (ours.handoff, ours.blocks, ours.spans) == (theirs.handoff, theirs.blocks, theirs.spans)
        assert ours.is_aborted == theirs.is_aborted == (key == unwanted.key)
        assert (ours.committed or (0,))[0] == (theirs.committed or (0,))[0] == (0 if ours.is_aborted else 6)
    assert senders[0].transfers[prompt.key].spans == [(layer, 0, 6) for layer in range(_NUM_LAYERS)]
    assert [sender.transfers[prompt.key].committed for sender in senders] == [(6, [16]), (6, [])]


def test_loads_start_after_the_copies_of_a_step() -> None:
    """A load may overwrite a state slot that a copy reads or writes, and runs on a thread of its own."""
    rank = FakeGangRank(deque())
    rank.size = 1
    tiers = SimpleNamespace(
        carry_out=lambda orders: rank.did.extend(orders.saves), start_loads=lambda orders: rank.did.extend(orders.loads)
    )
    leader = GangRunner(rank, FakeSender(), tiers)  # type: ignore[arg-type]
    save, load = Save(Tier.HOST, 12, 0, b"evicted"), LoadOrder(1, [LoadSource(Tier.HOST, 1, b"loaded", 12)])
    leader.execute(None, Orders(tiers=[TierOrders(saves=[save], loads=[load])], state_copies=[(0, 1)]))
    assert rank.did == [save, (0, 1), load]


def test_rank_with_a_failed_transfer_computes_as_the_others_do() -> None:
    """Links fail one by one, so ranks may differ in their transfers.

    A step by CUDA graph is padded to more rows; its all-reduces must not meet those of a rank that runs by layer.
    """
    broadcasts: deque[bytes] = deque()
    (ours, leader), (theirs, follower) = (_follower(broadcasts) for _ in range(2))
    prompt = _handoff("prompt", 6)
    leader.execute(_step([10, 11, 12, 13, 14, 15]), Orders(begins=[BeginOrder(prompt, [3, 4], 0)], rows=[prompt.key]))
    leader.execute(_step([10, 11]), Orders())
    leader.execute(None, Orders(stop=True))
    follower.sender.begin = lambda handoff, blocks, state_slot=None: None  # type: ignore[method-assign]
    follower.follow()
    assert ours.is_by_layer == theirs.is_by_layer == [True, False]


def test_device_tokens_are_broadcast_in_order_on_every_rank() -> None:
    """They are broadcast after the step's orders and before its computation, and clamped to the vocabulary."""
    broadcasts: deque[bytes] = deque()
    chosen: deque[Tensor] = deque()
    ours, theirs = (FakeGangRank(broadcasts, chosen) for _ in range(2))
    leader, follower = (GangRunner(rank, FakeSender(), None) for rank in (ours, theirs))  # type: ignore[arg-type]
    last_rows, sequences = LastRows(4), [_decoding([10 + i] * 3, block=3 + i) for i in range(3)]
    step = ScheduledStep(decoding=[(one, 1) for one in sequences], prompts=[], last_rows=last_rows)
    leader.execute(step, Orders())
    del sequences[1]
    for sequence in sequences:
        sequence.sampling_row.num_in_flight = 1
    device_tokens = DeviceTokens(
        token_ids=torch.tensor([7, 1 << 20, -1]), sources=np.array([0, 2]), places=np.array([0, 1])
    )
    step = ScheduledStep(
        decoding=[(one, 1) for one in sequences], prompts=[], last_rows=last_rows, device_tokens=device_tokens
    )
    leader.execute(step, Orders(copies=[(1, 2)]))
    leader.execute(None, Orders(stop=True))
    follower.follow()
    assert ours.did == theirs.did == [[10, 11, 12], (1, 2), "handed on", [0, 0]]
    received = theirs.batches[-1].device_tokens
    assert received and not ours.batches[0].device_tokens and not theirs.batches[0].device_tokens
    assert (received.sources.tolist(), received.places.tolist()) == ([0, 2], [0, 1])
    assert received.token_ids.tolist() == [7, 99, -1] and received.token_ids.dtype is torch.int32
    assert theirs.batches[-1].slots.tolist() == ours.batches[-1].slots.tolist() == [3 * 4 + 3, 5 * 4 + 3]


def _decoding(tokens: list[int], *, block: int) -> Sequence:
    request = SequenceRequest(id="r", token_ids=tuple(tokens), num_prompt_tokens=len(tokens))
    sequence = Sequence(request, 0, model="m", block_size=4, max_context=64)
    sequence.start_with([block], 0)
    sequence.num_computed = len(tokens) - 1
    return sequence


def test_device_tokens_must_match_the_rows_of_the_last_step() -> None:
    """Otherwise ranks would deadlock on their devices."""

    def steps(device_tokens: DeviceTokenOrder) -> deque[bytes]:
        changes = _changes(query_lens=[2, 1], token_ids=[20, 21, 0], blocks=[5, 6])
        first = encode_step(_step([10, 11, 12, 13, 14, 15]).changes, Orders())
        return deque(
            [first, encode_step(changes, Orders(device_tokens=device_tokens)), encode_step(None, Orders(stop=True))]
        )

    rank, follower = _follower(steps(DeviceTokenOrder(2, [0], [2])))
    with pytest.raises(AssertionError, match="rank 0 chooses 2 tokens for 1 rows"):
        follower.follow()
    assert rank.did == [[10, 11, 12, 13, 14, 15]]
    rank = FakeGangRank(steps(DeviceTokenOrder(1, [0], [2])), deque([torch.tensor([7])]))
    GangRunner(rank, FakeSender(), None).follow()  # type: ignore[arg-type]
    assert rank.did[-1] == [20, 21, 0]


def test_drafting_within_a_step_is_rejected() -> None:
    """Otherwise rank 0 would be in the step's all-reduce while this rank is in the draft heads'."""
    orders = Orders(draft=DraftOrder([(5, 1, [3])], 1))
    rank, follower = _follower(deque([encode_step(_step([10, 11]).changes, orders)]))
    rank.max_drafted = 1
    with pytest.raises(AssertionError, match="drafts are made between steps"):
        follower.follow()
    assert rank.did == []


def test_number_of_drafted_rows_is_bounded() -> None:
    orders = Orders(draft=DraftOrder([(5, 8, [3, 4])] * 2, 2))

    def follow(max_drafted: int) -> FakeGangRank:
        rank, follower = _follower(deque([encode_step(None, orders), encode_step(None, Orders(stop=True))]))
        rank.max_drafted = max_drafted
        follower.follow()
        return rank

    assert follow(2).did == [[(5, 8, [3, 4])] * 2]
    with pytest.raises(AssertionError, match="2 rows to draft for"):
        follow(1)


def _changes(**fields: object) -> RowChanges:
    """Return row changes whose first row is new and whose second continues the first row of the last step."""
    first = Row(token_ids=[20, 21], start=3, blocks=[5, 6], num_logits=1)
    whole = RowChanges.of([first], block_size=4)
    changes = replace(
        whole,
        number=2,
        kept=np.array([-1, 0]),
        query_lens=np.array([2, 3]),
        num_logits=np.array([1, 0]),
        token_ids=np.array([20, 21, 16, 17, 18]),
        blocks=np.array([5, 6, 7]),
    )
    return replace(changes, **{name: np.array(value, dtype=np.int64) for name, value in fields.items()})


def test_row_changes_continue_the_last_rows() -> None:
    steps = deque([encode_step(_step([10, 11, 12, 13, 14, 15]).changes, Orders())])
    steps.append(encode_step(_changes(scored=[[1, 2], [0, 1]]), Orders()))
    rank, follower = _follower(deque([*steps, encode_step(None, Orders(stop=True))]))
    follower.follow()
    assert rank.did == [[10, 11, 12, 13, 14, 15], [20, 21, 16, 17, 18]]
    batch = rank.batches[-1]
    assert batch.positions.tolist() == [3, 4, 6, 7, 8] and batch.context_lens.tolist() == [5, 9]
    assert batch.slots.tolist() == [5 * 4 + 3, 6 * 4, 4 * 4 + 2, 4 * 4 + 3, 7 * 4]
    assert batch.block_tables.tolist() == [[5, 6, 0], [3, 4, 7]] and batch.logits_rows.tolist() == [1]
    assert batch.scored_rows.tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("number", 1, "step 1 instead of 2"),
        ("number", 3, "step 3 instead of 2"),
        ("token_ids", [20, 21, 16, 17, 100], "token id"),
        ("token_ids", [20, 21, 16, 17, -1], "token id"),
        ("blocks", [5, 6, 12], "block id"),
        ("blocks", [5, 6, -1], "block id"),
    ],
)
def test_a_step_beyond_the_pool_or_out_of_turn_ends_the_rank(array: str, value: object, message: str) -> None:
    first = encode_step(_step([10, 11, 12, 13, 14, 15]).changes, Orders())
    rank, follower = _follower(deque([first, encode_step(_changes(**{array: value}), Orders())]))
    with pytest.raises(AssertionError, match=message):
        follower.follow()
    assert rank.did == [[10, 11, 12, 13, 14, 15]]


def test_a_malformed_message_ends_the_rank_with_a_line_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    rank, follower = _follower(deque([b"no step"]))
    following = BackgroundThread(follower.follow, name="following")
    following.start()
    with pytest.raises(ReplicaFailed, match="malformed step message from rank 0"):
        following.run()
    assert rank.did == [] and "malformed step message from rank 0" in caplog.text


def test_step_of_new_rows_needs_no_last_rows() -> None:
    whole = replace(_step([10, 11]).changes, number=7)
    rank, follower = _follower(deque([encode_step(whole, Orders()), encode_step(None, Orders(stop=True))]))
    follower.follow()
    assert rank.did == [[10, 11]]

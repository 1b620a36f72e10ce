"""The ranks of a gang do the same in every step: what rank 0 orders reaches the others as it carries it out itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

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
from worker.gang_runner import GangRunner
from worker.step_message import encode_step

_NUM_LAYERS = 2
_LAYOUT = KVLayout(model="m", num_layers=_NUM_LAYERS, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


class FakeGangRank:
    """Stands for a rank's ModelRunner, and for its place in the gang: all broadcasts lie in one queue."""

    size = 2
    device = torch.device("cpu")
    heads = None
    max_drafted = 0

    def __init__(self, broadcasts: deque[bytes], chosen: deque[Tensor] | None = None) -> None:
        """chosen: ids on their way from device to device."""
        self.did: list[object] = []
        self._chosen = chosen if chosen is not None else deque()
        self._leads = False
        self.batches: list[Batch] = []
        self.is_by_layer: list[bool] = []  # of each batch: it cannot be replayed
        self.parallel = self.pool = self
        self.layout = _LAYOUT
        self.num_blocks = 12
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

    def copy_block(self, source: int, target: int) -> None:
        self.did.append((source, target))

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


def test_two_ranks_carry_out_the_same_orders_in_the_same_steps() -> None:
    broadcasts: deque[bytes] = deque()
    ranks = [FakeGangRank(broadcasts) for _ in range(2)]
    senders = [FakeSender() for _ in range(2)]
    leader, follower = (
        GangRunner(rank, sender, None)  # type: ignore[arg-type]
        for rank, sender in zip(ranks, senders, strict=True)
    )
    prompt, granted, moving, unwanted = (_handoff(id, 6) for id in ("prompt", "granted", "moving", "unwanted"))
    leader.execute(None, Orders(copies=[(1, 2)], served_fetches=[BeginOrder(granted, [5, 6], 6)]))
    begins = [BeginOrder(prompt, [3, 4], 0), BeginOrder(moving, [7, 8], 4), BeginOrder(unwanted, [9], 0)]
    assert leader.execute(_step([10, 11, 12, 13, 14, 15]), Orders(begins=begins, rows=[prompt.key])) == "logits"
    leader.commit(prompt.key, [16])
    ships, commits = [ShipOrder(moving.key, [7, 8, 2], 4, 6)], [CommitOrder(moving.key, 6, [17])]
    leader.execute(None, Orders(ships=ships, commits=commits, aborts=[unwanted.key]))
    leader.execute(None, Orders(stop=True))
    follower.follow()

    assert ranks[0].did == ranks[1].did == [(1, 2), [10, 11, 12, 13, 14, 15]] and not broadcasts
    for key in (granted.key, prompt.key, moving.key, unwanted.key):
        ours, theirs = (sender.passages[key] for sender in senders)
        assert (ours.handoff, ours.blocks, ours.spans) == (theirs.handoff, theirs.blocks, theirs.spans)
        assert ours.is_aborted == theirs.is_aborted == (key == unwanted.key)
        assert (ours.committed or (0,))[0] == (theirs.committed or (0,))[0] == (0 if ours.is_aborted else 6)
    assert senders[0].passages[prompt.key].spans == [(layer, 0, 6) for layer in range(_NUM_LAYERS)]
    assert [sender.passages[prompt.key].committed for sender in senders] == [(6, [16]), (6, [])]


def test_a_rank_whose_passage_has_failed_computes_as_the_others_do() -> None:
    """Links fail one by one. A recorded step is one of more rows than it was asked for: its sums would meet those of a
    rank that has launched it layer by layer."""
    broadcasts: deque[bytes] = deque()
    (ours, leader), (theirs, follower) = (_follower(broadcasts) for _ in range(2))
    prompt = _handoff("prompt", 6)
    leader.execute(_step([10, 11, 12, 13, 14, 15]), Orders(begins=[BeginOrder(prompt, [3, 4], 0)], rows=[prompt.key]))
    leader.execute(_step([10, 11]), Orders())
    leader.execute(None, Orders(stop=True))
    follower.sender.begin = lambda handoff, blocks: None  # type: ignore[method-assign]
    follower.follow()
    assert ours.is_by_layer == theirs.is_by_layer == [True, False]


def test_tokens_that_nobody_knows_yet_come_in_their_turn_on_every_rank() -> None:
    """Behind the orders of their step, and before it is computed; whatever comes, no table is read beyond its end."""
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
    told = theirs.batches[-1].device_tokens
    assert told and not ours.batches[0].device_tokens and not theirs.batches[0].device_tokens
    assert (told.sources.tolist(), told.places.tolist()) == ([0, 2], [0, 1])
    assert told.token_ids.tolist() == [7, 99, -1] and told.token_ids.dtype is torch.int32
    assert theirs.batches[-1].slots.tolist() == ours.batches[-1].slots.tolist() == [3 * 4 + 3, 5 * 4 + 3]


def _decoding(tokens: list[int], *, block: int) -> Sequence:
    request = SequenceRequest(id="r", token_ids=tuple(tokens), num_prompt_tokens=len(tokens))
    sequence = Sequence(request, 0, model="m", block_size=4, max_context=64)
    sequence.start_with([block], 0)
    sequence.num_computed = len(tokens) - 1
    return sequence


@pytest.mark.parametrize(
    ("device_tokens", "num_tokens"),
    [
        (DeviceTokenOrder(1, [1], [2]), 1),  # there is no such row before
        (DeviceTokenOrder(1, [-1], [0]), 1),
        (DeviceTokenOrder(1, [0], [3]), 1),  # nor such a place
        (DeviceTokenOrder(1, [0], [-1]), 1),
        (DeviceTokenOrder(1, [0], [1]), 1),  # a new row
        (DeviceTokenOrder(1, [0], [4]), 3),  # it computes others, too
        (DeviceTokenOrder(1, [0], [2, 2]), 1),
        (DeviceTokenOrder(1, [], []), 1),
        (DeviceTokenOrder(0, [0], [2]), 1),  # for one row
        (DeviceTokenOrder(2, [0], [2]), 1),
        (DeviceTokenOrder(-1, [0], [2]), 1),
    ],
    ids=str,
)
def test_tokens_that_nobody_knows_are_for_rows_that_go_on_from_those_that_choose_them(
    device_tokens: DeviceTokenOrder, num_tokens: int
) -> None:
    def steps(device_tokens: DeviceTokenOrder) -> deque[bytes]:
        changes = _changes(
            query_lens=[2, num_tokens], token_ids=[20, 21, *[0] * num_tokens], blocks=[5, 6, *[7] * (num_tokens > 2)]
        )
        first = encode_step(_step([10, 11, 12, 13, 14, 15]).changes, Orders())
        return deque(
            [first, encode_step(changes, Orders(device_tokens=device_tokens)), encode_step(None, Orders(stop=True))]
        )

    rank, follower = _follower(steps(device_tokens))
    with pytest.raises(ReplicaFailed, match="cannot be: fed"):
        follower.follow()
    assert rank.did == [[10, 11, 12, 13, 14, 15]]
    if num_tokens == 1:  # as it should be
        rank = FakeGangRank(steps(DeviceTokenOrder(1, [0], [2])), deque([torch.tensor([7])]))
        GangRunner(rank, FakeSender(), None).follow()  # type: ignore[arg-type]
        assert rank.did[-1] == [20, 21, 0]


@pytest.mark.parametrize(
    "device_tokens", [DeviceTokenOrder(1, [1 << 63], [2]), DeviceTokenOrder(1, [0], [1 << 63])], ids=str
)
def test_numbers_that_no_array_holds_end_the_rank_as_others_do(device_tokens: DeviceTokenOrder) -> None:
    first = encode_step(_step([10, 11, 12, 13, 14, 15]).changes, Orders())
    changes = _changes(query_lens=[2, 1], token_ids=[20, 21, 0], blocks=[5, 6])
    rank, follower = _follower(deque([first, encode_step(changes, Orders(device_tokens=device_tokens))]))
    with pytest.raises(ReplicaFailed, match="orders what cannot be"):
        follower.follow()
    assert rank.did == [[10, 11, 12, 13, 14, 15]]


def test_nothing_is_drafted_in_the_middle_of_a_step() -> None:
    """Rank 0 would be in the sums of the step while this rank is in those of its heads."""
    orders = Orders(draft=DraftOrder([(5, 1, [3])], 1))
    rank, follower = _follower(deque([encode_step(_step([10, 11]).changes, orders)]))
    rank.max_drafted = 1
    with pytest.raises(ReplicaFailed, match="cannot be: draft"):
        follower.follow()
    assert rank.did == []


def test_heads_are_asked_of_a_row_before_it_has_the_block_of_its_next_token() -> None:
    """One that has just come, while a step without it is under way: what is beyond its table, heads write elsewhere."""

    def asked(position: int) -> FakeGangRank:
        orders = Orders(draft=DraftOrder([(5, position, [3, 4])], 2))
        rank = FakeGangRank(deque([encode_step(None, orders), encode_step(None, Orders(stop=True))]))
        rank.max_drafted = 1
        GangRunner(rank, FakeSender(), None).follow()  # type: ignore[arg-type]
        return rank

    assert asked(2 * 4).did == [[(5, 8, [3, 4])]]
    with pytest.raises(ReplicaFailed, match="num_tokens: must be at most the 8"):
        asked(2 * 4 + 1)


@pytest.mark.parametrize(
    "orders",
    [
        Orders(device_tokens=DeviceTokenOrder(1, [0], [0])),  # and no batch
        Orders(copies=[(1, 12)]),
        Orders(copies=[(-1, 2)]),
        Orders(served_fetches=[BeginOrder(_handoff("h", 6), [5, 12], 6)]),
        Orders(begins=[BeginOrder(_handoff("h", 6), [5], 6)]),
        Orders(begins=[BeginOrder(replace(_handoff("h", 6), ranks=("a:1",) * 3), [5, 6], 6)]),
        Orders(begins=[BeginOrder(replace(_handoff("h", 6), first_token=3), [5, 6], 6)]),
        Orders(ships=[ShipOrder(("h", 1), [7, 99], 0, 6)]),
        Orders(ships=[ShipOrder(("h", 1), [7, 8], 6, 4)]),
        Orders(rows=[("h", 1)]),
        Orders(tiers=[TierOrders(saves=[Save(Tier.HOST, 1, 0, b"h" * 16)])]),
        Orders(tiers=[TierOrders(loads=[LoadOrder(1, [LoadSource(Tier.DISK, 0, b"h" * 16, 1)])])]),
    ],
    ids=str,
)
def test_orders_for_blocks_and_places_that_there_are_not_end_the_rank_before_anything_is_done(orders: Orders) -> None:
    rank, follower = _follower(deque([encode_step(None, orders)]))
    with pytest.raises(ReplicaFailed, match="orders what cannot be"):
        follower.follow()
    assert rank.did == []


def _changes(**fields: object) -> RowChanges:
    """Of a step whose second row goes on from the first one of the step before, and whose first is new."""
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


def test_a_rank_knows_what_a_row_had_before() -> None:
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
    ("array", "value"),
    [
        ("number", 1),
        ("number", 3),
        ("kept", [-1, 1]),
        ("kept", [-2, 0]),
        ("kept", [0, 0]),
        ("starts", []),
        ("starts", [-1]),
        ("starts", [1 << 62]),
        ("adapters", [-1]),
        ("query_lens", [2, 2]),
        ("query_lens", [0, 5]),
        ("query_lens", [1 << 62, 1 << 62]),
        ("num_logits", [3, 0]),
        ("num_logits", [-1, 0]),
        ("scored", [[2, 1]]),
        ("scored", [[-1, 1]]),
        ("scored", [[0, 3]]),
        ("scored", [[0, 0]]),
        ("scored", [[0, 1], [0, 1]]),
        ("token_ids", [20, 21, 16, 17, 100]),
        ("token_ids", [20, 21, 16, 17, -1]),
        ("blocks", [5, 6, 12]),
        ("blocks", [5, 6, -1]),
        ("blocks", [5, 6, 1 << 40]),
        ("blocks", [5, 6]),
        ("blocks", [5, 6, 7, 8]),
    ],
)
def test_rows_that_cannot_be_never_reach_the_model(array: str, value: object) -> None:
    first = encode_step(_step([10, 11, 12, 13, 14, 15]).changes, Orders())
    changes = _changes(**{array: value})
    changes = replace(changes, adapters=np.resize(changes.adapters, len(changes.starts)))
    rank, follower = _follower(deque([first, encode_step(changes, Orders())]))
    with pytest.raises(ReplicaFailed, match=f"cannot be: .*{array}"):
        follower.follow()
    assert rank.did == [[10, 11, 12, 13, 14, 15]]


def test_a_rank_that_has_missed_a_step_is_told_everything_or_ends() -> None:
    """What names no row of the step before needs none."""
    rank, follower = _follower(deque([encode_step(_changes(), Orders())]))
    with pytest.raises(ReplicaFailed, match="number: must follow 0"):
        follower.follow()
    whole = replace(_step([10, 11]).changes, number=7)
    rank, follower = _follower(deque([encode_step(whole, Orders()), encode_step(None, Orders(stop=True))]))
    follower.follow()
    assert rank.did == [[10, 11]]


def test_a_row_ends_within_the_context_and_there_are_no_more_rows_than_blocks() -> None:
    step = _step([10, 11, 12, 13, 14, 15]).changes
    beyond = replace(step, starts=np.array([60]), blocks=np.arange(17) % 12)
    many = RowChanges.of([Row(token_ids=[1], start=0, blocks=[3], num_logits=1)] * 13, block_size=4)
    for changes, what in ((beyond, "ends"), (many, "rows")):
        rank, follower = _follower(deque([encode_step(changes, Orders())]))
        with pytest.raises(ReplicaFailed, match=f"cannot be: {what}"):
            follower.follow()
        assert rank.did == []

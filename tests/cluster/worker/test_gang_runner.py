"""The ranks of a gang do the same in every step: what rank 0 orders reaches the others as it carries it out itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from cluster.words.handoff import Handoff
from cluster.words.request import SequenceRequest
from cluster.worker.gang_runner import GangRunner
from engine.batch.batch import Batch
from engine.orders import BeginOrder, CommitOrder, Orders, ShipOrder
from engine.prompts import Prompt
from engine.sequence import Sequence
from engine.step import ScheduledStep
from tests.cluster.worker.rank_of_one import FakeSender

_NUM_LAYERS = 2


class FakeGangRank:
    """Stands for a rank's ModelRunner, and for its place in the gang: all broadcasts lie in one queue."""

    size = 2

    def __init__(self, broadcasts: deque[bytes]) -> None:
        self.did: list[object] = []
        self.parallel = self.pool = self
        self.layout = SimpleNamespace(num_layers=_NUM_LAYERS)
        self._broadcasts = broadcasts

    def broadcast_bytes(self, data: bytes | None = None) -> bytes:
        if data is None:
            return self._broadcasts.popleft()
        self._broadcasts.append(data)
        return data

    def meet(self) -> None:
        self.did.append("met")

    def copy_block(self, source: int, target: int) -> None:
        self.did.append((source, target))

    def forward(self, batch: Batch, on_layer: Callable[[int], None] = lambda layer: None) -> str:
        self.did.append(batch.token_ids.tolist())
        for layer in range(_NUM_LAYERS):
            on_layer(layer)
        return "logits"


def _handoff(id: str, num_tokens: int) -> Handoff:
    return Handoff(
        id=id,
        epoch=1,
        replica="decode-0",
        ranks=("there",),
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
    return ScheduledStep(decoding=[], prompts=[(Prompt(sequence), len(tokens))], block_size=4)


def test_two_ranks_carry_out_the_same_orders_in_the_same_steps() -> None:
    broadcasts: deque[bytes] = deque()
    ranks = [FakeGangRank(broadcasts) for _ in range(2)]
    senders = [FakeSender() for _ in range(2)]
    leader, follower = (
        GangRunner(rank, sender, None)  # type: ignore[arg-type]
        for rank, sender in zip(ranks, senders, strict=True)
    )
    prompt, granted, moving, unwanted = (_handoff(id, 6) for id in ("prompt", "granted", "moving", "unwanted"))
    leader.execute(None, Orders(meet=True, copies=[(1, 2)], grants=[BeginOrder(granted, [5, 6], 6)]))
    begins = [BeginOrder(prompt, [3, 4], 0), BeginOrder(moving, [7, 8], 4), BeginOrder(unwanted, [9], 0)]
    assert leader.execute(_step([10, 11, 12, 13, 14, 15]), Orders(begins=begins, rows=[prompt.key])) == "logits"
    leader.commit(prompt.key, [16])
    ships, commits = [ShipOrder(moving.key, [7, 8, 2], 4, 6)], [CommitOrder(moving.key, 6, [17])]
    leader.execute(None, Orders(ships=ships, commits=commits, aborts=[unwanted.key]))
    leader.execute(None, Orders(stop=True))
    follower.follow()

    assert ranks[0].did == ranks[1].did == ["met", (1, 2), [10, 11, 12, 13, 14, 15]] and not broadcasts
    for key in (granted.key, prompt.key, moving.key, unwanted.key):
        ours, theirs = (sender.passages[key] for sender in senders)
        assert (ours.handoff, ours.blocks, ours.spans) == (theirs.handoff, theirs.blocks, theirs.spans)
        assert ours.is_aborted == theirs.is_aborted == (key == unwanted.key)
        assert (ours.committed or (0,))[0] == (theirs.committed or (0,))[0] == (0 if ours.is_aborted else 6)
    assert senders[0].passages[prompt.key].spans == [(layer, 0, 6) for layer in range(_NUM_LAYERS)]
    assert [sender.passages[prompt.key].committed for sender in senders] == [(6, [16]), (6, [])]

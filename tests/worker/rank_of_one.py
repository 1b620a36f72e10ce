"""Components of a one-rank replica on the CPU, with a random model and fake peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.failpoint import unobserved
from core.types.handoff import Handoff, HandoffKey
from core.types.request import Sampling, SequenceRequest
from engine.config import EngineConfig
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.scheduler import sequence
from engine.scheduler.prompts import KVSource, Prompt
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.incoming_transfers import PrefixFetches
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches
from tests.engine.tiny_models import random_model, tiny_config
from worker.gang_runner import GangRunner
from worker.worker import EngineParts

NUM_BLOCKS, BLOCK_SIZE = 12, 8
_LIMITS = SchedulerConfig(max_batch_tokens=16, max_running=4, max_waiting=8)


class FakeTransfer:
    """Fake rank transfer that records its spans and commit, and sends at once."""

    is_idle = True

    def __init__(self, handoff: Handoff, blocks: Sequence[int], state_slot: int | None, num_layers: int) -> None:
        self.handoff, self.blocks, self.state_slot = handoff, tuple(blocks), state_slot
        self._num_layers = num_layers
        self.spans: list[tuple[int, int, int]] = []  # layer and positions [start, end)
        self.committed: tuple[int, list[int]] | None = None
        self.is_aborted = False

    def all_layers_ready(self, first_token: int, end_token: int) -> None:
        for layer in range(self._num_layers):
            self.layer_ready(layer, first_token, end_token)

    def layer_ready(self, layer: int, first_token: int, end_token: int) -> None:
        if first_token < end_token:
            self.spans.append((layer, first_token, end_token))

    def commit(self, num_tokens: int, next_tokens: Sequence[int] = (), *, features: bytes = b"") -> None:
        self.committed = num_tokens, list(next_tokens)

    def abort(self) -> None:
        self.is_aborted = True


class FakeSender:
    def __init__(self, *, num_layers: int = 2) -> None:
        self._num_layers = num_layers
        self.transfers: dict[HandoffKey, FakeTransfer] = {}
        self.config = SimpleNamespace(failpoint=unobserved)

    def begin(self, handoff: Handoff, blocks: Sequence[int], state_slot: int | None = None) -> FakeTransfer:
        return self.transfers.setdefault(handoff.key, FakeTransfer(handoff, blocks, state_slot, self._num_layers))

    def find(self, key: HandoffKey) -> FakeTransfer | None:
        return self.transfers.get(key)


class FakeReceivingEnd:
    """Fake receiver; implements kvtransfer.protocol.incoming_transfers.ReceivingEnd.

    Handoffs on the other ranks close when the test calls `others_have_closed`.
    """

    def __init__(self) -> None:
        self.opened: dict[str, Opening] = {}
        self.closed_here: list[str] = []
        self._closing: list[Callable[[], None]] = []

    def open(self, opening: Opening) -> None:
        self.opened[opening.handoff] = opening

    def close(self, handoff: str) -> None:
        self.closed_here.append(handoff)

    def close_elsewhere(self, handoff: str, closed: Callable[[], None]) -> None:
        self._closing.append(closed)

    def others_have_closed(self) -> None:
        for closed in self._closing:
            closed()
        self._closing.clear()


@dataclass
class RankOfOne:
    """Components of a worker on one rank."""

    runner: ModelRunner
    sender: FakeSender = field(default_factory=FakeSender)
    receiver: FakeReceivingEnd = field(default_factory=FakeReceivingEnd)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, num_states=self.runner.pool.num_states)

    @classmethod
    def of_random_model(cls, directory: Path, family: str = "llama", **changes: Any) -> RankOfOne:
        random_model(tiny_config(family, **changes)).save_pretrained(directory)
        config = EngineConfig(model_dir=directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        return cls(ModelRunner(config))

    @property
    def gang(self) -> GangRunner:
        return GangRunner(self.runner, self.sender, None)  # type: ignore[arg-type]

    def parts(self, *, decodes: bool = True) -> EngineParts:
        tiers: Tiers[Prompt] = Tiers(self.blocks, None, self.runner.layout, eviction="lru", timeout_s=1.0)
        prefix_fetches: PrefixFetches[Prompt] = PrefixFetches(
            self.receiver,
            self.blocks,
            replica="replica-0",
            addresses=["here"],
            layout=self.runner.layout,
            timeout_s=1.0,
            close_elsewhere=self.receiver.close_elsewhere,
            call=lambda fetch: asserted("no source to fetch from"),
        )
        return EngineParts(
            gang=self.gang,
            blocks=self.blocks,
            limits=replace(_LIMITS, decodes=decodes),
            prefix_fetches=prefix_fetches,
            served_fetches=ServedFetches(self.blocks, self.runner.layout, tiers),
            tiers=tiers,
        )

    def prompt(
        self, tokens: list[int], *, id: str = "r", source: KVSource = KVSource.HERE, max_tokens: int = 5, n: int = 1
    ) -> Prompt:
        request = SequenceRequest(
            id=id,
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
            choices=tuple(range(n)),
            stream=1,
        )
        made = sequence.Sequence(request, 0, model="m", block_size=BLOCK_SIZE, max_context=64)
        return Prompt(made, source)

    def handoff(self, num_tokens: int, *, id: str = "h", epoch: int = 1) -> Handoff:
        return Handoff(
            id=id,
            epoch=epoch,
            replica="decode-9",
            ranks=("there",),
            layout=self.runner.layout.fingerprint,
            num_tokens=num_tokens,
            max_tokens=num_tokens,
            first_token=0,
            ttl_s=60.0,
        )

    @property
    def num_held(self) -> int:
        """Return the number of blocks and state slots that are referenced or quarantined."""
        self.blocks.check_integrity()
        states = self.blocks.states
        held_states = states.num_slots - states.num_available if states else 0
        return self.blocks.num_blocks - self.blocks.num_free - self.blocks.num_cached + held_states


def shipment(handoff: Handoff, error: Any = None) -> Shipment:
    return Shipment(handoff=handoff.id, epoch=handoff.epoch, wire_bytes=100, seconds=0.01, link_s=0.005, error=error)


def asserted(why: str) -> Any:
    raise AssertionError(why)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RankOfOne:
    return RankOfOne.of_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rank(model: RankOfOne) -> RankOfOne:
    """Return a rank with an empty pool."""
    return RankOfOne(model.runner)

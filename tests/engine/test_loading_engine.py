"""Engine with lower tiers, over a fake pool: loads, served fetches and their failures between any two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

import engine.tiers.tiers
from core.index.prefix_index import PrefixIndex
from core.rpc import worker_pb2 as pb
from core.types.errors import TransferError
from core.types.handoff import Handoff
from core.types.prefix_hash import block_hashes, checkpoint_hash, root_hash
from core.types.tier import Tier
from engine.engine import Engine
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.scheduler.prompts import Prompt, PromptQueue, allocate
from engine.scheduler.step import NoConnector, ScheduledStep
from engine.scheduler.step_commands import BeginOrder, Orders
from engine.tiers.commands import LoadOrder, LoadResult, TierOrders
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches
from tests.engine.test_engine import SETTINGS, EngineMachine, FakePool, StatesMachine, make_engine, make_prompt
from tests.engine.test_window_engine import FakeWindowPool, SpeculatingWindowsMachine, WindowsMachine
from tests.engine.tiers.test_tiers import DELTA_NET
from tests.support.grids import quick
from worker.fetches import Fetches

_BLOCK, _NUM_BLOCKS = 4, 24
_LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=1, head_dim=4, block_size=_BLOCK, dtype="float32")
_WITH_WINDOWS = replace(_LAYOUT, head_dim=(6, 4), windows=(6, 0))
_WITH_STATES = replace(_LAYOUT, recurrent_layers=(DELTA_NET,))
_PIECES = 2
_GARBAGE = -7
Payload = tuple[Any, ...]


class FakeStores:
    """Lower tiers of a FakePool. Loads write garbage first, and what they load when `end_load` is called."""

    room_ahead = 8

    def __init__(self, pool: FakePool, *, host: int, disk: int) -> None:
        self.num_places = {tier: count for tier, count in ((Tier.HOST, host), (Tier.DISK, disk)) if count}
        self.loads: deque[LoadOrder] = deque()
        self.found: dict[int, bytes] = {}  # on disk, of an earlier process
        self._pool = pool
        self._places: dict[tuple[Tier, int], tuple[bytes, Payload]] = {}

    def take_found(self) -> dict[int, bytes]:
        found, self.found = self.found, {}
        return found

    def take_lost(self) -> list[tuple[Tier, bytes]]:
        return []

    def carry_out(self, orders: TierOrders) -> None:
        for spill in orders.spills:
            self._places[Tier.DISK, spill.target] = self._places[Tier.HOST, spill.source]
        for save in orders.saves:
            self._places[save.tier, save.place] = save.prefix_hash, self._read(save.block)

    def start_loads(self, orders: TierOrders) -> None:
        for order in orders.loads:
            for source, target in order.copies:
                self._write(target, self._read(source))
        for order in orders.loads:
            for one in order.sources:
                self._write(one.block, (_GARBAGE,) * _BLOCK)
            self.loads.append(order)

    def end_load(self, num_read: int) -> LoadResult:
        """End the oldest load after `num_read` sources at most."""
        order, end = self.loads.popleft(), 0
        for end, one in enumerate(order.sources[:num_read], 1):  # noqa: B007
            prefix_hash, payload = self._places[one.tier, one.place]
            assert prefix_hash == one.prefix_hash, "the place has another block"
            self._write(one.block, payload)
        return LoadResult(order.id, min(num_read, len(order.sources)), {}, {})

    def _read(self, block: int) -> Payload:
        pool = self._pool
        if block < _NUM_BLOCKS:
            return tuple(pool.tokens.get(block * _BLOCK + i, -1) for i in range(_BLOCK))
        index, piece = divmod(block - _NUM_BLOCKS, _PIECES)
        if isinstance(pool, FakeWindowPool):
            return tuple(pool.part_tokens.get(index * _BLOCK + 2 * piece + i, -1) for i in range(2))
        return (piece, pool.states[index])

    def _write(self, block: int, payload: Payload) -> None:
        pool = self._pool
        if block < _NUM_BLOCKS:
            pool.tokens.update((block * _BLOCK + i, token) for i, token in enumerate(payload))
            return
        index, piece = divmod(block - _NUM_BLOCKS, _PIECES)
        if isinstance(pool, FakeWindowPool):
            pool.part_tokens.update((index * _BLOCK + 2 * piece + i, payload[i]) for i in range(2))
        elif payload[0] == _GARBAGE or piece == 0:
            pool.states[index] = payload
        else:  # the first piece is here
            first = pool.states[index]
            assert first[0] == 0 and first[1] == payload[1] and payload[0] == 1, "pieces of different states"
            pool.states[index] = payload[1]


class FakePeers:
    """PrefixFetches that never begin: the machine itself decides what peers ship."""

    def begin(self, *arguments: object, **options: object) -> None:
        pass

    def cancel(self, owner: object) -> None:
        pass

    def expired(self, now: float) -> list[Any]:
        return []


class FakeListener:
    """Listener of a served fetch."""

    def __init__(self) -> None:
        self.num_ended = 0

    def served(self, num_tokens: int) -> None:
        pass

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        self.num_ended += 1


class FakeClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Loading(EngineMachine):
    """Rules about lower tiers, for machines of engines."""

    layout = _LAYOUT

    def __init__(self) -> None:
        super().__init__()
        self.stores: FakeStores | None = None
        self.known: dict[bytes, Tier] = {}
        self.serving: list[tuple[BeginOrder, list[int], FakeListener]] = []
        self.asked: dict[str, tuple[list[int], FakeListener]] = {}
        self.clock = FakeClock()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(engine.tiers.tiers, "time", self.clock)
        self._execute = self.pool.execute
        self.pool.execute = self.execute  # type: ignore[method-assign]
        self.num_loaded = 0

    @initialize(host=st.integers(0, 30), disk=st.integers(0, 60), eviction=st.sampled_from(["lru", "reuse_value"]))
    def open_tiers(self, host: int, disk: int, eviction: str) -> None:
        self.stores = FakeStores(self.pool, host=host, disk=disk)
        self.tiers: Tiers[Any] = Tiers(self.blocks, self.stores, self.layout, eviction=eviction, timeout_s=1.0)  # type: ignore[arg-type]
        self.served = ServedFetches(self.blocks, self.layout, self.tiers)
        self.fetches = Fetches(
            self.engine.prompts,
            FakePeers(),  # type: ignore[arg-type]
            self.served,
            self.tiers,
            pb.Totals(),
            block_size=_BLOCK,
            on_incoming=lambda *_: None,
        )

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> list[tuple[int, ...]] | None:
        for order in orders.tiers:
            self.stores.carry_out(order)  # type: ignore[union-attr]
        self._execute(None, orders)
        for order in orders.tiers:
            self.stores.start_loads(order)  # type: ignore[union-attr]
        for begin in orders.served_fetches:
            tokens, listener = self.asked[begin.handoff.id]
            self.serving.append((begin, tokens[: begin.num_tokens], listener))
            self._check_served(begin, tokens[: begin.num_tokens])
        return self._execute(step, Orders()) if step else None

    def tier_orders(self) -> list[TierOrders]:
        return self.tiers.table.take_orders() if self.stores else []

    def offer(self, prompt: Prompt) -> None:
        if not self.stores or prompt.is_received or prompt.sequence.is_scored:
            return
        from_peer = prompt.num_offered
        self.fetches.offer(prompt, None, tokens_per_s=0.0)
        if from_peer > prompt.num_offered:
            prompt.num_offered, prompt.is_loaded = from_peer, False

    def begin_step(self, admitted: Sequence[Prompt]) -> None:
        if self.decodes and admitted:
            self._flush_copies()
        for prompt in admitted:
            if prompt.is_loaded and prompt in self.engine.prompts.fetching:
                self.fetches.begin(prompt)
        self._served_orders = self.served.take_orders() if self.stores else []
        if self.stores:
            self.served.take_aborts()

    def orders(self, step: ScheduledStep) -> Orders:
        orders = super().orders(step)
        orders.served_fetches = self._served_orders
        return orders

    def _flush_copies(self) -> None:
        orders = Orders(tiers=self.tier_orders())
        if self.blocks.states:
            orders.state_copies = self.blocks.states.take_copies()
        if self.blocks.windows:
            orders.parts = self.blocks.windows.take_changes()
        self.pool.execute(None, orders)

    @precondition(lambda self: any(not prompt.is_loaded for prompt in self.engine.prompts.fetching))
    @rule(data=st.data(), comes=st.booleans())
    def fetch(self, data: st.DataObject, comes: bool) -> None:
        prompt = data.draw(st.sampled_from([one for one in self.engine.prompts.fetching if not one.is_loaded]))
        self._flush_copies()
        if comes:
            end = prompt.fetch_end
            self.pool.write(prompt.sequence, end, prompt.sequence.tokens)
            self.engine.prompts.fetched(prompt, end - prompt.sequence.num_computed)
        else:
            self.engine.prompts.fetch_failed(prompt)

    @precondition(lambda self: self.stores and len(self.prompts) < 20)
    @rule(kind=st.integers(0, 2), length=st.sampled_from([9, 21, 33]), num_steps=st.integers(0, 6))
    def ask(self, kind: int, length: int, num_steps: int) -> None:
        """Add a plain prompt, which usually is computed soon."""
        prompt = make_prompt([kind] * length, max_tokens=2)
        self.offer(prompt)
        self.engine.add(prompt)
        self.prompts.append(prompt)
        for _ in range(num_steps):
            self.step()

    @precondition(lambda self: self.stores)
    @rule(num_blocks=st.integers(1, 24))
    def evict(self, num_blocks: int) -> None:
        """Use blocks as other sequences do, so that cached ones are evicted."""
        taken = self.blocks.allocate([], min(num_blocks, self.blocks.num_available))
        assert taken
        self.blocks.free(taken[0])
        self._flush_copies()

    @precondition(lambda self: self.blocks.windows or self.blocks.states)
    @rule(count=st.integers(1, 5))
    def evict_beside(self, count: int) -> None:
        """Evict parts or checkpoints, but no blocks."""
        states, windows = self.blocks.states, self.blocks.windows
        if states:
            states.free([states.take() for _ in range(min(count, states.num_available))])
        elif windows:
            for prefix_hash in self.blocks.full_hashes()[:count]:
                windows.evict(self.blocks.block_of(prefix_hash))
        self._flush_copies()

    @precondition(lambda self: self.stores and self.stores.loads)
    @rule(num_read=st.one_of(st.just(99), st.integers(0, 5)))
    def end_load(self, num_read: int) -> None:
        assert self.stores
        result = self.stores.end_load(num_read)
        self.num_loaded += 1
        self.fetches.loaded(0, result)

    @precondition(lambda self: self.stores and self.stores.loads)
    @rule()
    def time_out(self) -> None:
        self.clock.now += 1000.0
        self.fetches.expire()

    @precondition(lambda self: self.stores)
    @rule()
    def idle(self) -> None:
        self.tiers.save_ahead()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.prompts))
        self.prompts.remove(prompt)
        if self.stores:
            self.fetches.cancel(prompt)
        self.engine.cancel(prompt)

    @precondition(lambda self: self.stores)
    @rule(kind=st.integers(0, 2), num_blocks=st.integers(1, 9), held=st.integers(0, 8))
    def serve(self, kind: int, num_blocks: int, held: int) -> None:
        tokens = [kind] * num_blocks * _BLOCK
        first = min(held, num_blocks - 1) * _BLOCK
        handoff = Handoff(
            id=str(len(self.asked)),
            epoch=1,
            replica="r",
            ranks=("a:1",),
            layout="l",
            num_tokens=len(tokens) if self.blocks.windows else first + _BLOCK,
            max_tokens=len(tokens),
            first_token=first,
            ttl_s=1.0,
        )
        listener = FakeListener()
        self.asked[handoff.id] = tokens, listener
        self.served.serve(handoff, block_hashes(root_hash("m"), tokens, block_size=_BLOCK), listener)

    @precondition(lambda self: self.serving)
    @rule(data=st.data(), cancels=st.booleans())
    def ship(self, data: st.DataObject, cancels: bool) -> None:
        serving = data.draw(st.sampled_from(self.serving))
        self.serving.remove(serving)
        handoff = serving[0].handoff
        if cancels:
            self.served.cancel(serving[2])
        self.served.shipped(0, Shipment(handoff=handoff.id, epoch=1, wire_bytes=0, seconds=0.0, link_s=0.0))

    @precondition(lambda self: self.stores and self.stores.loads and self.asked)
    @rule()
    def cancel_serving(self) -> None:
        """Cancel the served fetches that wait for a load, as far as they have not begun."""
        begun = [listener for _, _, listener in self.serving]
        orders = [self.asked[order.handoff.id][1] for order in self.served._orders]
        for _, listener in self.asked.values():
            if listener not in begun and listener not in orders:
                self.served.cancel(listener)

    @invariant()
    def served_blocks_stay(self) -> None:
        self._flush_copies()
        for begin, tokens, _ in self.serving:
            self._check_served(begin, tokens)

    def _check_served(self, begin: BeginOrder, tokens: list[int]) -> None:
        pool, first = self.pool, begin.handoff.first_token
        window_start = self.layout.cache.window_start(begin.num_tokens, held=first)
        for position in range(first, begin.num_tokens):
            slot = begin.blocks[position // _BLOCK] * _BLOCK + position % _BLOCK
            assert pool.tokens[slot] == tokens[position], "a served block has another content"
            if isinstance(pool, FakeWindowPool) and position >= window_start:
                assert pool.part_of.get(begin.blocks[position // _BLOCK]), "a served part is gone"
                assert pool.part_tokens[pool.part_slot(slot)] == tokens[position], "a served part has another content"
        if begin.state_slot is not None:
            assert pool.states[begin.state_slot - _NUM_BLOCKS] == tuple(tokens), "a served state is another"

    @invariant()
    def reports_are_exact(self) -> None:
        if self.stores:
            for prefix_hash, tier in self.tiers.take_changes().items():
                if tier is None:
                    self.known.pop(prefix_hash, None)
                else:
                    self.known[prefix_hash] = tier
            assert self.known == self.tiers.table.held()
            self.tiers.table.check_integrity()
            self._check_beliefs_of_routers()

    def _check_beliefs_of_routers(self) -> None:
        index = PrefixIndex()
        for prefix_hash, tier in self.known.items():
            index.store("r", [prefix_hash], tier)
        needed = self.layout.cache.num_checkpoints
        for prompt in self.prompts if needed else ():
            hashes = prompt.sequence.hashes()
            depths = index.depths_to_checkpoints(hashes, [*map(checkpoint_hash, hashes)], among={"r": needed})
            believed = depths["r"].device if "r" in depths else 0
            assert believed <= self.blocks.match_reusable(hashes), "a router believes in a hit that is none"

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.blocks.check_integrity()
        assert self.engine.num_queued_tokens >= 0

    def teardown(self) -> None:
        if self.stores:
            for prompt in self.prompts:
                self.fetches.cancel(prompt)
            for _, listener in self.asked.values():
                self.served.cancel(listener)
            self._flush_copies()
            self._served_orders = []
            while self.stores.loads:
                self.end_load(99)
            self.step_served()
            assert not len(self.served)
        self._patch.undo()
        super().teardown()

    def step_served(self) -> None:
        for order in self.served.take_orders():
            self.serving.append((order, [], FakeListener()))
        for begin, _, _ in self.serving:
            shipment = Shipment(handoff=begin.handoff.id, epoch=1, wire_bytes=0, seconds=0.0, link_s=0.0)
            self.served.shipped(0, shipment)


class LoadingMachine(Loading):
    pass


class LoadingStatesMachine(Loading, StatesMachine):
    layout = _WITH_STATES


class LoadingStatesAheadMachine(LoadingStatesMachine):
    is_async = True


class PrefillingLoadingStatesMachine(LoadingStatesMachine):
    decodes = False


class LoadingWindowsMachine(Loading, WindowsMachine):
    layout = _WITH_WINDOWS
    num_parts = 1 + 4 + 2 + 5


class PrefillingLoadingWindowsMachine(LoadingWindowsMachine):
    decodes = False


class LoadingWindowsAheadMachine(Loading, SpeculatingWindowsMachine):
    layout = _WITH_WINDOWS
    is_async = True
    num_parts = 1 + 4 + 4 + 5


@pytest.mark.parametrize(
    "machine",
    quick(
        [
            *(LoadingMachine, LoadingStatesMachine, LoadingStatesAheadMachine, PrefillingLoadingStatesMachine),
            *(LoadingWindowsMachine, PrefillingLoadingWindowsMachine, LoadingWindowsAheadMachine),
        ],
        [LoadingStatesMachine, PrefillingLoadingWindowsMachine],
    ),
)
def test_random_loads(machine: type[Loading]) -> None:
    few = settings(SETTINGS, max_examples=-(-SETTINGS.max_examples // 5))
    run_state_machine_as_test(machine, settings=few)


class FailingFetches(NoConnector):
    """Connector whose prefixes are gone when their fetches begin."""

    def __init__(self, queue: Callable[[], PromptQueue]) -> None:
        self._queue = queue

    def begin_step(self, admitted: Sequence[Prompt]) -> None:
        for prompt in admitted:
            if prompt in self._queue().fetching:
                self._queue().fetch_failed(prompt)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_prompt_whose_prefix_is_gone_waits_for_no_command(decodes: bool) -> None:
    """The step loop sleeps after a step without work."""
    one: Engine[Any] = make_engine(connector=FailingFetches(lambda: one.prompts), decodes=decodes)
    one.add(make_prompt(range(9), num_offered=8, is_loaded=True))
    results = [one.step()]
    while results[-1].did_work:
        results.append(one.step())
    assert any(result.prefilled for result in results)


def test_a_disk_that_hangs_takes_the_blocks_of_one_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load past its deadline leaves its blocks in quarantine, so loads behind it would take the whole pool."""
    clock, blocks, pool = FakeClock(), BlockManager(_NUM_BLOCKS), FakePool()
    monkeypatch.setattr(engine.tiers.tiers, "time", clock)
    prompts = [make_prompt([kind] * 17) for kind in range(3)]
    stores = FakeStores(pool, host=0, disk=12)
    stores.found = dict(enumerate(one for prompt in prompts for one in prompt.sequence.hashes()))
    tiers: Tiers[Prompt] = Tiers(blocks, stores, _LAYOUT, eviction="lru", timeout_s=1.0)  # type: ignore[arg-type]
    tiers.take_changes()

    def begin(prompt: Prompt) -> bool:
        sequence = prompt.sequence
        is_offered = tiers.offer(sequence, tokens_per_s=0.0) == 16
        assert allocate(sequence, blocks)
        has_begun = tiers.begin(prompt, sequence.hashes(), sequence.blocks)
        assert has_begun == is_offered
        return has_begun

    assert begin(prompts[0])
    stores.start_loads(tiers.table.take_orders()[0])
    clock.now += 1000.0
    assert tiers.expired() == prompts[:1]
    prompts[0].sequence.leave_out(tiers.cancel(prompts[0]))
    assert not begin(prompts[1])
    for prompt in prompts[:2]:
        prompt.sequence.release(blocks)
    assert blocks.num_available == _NUM_BLOCKS - 4
    assert tiers.loaded(0, LoadResult(stores.loads.popleft().id, 0, {}, {})) is None
    assert begin(prompts[2]) and blocks.num_available == _NUM_BLOCKS - 5

"""Requests of a simulated cluster, and the replicas that compute their prompts.

A simulated replica is the real engine with a runner that only takes virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from core.trace.trace import TraceRequest
from core.types.request import Role, Sampling, SequenceRequest
from core.types.step_timing import pairs
from engine.engine import Engine, SchedulerConfig
from engine.sampling.params import Sampled, SamplingRow
from engine.scheduler.prompts import KVSource, Prompt
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.scheduler.step import KVConnector, ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.acceptance_rates import RowYield
from planner.simulator.clock import Action
from planner.simulator.drafts import SimulatedDrafts
from planner.simulator.store import Held, Site, Store
from router.routing.candidates import Option

NO_LOGITS = ()
_NO_LIMIT = 1 << 40
_MODEL = "simulated"

AnyReplica = TypeVar("AnyReplica", bound="Replica")


@dataclass(eq=False)
class Flight:
    """State and timestamps of one simulated request, in seconds of virtual time."""

    request: TraceRequest
    hashes: list[bytes]
    option: Option
    expected: list[bytes] = field(default_factory=list)  # hashes in the index once the prompt is computed
    compute_s: float = 0.0  # predicted time to compute the uncached part of the prompt
    num_cached: int = 0  # prompt tokens found in the cache
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended_at: float = 0.0
    restored: list[int] = field(default_factory=list)  # fetched blocks, held until admission
    moves_to: str | None = None  # target decode replica of a move in progress
    promised_blocks: int = 0  # blocks reserved on a decode replica, including the predicted answer
    reserved_at: int = 0  # number of generated tokens when the target reserved blocks
    replicas: list[Replica] = field(default_factory=list)  # replicas that serve the request

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.request.arrival_s

    @property
    def mean_itl_s(self) -> float:
        gaps = self.request.num_output - 1
        return (self.last_token_at - self.first_token_at) / gaps if gaps else 0.0

    def sequence(self, *, block_size: int, num_generated: int = 0) -> TokenSequence:
        """Build the engine's sequence. All its tokens are equal: the hashes identify the prompt."""
        num_tokens = self.request.num_tokens
        request = SequenceRequest(
            id=str(self.request.number),
            token_ids=(self.request.number,) * (num_tokens + num_generated),
            num_prompt_tokens=num_tokens,
            sampling=Sampling(max_tokens=self.request.num_output),
            priority=self.request.number,  # a request delayed by a fetch keeps its place in the queue
        )
        return TokenSequence(request, 0, model=_MODEL, block_size=block_size, max_context=_NO_LIMIT, hashes=self.hashes)


class Replica(ABC):
    """Common part of the replicas of both roles: the engine, and the router's predictions about the replica."""

    def __init__(
        self,
        name: str,
        role: Role,
        site: Site,
        *,
        connector: KVConnector | None = None,
        drafts: SimulatedDrafts | None = None,
    ) -> None:
        """drafts: None: no speculative decoding."""
        setup, is_prefill = site.setup, role is Role.PREFILL
        self.name = name
        self.busy_s = 0.0
        self.busy_until = 0.0  # predicted end of the prompts sent here
        self.num_open = 0  # open requests that this replica serves
        self.on_empty: Action | None = None  # called when the draining replica is empty; None: not draining
        self.row_yield = RowYield()  # of drafts, as a live replica reports it to its routers
        self.max_batch_tokens = setup.prefill_batch_tokens if is_prefill else setup.decode_batch_tokens
        self.store = Store(name, site, max_batch_tokens=self.max_batch_tokens)
        states = self.store.blocks.states  # every sequence needs a state slot if the model has states
        self.max_running = min(setup.max_running, states.num_slots) if states else setup.max_running
        self._prompts: dict[Flight, Prompt] = {}  # of the requests that are here
        self._flights: dict[TokenSequence, Flight] = {}
        self._current_step: ScheduledStep | None = None
        self._num_expected = 0  # prompts sent here that are not computed yet
        self._link_free_at = {"out": 0.0, "host": 0.0}  # when the bytes queued so far have passed
        self._block_size = setup.block_size
        self._clock = site.clock
        self._cores = site.cores
        self._width = setup.prefill_width if is_prefill else setup.decode_width
        self.timing = site.profile.timing(self._width)
        self._engine = Engine(
            self,
            _repeat_last,
            self.store.blocks,
            SchedulerConfig(
                max_batch_tokens=self.max_batch_tokens,
                max_running=self.max_running,
                max_waiting=_NO_LIMIT,
                decodes=not is_prefill,
            ),
            block_size=setup.block_size,
            connector=connector,
            speculation=drafts.speculation if drafts else None,
            step_times=drafts,
        )

    @property
    def num_streams(self) -> int:
        return len(self._prompts)

    @property
    def queue_s(self) -> float:
        """Predicted time to compute the queued prompts."""
        return max(0.0, self.busy_until - self._clock.now)

    @property
    def kv_share(self) -> float:
        """Share of KV blocks in use."""
        return 1 - self.store.blocks.num_usable / self.store.blocks.num_blocks

    def expect(self, compute_s: float) -> None:
        """Record a prompt that is sent here, with the predicted time to compute it."""
        self.busy_until = max(self._clock.now, self.busy_until) + compute_s
        self._num_expected += 1

    def settle(self) -> None:
        """Record that an expected prompt is computed. After the last one, no backlog is predicted."""
        self._num_expected -= 1
        if not self._num_expected:
            self.busy_until = 0.0

    def drain(self, then: Action) -> None:
        """Stop getting new requests. then: called when the replica is empty."""
        self.on_empty = then

    def send(self, num_bytes: float, bytes_per_s: float, *, link: str = "out") -> float:
        """Queue bytes on a link. Return the time at which they have passed, after those queued earlier."""
        self._link_free_at[link] = max(self._clock.now, self._link_free_at[link]) + num_bytes / bytes_per_s
        return self._link_free_at[link]

    @abstractmethod
    def execute(self, step: ScheduledStep | None, orders: Orders) -> tuple[()]:
        """Spend the time of a step (engine.scheduler.step.Runner)."""

    def _add(self, flight: Flight, source: KVSource, *, num_generated: int = 0) -> None:
        sequence = flight.sequence(block_size=self._block_size, num_generated=num_generated)
        self._flights[sequence] = flight
        self._prompts[flight] = Prompt(sequence, source=source)
        self._engine.add(self._prompts[flight])
        self._wake()

    def _forget(self, flight: Flight) -> Prompt:
        prompt = self._prompts.pop(flight)
        del self._flights[prompt.sequence]
        return prompt

    def _wake(self) -> None:
        """React to a change."""
        if not self._current_step:
            self._step()

    def _step(self) -> None:
        """Launch a step, if there is work."""
        if self._engine.launch().has_rows:
            return
        self.store.publish()
        # Free the blocks fetched for waiting prompts, which might wait for these very blocks. A received prompt's
        # fetched blocks belong to its prefill replica.
        if held := [one for one, prompt in self._prompts.items() if one.restored and not prompt.is_received]:
            for flight in held:
                self._free_restored(flight)
            self._step()

    def _start(self, prompt: Prompt) -> None:
        """Record the cached tokens of a prompt that is computed here, and which now holds the fetched blocks itself."""
        flight = self._flights[prompt.sequence]
        flight.num_cached = prompt.num_cached
        self._free_restored(flight)

    def _free_restored(self, flight: Flight) -> None:
        self.store.blocks.free(flight.restored)
        flight.restored = []


class PrefillReplica(Replica):
    """Replica that computes prompts.

    `finished(replica, flight)` is called when a prompt's KV is complete. After the transfer, the fleet calls `release`.
    """

    def __init__(self, name: str, site: Site, *, finished: Callable[[PrefillReplica, Flight], None]) -> None:
        super().__init__(name, Role.PREFILL, site)
        self._finished = finished
        self._held: dict[Flight, Held] = {}  # until their transfer has ended

    def submit(self, flight: Flight) -> None:
        self._add(flight, KVSource.HERE)

    def release(self, flight: Flight) -> None:
        """Free the blocks of a prompt whose KV has been sent."""
        self._forget(flight)
        self.store.release(self._held.pop(flight))
        self._wake()

    def execute(self, step: ScheduledStep | None, orders: Orders) -> tuple[()]:
        if step is None:  # only copies
            return NO_LOGITS
        self._current_step = step
        for prompt, _ in step.prompts:
            self._start(prompt)
        seconds = self.timing.step_s(num_tokens=step.num_tokens, num_pairs=num_pairs(step), num_context=0)
        began_at = self._clock.now
        self._cores.run(seconds, lambda: self._end(step, began_at), width=self._width)
        return NO_LOGITS

    def _end(self, step: ScheduledStep, began_at: float) -> None:
        self.busy_s += self._clock.now - began_at
        for prompt in step.whole:
            self._held[self._flights[prompt.sequence]] = self.store.hold(prompt.sequence)
        result = self._engine.complete(step)
        self.store.publish()
        for prefilled in result.prefilled:
            self._finished(self, self._flights[prefilled.prompt.sequence])
        self._current_step = None
        self._step()


def serving(replicas: Mapping[str, AnyReplica]) -> list[AnyReplica]:
    """Return the replicas that get new requests."""
    return [replica for replica in replicas.values() if replica.on_empty is None]


def num_pairs(step: ScheduledStep) -> int:
    """Return the pairs of positions that the prompts of a step attend to."""
    return sum(pairs(count, after=prompt.sequence.num_computed) for prompt, count in step.prompts)


def _repeat_last(logits: tuple[()], rows: Sequence[SamplingRow], positions: Sequence[int] | None, /) -> Sampled:
    """Sample each row's last token again (an engine.sampling.params.Sampler)."""
    return Sampled.known([(row.tokens[-1], None) for row in rows])

"""Simulated prefill replica: the real engine with a runner that only takes virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.types.step_timing import StepTiming, pairs
from engine.engine import Engine, SchedulerConfig
from engine.sampling.params import Sampled, SamplingRow
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from planner.simulator.clock import Clock
from planner.simulator.cores import Cores
from planner.simulator.flight import Flight
from planner.simulator.store import Held, Store

NO_LIMIT = 1 << 40
NO_LOGITS = ()


def repeat_last(logits: tuple[()], rows: Sequence[SamplingRow], positions: Sequence[int] | None, /) -> Sampled:
    """Sample each row's last token again (an engine.sampling.params.Sampler)."""
    return Sampled.known([(row.tokens[-1], None) for row in rows])


class PrefillReplica:
    """Simulated replica that computes prompts. Implements engine.scheduler.step.Runner.

    `finished(flight)` is called when a prompt's KV is complete. After the transfer, the fleet calls `release`.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        timing: StepTiming,
        *,
        block_size: int,
        max_batch_tokens: int,
        max_running: int,
        finished: Callable[[Flight], None],
        cores: Cores | None = None,
        width: int = 1,
    ) -> None:
        """cores: cores shared with other replicas; None: not shared. width: width of its steps on them."""
        self.store = store
        self.busy_s = 0.0
        self._clock = clock
        self._timing = timing
        self._cores = cores
        self._width = width
        self._block_size = block_size
        config = SchedulerConfig(
            max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=NO_LIMIT, decodes=False
        )
        self._engine = Engine(self, repeat_last, store.blocks, config, block_size=block_size)
        self._finished = finished
        self._flights: dict[Prompt, Flight] = {}
        self._waiting: dict[Flight, None] = {}  # requests whose KV has not been sent
        self._held: dict[Flight, Held] = {}  # until their transfer has ended
        self._is_stepping = False

    @property
    def num_streams(self) -> int:
        return len(self._waiting)

    def submit(self, flight: Flight) -> None:
        prompt = Prompt(flight.sequence(block_size=self._block_size))
        self._flights[prompt], self._waiting[flight] = flight, None
        self._engine.add(prompt)
        if not self._is_stepping:
            self._step()

    def release(self, flight: Flight) -> None:
        """Free the blocks of a prompt whose KV has been sent."""
        del self._waiting[flight]
        self.store.release(self._held.pop(flight))
        if not self._is_stepping:
            self._step()

    def execute(self, step: ScheduledStep | None, orders: Orders) -> tuple[()]:
        """Spend the time of a step."""
        if step is None:  # only copies
            return NO_LOGITS
        for prompt, _ in step.prompts:
            flight = self._flights[prompt]
            flight.num_cached = prompt.num_cached
            self.store.blocks.free(flight.restored)
            flight.restored = []
        seconds = self._timing.step_s(
            num_tokens=sum(count for _, count in step.prompts),
            num_pairs=sum(pairs(count, after=prompt.sequence.num_computed) for prompt, count in step.prompts),
            num_context=0,
        )
        began_at = self._clock.now
        if self._cores:
            self._cores.run(seconds, lambda: self._end(step, began_at), width=self._width)
        else:
            self._clock.at(began_at + seconds, lambda: self._end(step, began_at))
        return NO_LOGITS

    def _step(self) -> None:
        step = self._engine.launch()
        self._is_stepping = step.has_rows
        if not step.has_rows:
            self._give_up_restored()

    def _give_up_restored(self) -> None:
        """Free the blocks fetched for waiting prompts, which could otherwise wait for these very blocks."""
        if held := [flight for flight in self._waiting if flight.restored]:
            for flight in held:
                self.store.blocks.free(flight.restored)
                flight.restored = []
            self._step()

    def _end(self, step: ScheduledStep, began_at: float) -> None:
        self.busy_s += self._clock.now - began_at
        for prompt, count in step.prompts:
            if count == prompt.sequence.num_missing:  # complete
                self._held[self._flights[prompt]] = self.store.hold(prompt.sequence)
        result = self._engine.complete(step)
        self.store.publish()
        for prefilled in result.prefilled:
            self._finished(self._flights.pop(prefilled.prompt))
        self._step()

"""A prefill replica under virtual time: the engine's own scheduler and blocks, with seconds from the profile."""

from __future__ import annotations

from collections.abc import Callable

from cluster.words.timing import StepTiming, pairs
from engine.prefill_scheduler import Job, Scheduler
from router.simulator.clock import Clock
from router.simulator.cores import Cores
from router.simulator.flight import Flight
from router.simulator.store import Store

NO_LIMIT = 1 << 40


class PrefillReplica:
    """Computes prompts, one step after the other. `finished(flight)` is called when a prompt's KV is whole.

    Whoever ships it then calls `release`, which gives its blocks back.
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
    ) -> None:
        """cores: what it shares with other replicas; None: nothing."""
        self.store = store
        self.busy_s = 0.0
        self._clock = clock
        self._timing = timing
        self._cores = cores
        self._block_size = block_size
        self._scheduler = Scheduler(
            store.blocks, max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=NO_LIMIT
        )
        self._finished = finished
        self._flights: dict[Job, Flight] = {}
        self._jobs: dict[Flight, Job] = {}
        self._is_stepping = False

    @property
    def num_streams(self) -> int:
        return len(self._jobs)

    def submit(self, flight: Flight) -> None:
        job = Job(flight.sequence(block_size=self._block_size), None)
        self._flights[job], self._jobs[flight] = flight, job
        self._scheduler.add(job)
        if not self._is_stepping:
            self._step()

    def release(self, flight: Flight) -> None:
        """Its KV has been sent."""
        self._jobs.pop(flight).sequence.release(self.store.blocks)
        self.store.publish()
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        chosen = self._scheduler.schedule()
        self._is_stepping = bool(chosen)
        if not chosen:
            self._give_up_restored()
            return
        for job, _ in chosen:
            flight = self._flights[job]
            flight.num_cached = job.num_cached
            self.store.blocks.free(flight.restored)
            flight.restored = []
        seconds = self._timing.step_s(
            num_tokens=sum(count for _, count in chosen),
            num_pairs=sum(pairs(count, after=job.sequence.num_computed) for job, count in chosen),
            num_context=0,
        )
        began_at = self._clock.now
        if self._cores:
            self._cores.run(seconds, lambda: self._end(chosen, began_at))
        else:
            self._clock.at(began_at + seconds, lambda: self._end(chosen, began_at))

    def _give_up_restored(self) -> None:
        """Blocks that were fetched for jobs that wait must not be what they wait for."""
        if held := [flight for flight in self._jobs if flight.restored]:
            for flight in held:
                self.store.blocks.free(flight.restored)
                flight.restored = []
            self._step()

    def _end(self, chosen: list[tuple[Job, int]], began_at: float) -> None:
        self.busy_s += self._clock.now - began_at
        for job, count in chosen:
            job.sequence.computed(count, self.store.blocks)
            if not job.sequence.num_missing:
                self._scheduler.remove(job)
        self.store.publish()
        for job, _ in chosen:
            if not job.sequence.num_missing:
                self._finished(self._flights.pop(job))
        self._step()

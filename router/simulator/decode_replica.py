"""A decode replica, or one that does both, under virtual time: the engine's own scheduler and blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster.words.timing import StepTiming, pairs
from engine.decode_scheduler import Scheduler
from engine.group import Choice, Group, Source
from router.simulator.clock import Clock
from router.simulator.cores import Cores
from router.simulator.flight import Flight
from router.simulator.prefill_replica import NO_LIMIT
from router.simulator.store import Store


class _Leap:
    """Several steps in a row that are all alike: the same rows, one token each. Only a surprise cuts it short."""

    def __init__(self, begin_s: float, num_steps: int, first_s: float, growth_s: float) -> None:
        self.begin_s = begin_s
        self.num_steps = num_steps
        self.first_s = first_s
        self._growth_s = growth_s  # each step reads one position more per row than the one before

    def after(self, num_steps: int) -> float:
        """When the first `num_steps` are over."""
        return self.begin_s + num_steps * self.first_s + self._growth_s * num_steps * (num_steps - 1) / 2

    def begun_by(self, when: float) -> int:
        """How many steps have begun by then, the one under way included."""
        a, b, c = self._growth_s / 2, self.first_s - self._growth_s / 2, self.begin_s - when
        steps = (-c / b) if a == 0 else (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
        return max(1, min(self.num_steps, math.ceil(steps - 1e-9)))


class DecodeReplica:
    """Continuous batching. It tells `admitted(flight)`, when its blocks are set aside and a prefill replica may begin;
    `prefilled(flight)`, when a prompt was computed here; `gaps(seconds, count)` between tokens; `ended(flight)`.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        timing: StepTiming,
        decode_timing: StepTiming,
        *,
        block_size: int,
        max_batch_tokens: int,
        max_running: int,
        admitted: Callable[[Flight], None],
        prefilled: Callable[[Flight], None],
        gaps: Callable[[float, int], None],
        ended: Callable[[Flight], None],
        cores: Cores | None = None,
    ) -> None:
        """decode_timing: of steps that only decode. cores: what it shares with other replicas; None: nothing."""
        self.store = store
        self.busy_s = 0.0
        self._clock = clock
        self._timing = timing
        self._decode_timing = decode_timing
        self._cores = cores
        self._block_size = block_size
        self._scheduler = Scheduler(
            store.blocks, max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=NO_LIMIT
        )
        self._admitted = admitted
        self._prefilled = prefilled
        self._gaps = gaps
        self._ended = ended
        self._flights: dict[Group, Flight] = {}
        self._groups: dict[Flight, Group] = {}
        self._leap: _Leap | None = None
        self._step_number = 0
        self._chosen: list[tuple[Choice, int]] = []

    @property
    def num_streams(self) -> int:
        return len(self._groups)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def submit(self, flight: Flight) -> None:
        """With a prefill replica, the prompt's KV comes by `land`; without, it is computed here."""
        source = Source.PREFILL if flight.option.prefill else Source.HERE
        group = Group(flight.sequence(block_size=self._block_size), router="", source=source)
        self._flights[group], self._groups[flight] = flight, group
        self._scheduler.add(group)
        self._wake()

    def land(self, flight: Flight) -> None:
        """The prompt's KV is here, and its first token is known."""
        group = self._groups[flight]
        group.root.computed(group.root.num_missing, self.store.blocks)
        self._start(group, emit=False)
        self.store.publish()
        self._wake()

    def missing_tokens(self, flight: Flight) -> int:
        """Tokens whose KV an admitted request lacks here."""
        return self._groups[flight].root.num_missing

    def _wake(self) -> None:
        """Something has changed: begin to step, or cut a leap short after the step under way."""
        if not self._chosen:
            self._step()
        elif self._leap:
            num_steps = self._leap.begun_by(self._clock.now)
            if num_steps < self._leap.num_steps:
                self._leap.num_steps = num_steps
                self._end_at(self._leap.after(num_steps))

    def _step(self) -> None:
        for group in self._scheduler.admit():
            flight = self._flights[group]
            if group.source is Source.HERE:
                self._free_restored(flight)
                flight.num_cached = group.num_cached
            else:
                self._admitted(flight)
        self._chosen = chosen = self._scheduler.schedule()
        self.store.publish()
        self._leap = None
        if not chosen:
            self._give_up_restored()
            return
        is_plain = len(chosen) == len(self._scheduler.decoding)
        num_steps = self._num_plain_steps() if is_plain else 1
        decoding = self._scheduler.decoding
        timing = self._decode_timing if is_plain else self._timing
        seconds = timing.step_s(
            num_tokens=sum(count for _, count in chosen),
            num_pairs=0 if is_plain else sum(_pairs(choice, count) for choice, count in chosen[len(decoding) :]),
            num_context=sum(len(choice.sequence.tokens) for choice in decoding),
        )
        self._leap = _Leap(self._clock.now, num_steps, seconds, timing.context_s * len(decoding))
        if self._cores:
            self._step_number += 1
            number = self._step_number
            self._cores.run(seconds, lambda: self._end(number))
        else:
            self._end_at(self._leap.after(num_steps))

    def _give_up_restored(self) -> None:
        """Blocks that were fetched for requests that wait must not be what they wait for."""
        held = [flight for flight, group in self._groups.items() if flight.restored and group.source is Source.HERE]
        for flight in held:
            self._free_restored(flight)
        if held:
            self._step()

    def _free_restored(self, flight: Flight) -> None:
        """Only of a prompt that is computed here: else they are blocks of its prefill replica."""
        self.store.blocks.free(flight.restored)
        flight.restored = []

    def _num_plain_steps(self) -> int:
        """How many steps nothing but time can change: until a sequence ends, or blocks run out."""
        decoding = self._scheduler.decoding
        if self._scheduler.num_waiting or self._cores:  # how long a step takes on shared cores is known when it ends
            return 1
        num_steps = min(c.sequence.request.sampling.max_tokens - c.sequence.num_generated for c in decoding)
        blocks = self.store.blocks
        wanted = [choice.sequence.num_blocks_for(len(choice.sequence.tokens) + num_steps - 1) for choice in decoding]
        missing = sum(max(0, want - len(c.sequence.blocks)) for want, c in zip(wanted, decoding, strict=True))
        if missing > blocks.num_available:
            return 1
        for want, choice in zip(wanted, decoding, strict=True):
            blocks.extend(choice.sequence.blocks, want)
        return num_steps

    def _end_at(self, when: float) -> None:
        self._step_number += 1
        number = self._step_number
        self._clock.at(when, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._step_number:
            return  # the leap was cut short
        leap, chosen = self._leap, self._chosen
        assert leap
        self._leap, self._chosen = None, []
        self.busy_s += self._clock.now - leap.begin_s
        for choice, count in chosen:
            sequence = choice.sequence
            if leap.num_steps > 1:
                sequence.tokens += sequence.tokens[-1:] * (leap.num_steps - 1)
                count = leap.num_steps
            sequence.computed(count, self.store.blocks)
            if not sequence.num_missing:
                self._sampled(choice, leap)
        self.store.publish()
        self._step()

    def _sampled(self, choice: Choice, leap: _Leap) -> None:
        if not choice.group.choices:  # its prompt was computed here
            self._start(choice.group, emit=True)
            return
        flight = self._flights[choice.group]
        first_at = leap.after(1) if leap.num_steps > 1 else self._clock.now
        self._gaps(first_at - flight.last_token_at, 1)
        if leap.num_steps > 1:
            self._gaps((self._clock.now - leap.after(1)) / (leap.num_steps - 1), leap.num_steps - 1)
        flight.last_token_at = self._clock.now
        self._append(choice)

    def _start(self, group: Group, *, emit: bool) -> None:
        """The prompt's KV is whole: take the first token, and decode."""
        flight = self._flights[group]
        self._scheduler.ready(group)
        choice = Choice(group, group.root, 0)
        group.choices = [choice]
        if emit:
            flight.first_token_at = flight.last_token_at = self._clock.now
            self._prefilled(flight)
        self._append(choice)

    def _append(self, choice: Choice) -> None:
        token = choice.sequence.append(choice.sequence.tokens[-1])
        if not token.finish_reason:
            self._scheduler.start(choice)
            return
        self._scheduler.remove_choice(choice)
        choice.sequence.release(self.store.blocks)
        flight = self._flights.pop(choice.group)
        del self._groups[flight]
        flight.ended_at = self._clock.now
        self._ended(flight)


def _pairs(choice: Choice, count: int) -> int:
    return pairs(count, after=choice.sequence.num_computed)

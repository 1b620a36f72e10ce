"""Simulated decode replica, possibly colocated."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.types.request import Role
from engine.scheduler.prompts import KVSource, Prompt
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.scheduler.step import Prefilled, ScheduledStep
from engine.scheduler.step_commands import Orders
from planner.simulator.clock import Action
from planner.simulator.drafts import SimulatedDrafts
from planner.simulator.replica import NO_LOGITS, Flight, Replica, num_pairs
from planner.simulator.store import Site


@dataclass
class _Leap:
    """Series of identical decode steps (same rows, one token each), simulated as one event.

    A change, such as a new request, cuts it short.
    """

    begin_s: float
    num_steps: int
    first_s: float
    growth_s: float  # time added per step, as each row's context grows by one token

    def after(self, num_steps: int) -> float:
        """Return the time at which the first `num_steps` end."""
        return self.begin_s + num_steps * self.first_s + self.growth_s * num_steps * (num_steps - 1) / 2

    def begun_by(self, when: float) -> int:
        """Return how many steps have begun at `when`, the running one included."""
        a, b, c = self.growth_s / 2, self.first_s - self.growth_s / 2, self.begin_s - when
        steps = (-c / b) if a == 0 else (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
        return max(1, min(self.num_steps, math.ceil(steps - 1e-9)))


class DecodeReplica(Replica):
    """Replica with continuous batching. It also implements engine.scheduler.step.KVConnector.

    Callbacks:
      admitted(flight)            blocks are allocated, so a prefill replica may begin
      reserved(flight)            blocks are allocated for an answer that still runs on another replica
      prefilled(replica, flight)  a prompt was computed on this replica
      gaps(seconds, count)        `count` tokens, each `seconds` after the one before
      ended(flight)               the answer is complete
      leaving(replica, flight)    a running answer must move, because this replica drains
    """

    def __init__(
        self,
        name: str,
        site: Site,
        *,
        seed: int,
        admitted: Callable[[Flight], None],
        reserved: Callable[[Flight], None],
        prefilled: Callable[[DecodeReplica, Flight], None],
        gaps: Callable[[float, int], None],
        ended: Callable[[Flight], None],
        leaving: Callable[[DecodeReplica, Flight], None],
    ) -> None:
        """seed: of the simulated drafts."""
        rates = site.profile.drafts
        self.decode_timing = site.profile.decode_timing(site.setup.decode_width)
        self.drafts = SimulatedDrafts(rates, self.decode_timing, seed=seed) if rates else None
        super().__init__(name, Role.DECODE, site, connector=self, drafts=self.drafts)
        self._admitted = admitted
        self._reserved = reserved
        self._prefilled = prefilled
        self._gaps = gaps
        self._ended = ended
        self._leaving = leaving
        self._promised_blocks = 0
        self._handed_over: dict[Flight, Callable[[int], None]] = {}  # handovers at the end of the current step
        self._leap: _Leap | None = None
        self._step_number = 0

    @property
    def num_preemptions(self) -> int:
        return self._engine.decoding.num_preemptions

    def has_room(self, num_blocks: int) -> bool:
        """Return whether num_blocks fit, as ReplicaLoad.has_room_to_decode. An idle replica always has room."""
        blocks = self.store.blocks
        taken = max(blocks.num_blocks - blocks.num_usable, self._promised_blocks)
        has = self.num_streams < self.max_running and num_blocks <= blocks.num_blocks - taken
        return has or not self._prompts

    def submit(self, flight: Flight) -> None:
        """Add a request. Its KV arrives by `land` from its prefill replica; without one, this replica computes it."""
        self._add(flight, KVSource.PREFILL if flight.option.prefill else KVSource.HERE)

    def _add(self, flight: Flight, source: KVSource, *, num_generated: int = 0) -> None:
        self._promised_blocks += flight.promised_blocks
        super()._add(flight, source, num_generated=num_generated)

    def _forget(self, flight: Flight) -> Prompt:
        self._promised_blocks -= flight.promised_blocks
        return super()._forget(flight)

    def land(self, flight: Flight) -> None:
        """Receive the prompt's KV and the first token."""
        prompt = self._prompts[flight]
        tokens = prompt.sequence.tokens
        self._end_if_last(flight, self._engine.landed(prompt, len(tokens), tokens[-1:]))
        self.store.publish()
        self._wake()

    # Migration of answers while draining

    def drain(self, then: Action) -> None:
        """Call `leaving` for each running answer at the end of a step, and `then` when the replica is empty."""
        super().drain(then)
        self._wake()

    def sequence_of(self, flight: Flight) -> TokenSequence:
        return self._prompts[flight].sequence

    def reserve(self, flight: Flight, num_generated: int) -> None:
        """Reserve blocks for an answer that runs on another replica and has num_generated tokens."""
        self._add(flight, KVSource.DECODE, num_generated=num_generated)

    def give_up(self, flight: Flight) -> None:
        """Drop a reservation whose answer does not arrive."""
        self._engine.cancel(self._forget(flight))
        self._wake()

    def hand_over(self, flight: Flight, then: Callable[[int], None]) -> None:
        """Hand an answer over after the current step, once its KV is on the target.

        `then` is called with its number of generated tokens, unless the answer ends first.
        """
        self._handed_over[flight] = then
        if self._current_step:
            self._wake()
        else:
            self._hand_over()

    def take_over(self, flight: Flight, num_generated: int) -> None:
        """Continue a reserved answer here, from num_generated tokens."""
        prompt = self._prompts[flight]
        sequence = prompt.sequence
        num_new = num_generated - sequence.num_generated
        self._engine.landed(prompt, len(sequence.tokens) + num_new - 1, sequence.tokens[-1:] * num_new)
        self.store.publish()
        self._wake()

    def _hand_over(self) -> None:
        handed_over, self._handed_over = self._handed_over, {}
        for flight, then in handed_over.items():
            if flight in self._prompts:
                sequence = self._forget(flight).sequence
                self._engine.end(sequence)
                then(sequence.num_generated)

    def _announce_running(self) -> None:
        for sequence in list(self._engine.decoding.running) if self.on_empty else ():
            if (flight := self._flights[sequence]).moves_to is None:
                self._leaving(self, flight)

    def begin_step(self, admitted: Sequence[Prompt]) -> None:
        for prompt in admitted:
            if prompt.is_running_elsewhere:
                self._reserved(self._flights[prompt.sequence])
            elif prompt.is_received:
                self._admitted(self._flights[prompt.sequence])
            else:
                self._start(prompt)

    def orders(self, step: ScheduledStep) -> Orders:
        return Orders()

    def execute(self, step: ScheduledStep | None, orders: Orders) -> tuple[()]:
        """Spend the time of one step, or of a series of identical steps."""
        if step is None:  # only copies
            return NO_LOGITS
        self.store.publish()
        self._current_step = step
        is_plain = not step.prompts
        num_steps = self._num_plain_steps() if is_plain else 1
        timing = self.decode_timing if is_plain else self.timing
        seconds = timing.step_s(
            num_tokens=step.num_tokens,
            num_pairs=num_pairs(step),
            num_context=sum(len(sequence.tokens) for sequence, _ in step.decoding),
        )
        seconds += self.drafts.take_call_s() if self.drafts else 0.0
        self._leap = _Leap(self._clock.now, num_steps, seconds, timing.context_s * len(step.decoding))
        if self._cores.are_shared:
            self._cores.run(seconds, self._next_end(), width=self._width)
        else:
            self._clock.at(self._leap.after(num_steps), self._next_end())
        return NO_LOGITS

    def _wake(self) -> None:
        """React to a change: begin to step, or cut a leap short after the current step."""
        if not self._current_step:
            self._step()
        elif self._leap:
            num_steps = self._leap.begun_by(self._clock.now)
            if num_steps < self._leap.num_steps:
                self._leap.num_steps = num_steps
                self._clock.at(self._leap.after(num_steps), self._next_end())

    def _num_plain_steps(self) -> int:
        """Return how many decode steps can run as one event: until a sequence ends, or blocks run out."""
        decoding = self._engine.decoding.running
        # A move needs the exact number of tokens of each answer at any time. On shared cores the duration of a step is
        # known only at its end, and so is the number of accepted drafts.
        if self.on_empty or self._engine.num_waiting or self._cores.are_shared or self.drafts:
            return 1
        num_steps = min(sequence.request.sampling.max_tokens - sequence.num_generated for sequence in decoding)
        blocks = self.store.blocks
        if blocks.states:  # a step makes the next checkpoint
            num_steps = min(num_steps, *(one.checkpoints_at[0] - one.num_computed for one in decoding))
        if blocks.windows:  # a step attaches the next part
            num_steps = min(num_steps, *(one.parts.end * self._block_size - one.num_computed for one in decoding))
        needed = [sequence.num_blocks_for(len(sequence.tokens) + num_steps - 1) for sequence in decoding]
        missing = sum(max(0, count - len(s.blocks)) for count, s in zip(needed, decoding, strict=True))
        if missing > blocks.num_available:
            return 1
        for count, sequence in zip(needed, decoding, strict=True):
            blocks.extend(sequence.blocks, count)
        return num_steps

    def _next_end(self) -> Action:
        """Return the action for the end of the current step or leap. Actions returned earlier become void."""
        self._step_number += 1
        return functools.partial(self._end, self._step_number)

    def _end(self, number: int) -> None:
        if number != self._step_number:
            return  # the leap was cut short
        leap, step = self._leap, self._current_step
        assert leap and step
        self._leap = self._current_step = None
        self.busy_s += self._clock.now - leap.begin_s
        for sequence, _ in step.decoding if leap.num_steps > 1 else ():  # all but the last step of the leap
            sequence.tokens += sequence.tokens[-1:] * (leap.num_steps - 1)
            sequence.computed(leap.num_steps - 1, self.store.blocks)
        result = self._engine.complete(step)
        if self.drafts and result.num_rows:
            num_tokens, num_drafted = len(result.sampled), result.num_drafted
            self.row_yield.add(result.num_rows, num_tokens=num_tokens, num_drafted=num_drafted)
        for sequence, token in result.sampled:
            flight = self._flights[sequence]
            self._report_gaps(flight, leap)
            if token.finish_reason:
                self._ended_here(flight)
        for prefilled in result.prefilled:
            flight = self._flights[prefilled.prompt.sequence]
            flight.first_token_at = flight.last_token_at = self._clock.now
            self._prefilled(self, flight)
            self._end_if_last(flight, prefilled)
        self._hand_over()
        self.store.publish()
        self._step()
        self._announce_running()

    def _report_gaps(self, flight: Flight, leap: _Leap) -> None:
        first_at = leap.after(1) if leap.num_steps > 1 else self._clock.now
        self._gaps(first_at - flight.last_token_at, 1)
        if leap.num_steps > 1:
            self._gaps((self._clock.now - leap.after(1)) / (leap.num_steps - 1), leap.num_steps - 1)
        flight.last_token_at = self._clock.now

    def _end_if_last(self, flight: Flight, prefilled: Prefilled) -> None:
        """End an answer if its first token is the last."""
        if prefilled.tokens[0].finish_reason:
            self._ended_here(flight)

    def _ended_here(self, flight: Flight) -> None:
        self._forget(flight)
        flight.ended_at = self._clock.now
        self._ended(flight)

"""Simulated decode replica, possibly colocated: the real engine with a runner that only takes virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from core.types.step_timing import StepTiming, pairs
from engine.engine import Engine, SchedulerConfig
from engine.scheduler.prompts import KVSource, Prompt
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.scheduler.step import Prefilled, ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.acceptance import RowYield
from planner.simulator.clock import Clock
from planner.simulator.cores import Cores
from planner.simulator.drafts import SimulatedDrafts
from planner.simulator.flight import Flight
from planner.simulator.prefill_replica import NO_LIMIT, NO_LOGITS, repeat_last
from planner.simulator.store import Store


class _Leap:
    """Series of identical decode steps (same rows, one token each), simulated as one event.

    A change, such as a new request, cuts it short.
    """

    def __init__(self, begin_s: float, num_steps: int, first_s: float, growth_s: float) -> None:
        self.begin_s = begin_s
        self.num_steps = num_steps
        self.first_s = first_s
        self._growth_s = growth_s  # time added per step, as each row's context grows by one token

    def after(self, num_steps: int) -> float:
        """Return the time at which the first `num_steps` end."""
        return self.begin_s + num_steps * self.first_s + self._growth_s * num_steps * (num_steps - 1) / 2

    def begun_by(self, when: float) -> int:
        """Return how many steps have begun at `when`, the running one included."""
        a, b, c = self._growth_s / 2, self.first_s - self._growth_s / 2, self.begin_s - when
        steps = (-c / b) if a == 0 else (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
        return max(1, min(self.num_steps, math.ceil(steps - 1e-9)))


class DecodeReplica:
    """Simulated replica with continuous batching. Implements engine.scheduler.step.Runner and KVConnector.

    Callbacks:
      admitted(flight)      blocks are allocated, so a prefill replica may begin
      reserved(flight)      blocks are allocated for an answer that still runs on another replica
      prefilled(flight)     a prompt was computed here
      gaps(seconds, count)  `count` tokens, each `seconds` after the one before
      ended(flight)         the answer is complete
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
        reserved: Callable[[Flight], None],
        prefilled: Callable[[Flight], None],
        gaps: Callable[[float, int], None],
        ended: Callable[[Flight], None],
        cores: Cores | None = None,
        width: int = 1,
        drafts: SimulatedDrafts | None = None,
    ) -> None:
        """decode_timing: timing of decode-only steps. cores: cores shared with other replicas; None: not shared.
        width: width of its steps on them. drafts: None: no speculative decoding."""
        self.store = store
        self.busy_s = 0.0
        self._clock = clock
        self._timing = timing
        self._decode_timing = decode_timing
        self._cores = cores
        self._width = width
        self._block_size = block_size
        config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=NO_LIMIT)
        self._drafts = drafts
        self._yield = RowYield()
        self._engine = Engine(
            self,
            repeat_last,
            store.blocks,
            config,
            block_size=block_size,
            connector=self,
            speculation=drafts.speculation if drafts else None,
            step_times=drafts,
        )
        self._admitted = admitted
        self._reserved = reserved
        self._prefilled = prefilled
        self._gaps = gaps
        self._ended = ended
        self._max_running = max_running
        self._promised_blocks = 0
        self._flights: dict[Prompt, Flight] = {}
        self._prompts: dict[Flight, Prompt] = {}
        self._prompt_of: dict[TokenSequence, Prompt] = {}
        self._to_move: Callable[[Flight], None] | None = None  # called for each running answer; None: not leaving
        self._announced: set[Flight] = set()
        self._handed_over: dict[Flight, Callable[[int], None]] = {}  # handovers at the end of the current step
        self._leap: _Leap | None = None
        self._step_number = 0
        self._current_step: ScheduledStep | None = None

    @property
    def num_streams(self) -> int:
        return len(self._prompts)

    def has_room(self, num_blocks: int) -> bool:
        """Return whether num_blocks fit, as ReplicaLoad.has_room_to_decode. An idle replica always has room."""
        blocks = self.store.blocks
        taken = max(blocks.num_blocks - blocks.num_usable, self._promised_blocks)
        has = self.num_streams < self._max_running and num_blocks <= blocks.num_blocks - taken
        return has or not self._prompts

    @property
    def row_yield(self) -> RowYield:
        """Draft yield, as a live replica reports it to its routers."""
        return self._yield

    @property
    def num_preemptions(self) -> int:
        return self._engine.decoding.num_preemptions

    def submit(self, flight: Flight) -> None:
        """Add a request. With a prefill replica, its KV arrives by `land`; otherwise the prompt is computed here."""
        source = KVSource.PREFILL if flight.option.prefill else KVSource.HERE
        self._add(flight, Prompt(flight.sequence(block_size=self._block_size), source=source))

    def _add(self, flight: Flight, prompt: Prompt) -> None:
        self._flights[prompt], self._prompts[flight] = flight, prompt
        self._promised_blocks += flight.promised_blocks
        self._prompt_of[prompt.sequence] = prompt
        self._engine.add(prompt)
        self._wake()

    def land(self, flight: Flight) -> None:
        """Receive the prompt's KV and the first token."""
        prompt = self._prompts[flight]
        tokens = prompt.sequence.tokens
        self._start(self._engine.landed(prompt, len(tokens), tokens[-1:]))
        self.store.publish()
        self._wake()

    # Migration of answers while draining

    def leave(self, to_move: Callable[[Flight], None]) -> None:
        """Start draining: call `to_move` once for each running answer, at the end of a step."""
        self._to_move = to_move
        self._wake()

    def num_generated(self, flight: Flight) -> int:
        return self._prompts[flight].sequence.num_generated

    def reserve(self, flight: Flight, num_generated: int) -> None:
        """Reserve blocks for an answer that runs on another replica and has num_generated tokens."""
        sequence = flight.sequence(block_size=self._block_size, num_generated=num_generated)
        self._add(flight, Prompt(sequence, source=KVSource.DECODE))

    def give_up(self, flight: Flight) -> None:
        """Drop a reservation whose answer does not arrive."""
        prompt = self._prompts.pop(flight)
        self._promised_blocks -= flight.promised_blocks
        del self._flights[prompt], self._prompt_of[prompt.sequence]
        self._engine.cancel(prompt)
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
            if prompt := self._prompts.pop(flight, None):
                self._promised_blocks -= flight.promised_blocks
                del self._flights[prompt], self._prompt_of[prompt.sequence]
                num_generated = prompt.sequence.num_generated
                self._engine.end(prompt.sequence)
                then(num_generated)

    def _announce_running(self) -> None:
        if self._to_move is None:
            return
        for sequence in list(self._engine.decoding.running):
            flight = self._flights[self._prompt_of[sequence]]
            if flight not in self._announced:
                self._announced.add(flight)
                self._to_move(flight)

    def held_tokens(self, flight: Flight) -> int:
        """Return the number of leading tokens of an admitted request whose KV is here."""
        return self._prompts[flight].sequence.num_computed

    def begin_step(self, admitted: Sequence[Prompt]) -> None:
        for prompt in admitted:
            flight = self._flights[prompt]
            if prompt.is_running_elsewhere:
                self._reserved(flight)
            elif not prompt.is_received:
                self._free_restored(flight)
                flight.num_cached = prompt.num_cached
            else:
                self._admitted(flight)

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
        timing = self._decode_timing if is_plain else self._timing
        seconds = timing.step_s(
            num_tokens=step.num_tokens,
            num_pairs=sum(pairs(count, after=prompt.sequence.num_computed) for prompt, count in step.prompts),
            num_context=sum(len(sequence.tokens) for sequence, _ in step.decoding),
        )
        seconds += self._drafts.take_call_s() if self._drafts else 0.0
        self._leap = _Leap(self._clock.now, num_steps, seconds, timing.context_s * len(step.decoding))
        if self._cores:
            self._step_number += 1
            number = self._step_number
            self._cores.run(seconds, lambda: self._end(number), width=self._width)
        else:
            self._end_at(self._leap.after(num_steps))
        return NO_LOGITS

    def _wake(self) -> None:
        """React to a change: begin to step, or cut a leap short after the current step."""
        if not self._current_step:
            self._step()
        elif self._leap:
            num_steps = self._leap.begun_by(self._clock.now)
            if num_steps < self._leap.num_steps:
                self._leap.num_steps = num_steps
                self._end_at(self._leap.after(num_steps))

    def _step(self) -> None:
        step = self._engine.launch()
        if not step.has_rows:
            self.store.publish()
            self._give_up_restored()

    def _give_up_restored(self) -> None:
        """Free the blocks fetched for waiting requests, which could otherwise wait for these very blocks."""
        held = [flight for flight, prompt in self._prompts.items() if flight.restored and not prompt.is_received]
        for flight in held:
            self._free_restored(flight)
        if held:
            self._step()

    def _free_restored(self, flight: Flight) -> None:
        """Free the fetched blocks of a prompt computed here. Otherwise they belong to its prefill replica."""
        self.store.blocks.free(flight.restored)
        flight.restored = []

    def _num_plain_steps(self) -> int:
        """Return how many decode steps can run as one event: until a sequence ends, or blocks run out."""
        decoding = self._engine.decoding.running
        # A move needs the exact number of tokens of each answer at any time.
        if self._to_move is not None:
            return 1
        # On shared cores the duration of a step is known only at its end.
        if self._engine.num_waiting or self._cores:
            return 1
        # The number of accepted drafts is known only at the end of a step.
        if self._drafts:
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

    def _end_at(self, when: float) -> None:
        self._step_number += 1
        number = self._step_number
        self._clock.at(when, lambda: self._end(number))

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
        if self._drafts and result.num_rows:
            num_tokens, num_drafted = len(result.sampled), result.num_drafted
            self._yield.add(result.num_rows, num_tokens=num_tokens, num_drafted=num_drafted)
        for sequence, token in result.sampled:
            self._report_gaps(self._flights[self._prompt_of[sequence]], leap)
            if token.finish_reason:
                self._ended_here(self._prompt_of[sequence])
        for prefilled in result.prefilled:
            flight = self._flights[prefilled.prompt]
            flight.first_token_at = flight.last_token_at = self._clock.now
            self._prefilled(flight)
            self._start(prefilled)
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

    def _start(self, prefilled: Prefilled) -> None:
        """Start an answer with its first token, which may be the last."""
        if prefilled.tokens[0].finish_reason:
            self._ended_here(prefilled.prompt)

    def _ended_here(self, prompt: Prompt) -> None:
        del self._prompt_of[prompt.sequence]
        flight = self._flights.pop(prompt)
        del self._prompts[flight]
        self._promised_blocks -= flight.promised_blocks
        flight.ended_at = self._clock.now
        self._ended(flight)

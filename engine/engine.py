"""The engine: schedules, executes and samples the steps of one replica, and updates its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.types.errors import ContextLengthExceeded, RequestError
from core.types.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.kv.window_manager import WindowManager
from engine.sampling.params import Chosen, Sampler
from engine.scheduler.admission_rules import AdmissionPolicy, AdmitOnDemand, AdmitWithRoomToGrow
from engine.scheduler.async_steps import device_tokens_of, expect, may_be_followed
from engine.scheduler.decoding import Decoding
from engine.scheduler.jump_forward import append_forced
from engine.scheduler.local_decode import LocalDecodes
from engine.scheduler.prompts import Prompt, PromptQueue, allocate
from engine.scheduler.row_updates import LastRows
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import KVConnector, NoConnector, Prefilled, Runner, ScheduledStep, StepResult
from engine.scheduler.step_commands import Orders
from engine.spec_decode.speculation import Drafting, Speculation, StepTimes
from engine.spec_decode.verify import Draft, choices_of, verify
from engine.tiers.commands import TierOrders
from engine.timing.pace import Pace

Logits = TypeVar("Logits")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine."""

    max_batch_tokens: int  # per step
    max_running: int
    max_waiting: int
    decodes: bool = True  # False: a prompt finishes with the first token of each choice, except local decodes
    max_local_decodes: int = 0  # choices of local decodes, part of max_running; only for engines that do not decode
    max_local_decode_blocks: int = 0  # blocks of local decodes; a single one may exceed it


class Engine(Generic[Logits]):
    """All sequences of one replica, and the blocks that hold their KV. Owned by the step thread.

    A step is a `launch` followed by a `complete`. With async scheduling, the next step is launched between the two and
    still runs when `step` returns. Other methods see every sequence as it was before that launch.
    """

    def __init__(
        self,
        runner: Runner[Logits],
        sampler: Sampler[Logits],
        blocks: BlockManager,
        config: SchedulerConfig,
        *,
        block_size: int,
        connector: KVConnector | None = None,
        tier_orders: Callable[[], list[TierOrders]] = list,
        adapters: Mapping[str, int] | None = None,
        pace: Pace | None = None,
        speculation: Speculation | None = None,
        step_times: StepTimes | None = None,
        is_async: bool = False,
    ) -> None:
        """Create an engine without sequences.

        connector: None if all KV is computed locally. tier_orders: returns the pending transfers to and from lower
        tiers; they precede any write to a block allocated since the last call. adapters: name -> number in the model.
        pace: None disables timing. speculation: None disables drafting. step_times: estimates for planning drafts;
        None: those of the pace. is_async: the runner and the sampler return before the device has finished.
        """
        self.blocks = blocks
        self.prompts = PromptQueue(blocks, max_waiting=config.max_waiting)
        self.decoding = Decoding(blocks, max_blocks=None if config.decodes else config.max_local_decode_blocks)
        self.local_decodes = LocalDecodes(
            blocks,
            self.prompts,
            self.decoding,
            max_choices=config.max_local_decodes,
            max_blocks=config.max_local_decode_blocks,
        )
        self._admission: AdmissionPolicy = (
            AdmitWithRoomToGrow(blocks, self.prompts, self.decoding, max_running=config.max_running)
            if config.decodes
            else AdmitOnDemand(blocks, self.prompts, self.local_decodes, max_running=config.max_running)
        )
        self._runner = runner
        self._config = config
        self._last_rows = LastRows(block_size)
        self._connector = connector or NoConnector()
        self._tier_orders = tier_orders
        self._sampler = sampler
        self._adapters = adapters or {}
        self._pace = pace
        self._drafting = Drafting(
            speculation,
            step_times or pace,
            blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
        )
        self._is_async = is_async
        self._under_way: ScheduledStep | None = None  # launched, not completed
        # Sequences with recurrent state in a migration (worker.migrations). No step is launched ahead while one of them
        # runs.
        self.in_step: set[Sequence] = set()

    # Steps.

    def step(self) -> StepResult:
        """Run one step. With async scheduling, the next step is already running when this returns."""
        step, self._under_way = self._under_way or self.launch(), None
        if self._can_run_ahead(step):
            self._under_way = step
            ahead = self.launch(behind=step)
            step.take_early_results(ahead)
            self._under_way = ahead if ahead.has_rows else None
        return self.complete(step)

    def _can_run_ahead(self, step: ScheduledStep) -> bool:
        running = self.decoding.running
        if not self._is_async or any(one in running for one in self.in_step):
            return False
        return may_be_followed(step, running) and not self._drafting.awaits(running)

    def launch(self, behind: ScheduledStep | None = None) -> ScheduledStep:
        """Schedule a step, execute it and sample from its logits.

        behind: the step before, if it is not completed yet; it must satisfy `may_be_followed`.
        """
        admitted = self._admission.ahead()
        self._connector.begin_step(admitted)
        in_flight = expect(behind, self.decoding.running) if behind else []
        step = self._schedule(may_draft=behind is None)
        step.has_failed_fetch = any(prompt in self.prompts.waiting for prompt in admitted)
        step.orders = self._connector.orders(step)
        step.orders.tiers += self._tier_orders()
        if self.blocks.states:
            step.orders.state_copies += self.blocks.states.take_copies()
        if self.blocks.windows:
            step.orders.parts += self.blocks.windows.take_changes()
        if step.has_rows:
            if self._pace:
                self._pace.begin()
            step.device_tokens = device_tokens_of(step, behind) if behind else None
            logits = self._runner.execute(step, step.orders)
            rows, positions = step.sampling_rows()
            if rows:
                assert logits is not None
                step.sampled = self._sampler(logits, rows, positions)
            step.logits = logits if step.drafts and positions is not None else None
            if self._pace:
                has_drafts = bool(step.drafts) if self._drafting.is_on else None
                self._pace.end(step.batch, has_prompts=bool(step.prompts), has_drafts=has_drafts)
        else:
            if self._pace and not behind:
                self._pace.rest()
            if step.orders:
                self._runner.execute(None, step.orders)
        for sequence in in_flight:
            sequence.sampling_row.num_in_flight = 0
        return step

    def complete(self, step: ScheduledStep) -> StepResult:
        """Append the next token of each sequence whose KV is complete. Waits for the tokens.

        The step's KV counts as computed: it is in the pool, or will be before any later work on the device. Sequences
        removed since the launch are skipped.
        """
        chosen = iter(step.sampled.wait() if step.sampled else ())
        result = StepResult(
            did_work=step.has_rows or bool(step.orders or step.fetched or step.known) or step.has_failed_fetch,
            num_computed=sum(num_tokens for _, num_tokens in step.prompts),
            fetched=step.fetched,
            sampled=step.known,
            num_known=len(step.known),
            num_rows=len(step.decoding),
            num_drafted=sum(len(draft.tokens) for draft in step.drafts.values()),
        )
        for sequence, token in step.known:
            if token.finish_reason:
                self._finished(sequence)
        self._drafting.computed(step.decoding, step.drafts)
        self._complete_rows(step, chosen, result)
        if step.prompts:
            self._complete_prompts(step, chosen, result)
        return result

    def _complete_rows(self, step: ScheduledStep, chosen: Iterator[Chosen | None], result: StepResult) -> None:
        """Append the sampled tokens. Fast path for rows without a draft: one list append per token."""
        running, sampled = self.decoding.running, result.sampled
        for sequence, num_tokens in step.decoding:
            if step.drafts and (draft := step.drafts.get(sequence)):
                self._verify(step, sequence, num_tokens, draft, chosen, result)
                continue
            choice, reason, tokens = next(chosen), None, sequence.tokens
            if sequence not in running:
                continue
            sequence.num_computed += num_tokens
            if sequence.num_computed >= sequence.fills_block_at:
                sequence.fill_block(self.blocks)
            if num_tokens > 1 and (windows := self.blocks.windows):
                sequence.parts.advance(windows.first_seen(sequence.num_computed), windows)
            if choice is None:
                self._fail(sequence, result)
                continue
            token_id, logprob = choice
            tokens.append(token_id)
            if len(tokens) >= sequence.ends_at or token_id in sequence.stops:
                reason = sequence.finish_reason()
            sampled.append((sequence, SampledToken(token_id, logprob, reason)))
            if reason:
                self._finished(sequence)

    def _verify(
        self,
        step: ScheduledStep,
        sequence: Sequence,
        num_tokens: int,
        draft: Draft,
        chosen: Iterator[Chosen | None],
        result: StepResult,
    ) -> None:
        """Verify a draft. A step with drafts is completed before the next launch, so no sequence has left since."""
        choose = choices_of(draft, sequence, chosen, self._sampler, step.logits)
        tokens, is_found = verify(draft, sequence, num_tokens, choose, self.blocks)
        result.sampled += [(sequence, token) for token in tokens]
        ids = [token.token_id for token in tokens]
        if tally := sequence.drafts:
            tally.drafts += 1
            tally.drafted += len(draft.tokens)
            tally.accepted += draft.num_right(ids)
        self._drafting.verified(draft, ids)
        if not is_found:
            self._fail(sequence, result)
        elif tokens[-1].finish_reason:
            self._finished(sequence)

    def _complete_prompts(self, step: ScheduledStep, chosen: Iterator[Chosen | None], result: StepResult) -> None:
        """Record computed chunks and start or finish the prompts that are complete. chosen: their first tokens."""
        computing = set(self.prompts.computing)
        for prompt, num_tokens in step.prompts:
            if prompt in computing:
                prompt.sequence.computed(num_tokens, self.blocks)
        step.store_scores()
        for prompt in step.whole:
            firsts = [next(chosen) for _ in prompt.choices]
            if prompt not in computing:
                continue
            if all(firsts) and None not in prompt.scores:
                self._finish(prompt, [first for first in firsts if first], result)
            else:
                self._fail(prompt.sequence, result)
                self.prompts.remove(prompt)

    def _schedule(self, *, may_draft: bool) -> ScheduledStep:
        """Choose the rows of the next step.

        may_draft: False for a step launched behind another. Its rows continue from tokens that are not known yet, and
        its sequences may leave before it completes, so a draft could not be verified.
        """
        fetched = self.prompts.take_fetched()
        for prompt in fetched:
            prompt.sequence.release(self.blocks)
        planned = self.decoding.make_room()
        decoding = planned.rows.sequences
        preempted = self.decoding.preempted
        while preempted and self._admission.may_resume(preempted[0]):
            if not allocate(preempted[0], self.blocks):
                break
            self.prompts.restart(preempted.popleft())
        budget = self._config.max_batch_tokens - len(decoding)
        known = append_forced(planned.rows.masked, budget, self.blocks)
        prompts = self.prompts.chunks(budget - len(known), self._admission.admit_on_demand())
        finished = {sequence for sequence, token in known if token.finish_reason}
        decode_rows = (
            [(one, one.num_missing) for one in decoding if one not in finished] if known else planned.rows.decoding
        )
        whole = [prompt for prompt, num_tokens in prompts if num_tokens == prompt.sequence.num_missing]
        rows = (prompt.sequence.scored_row(row, num) for row, (prompt, num) in enumerate(prompts, len(decode_rows)))
        drafts = self._drafting.drafts(decode_rows, prompts, whole) if may_draft else {}
        state_writes = self._plan_state_writes(decode_rows, drafts, prompts) if self.blocks.states else []
        if self.blocks.windows:
            self._attach_parts(self.blocks.windows, decode_rows, drafts, prompts)
        return ScheduledStep(
            decoding=decode_rows,
            prompts=prompts,
            next_tokens=None if prompts or known or drafts else planned,
            drafts=drafts,
            whole=whole,
            last_rows=self._last_rows,
            scored=[row for row in rows if row],
            state_writes=state_writes,
            fetched=fetched,
            known=known,
        )

    def _plan_state_writes(
        self,
        decoding: list[tuple[Sequence, int]],
        drafts: Mapping[Sequence, Draft],
        prompts: list[tuple[Prompt, int]],
    ) -> list[tuple[int, int, int]]:
        """Copy states that are due for a checkpoint, and plan the step's state writes; see RowChanges.

        A step writes the states between the tokens of a draft, and those at checkpoints inside a prompt's chunk.
        """
        states, writes = self.blocks.states, list[tuple[int, int, int]]()
        assert states, "the model has no states"
        for row, (sequence, num_tokens) in enumerate((*decoding, *((one.sequence, count) for one, count in prompts))):
            sequence.checkpoint_state(states)
            if draft := drafts.get(sequence):
                slots = enumerate(draft.state_slots, num_tokens - 1)
                writes += [(row, offset, states.index(slot)) for offset, slot in slots]
            if row >= len(decoding):
                writes += [(row, *write) for write in sequence.take_checkpoint_slots(num_tokens, states)]
        return writes

    def _attach_parts(
        self,
        windows: WindowManager,
        decoding: list[tuple[Sequence, int]],
        drafts: Mapping[Sequence, Draft],
        prompts: list[tuple[Prompt, int]],
    ) -> None:
        """Attach parts for the positions that the step computes, after dropping those that no row sees any more."""
        growing = list[tuple[Sequence, int]]()
        for sequence, num_tokens in (*decoding, *((prompt.sequence, count) for prompt, count in prompts)):
            draft, start = drafts.get(sequence), sequence.num_computed + sequence.num_in_flight
            end = sequence.num_blocks_for(start + num_tokens + (len(draft.tokens) if draft else 0))
            # Usually the block of the token is held already.
            if end > sequence.parts.end:
                sequence.parts.advance(windows.first_seen(start), windows)
                growing.append((sequence, end))
        for sequence, end in growing:
            sequence.parts.extend(sequence.blocks, end, windows)

    # Sequences.

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt.

        Raises CapacityError if the queue is full, ContextLengthExceeded if the prompt can never fit, and RequestError
        if the model does not have its adapter.
        """
        if adapter := prompt.sequence.request.adapter:
            if adapter not in self._adapters:
                raise RequestError(f"the model has no adapter {adapter!r}", param="adapter")
            prompt.sequence.adapter = self._adapters[adapter]
        if prompt.is_received:
            prompt.sequence.is_scored = False  # the replica that computes the prompt reports its scores
        num_tokens, limit = len(prompt.sequence.tokens), prompt.sequence.max_context
        if (self._config.decodes or prompt.is_local_decode) and num_tokens >= limit:
            raise ContextLengthExceeded(f"{num_tokens} tokens leave no room in {limit}", param="prompt")
        self.prompts.add(prompt)

    def cancel(self, prompt: Prompt) -> None:
        """Drop a prompt that is not complete yet.

        The caller must have removed from its table the blocks that a transfer may still write.
        """
        self.prompts.remove(prompt)
        prompt.sequence.release(self.blocks)

    def landed(self, prompt: Prompt, num_tokens: int, next_tokens: Seq[int]) -> Prefilled:
        """Accept the KV of a reserved prompt: `num_tokens` positions and the tokens that follow them.

        A prefill replica sends the first token of each choice; a decode replica the tokens sampled during the transfer.
        """
        sequence = prompt.sequence
        if prompt.is_running_elsewhere:
            sequence.tokens += next_tokens
            if windows := self.blocks.windows:
                # The sender freed parts while it kept decoding. Those before the window are dropped before their blocks
                # get a hash, so that they are not cached.
                sequence.parts.advance(windows.first_seen(num_tokens), windows)
            sequence.computed(num_tokens - sequence.num_computed, self.blocks)
            self.prompts.remove(prompt)
            self.decoding.start(sequence)
            return Prefilled(prompt, [], [sequence])
        sequence.computed(sequence.num_missing, self.blocks)
        return self._start(prompt, [(token, None) for token in next_tokens])

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence and free its blocks. Idempotent."""
        self._unschedule(sequence)
        self._drafting.forget(sequence)
        sequence.release(self.blocks)

    def pause(self, sequence: Sequence) -> None:
        """Take a sequence out of the schedule; it keeps its blocks.

        If a running step advances its state, the state is dropped, as the step's token will be. See `in_step`.
        """
        self._unschedule(sequence)
        if self.blocks.states and self._under_way and self._under_way.has_row_of(sequence):
            sequence.drop_state(self.blocks.states)

    def resume(self, sequence: Sequence) -> None:
        """Schedule a paused sequence again. If it lost its blocks or its state, its KV is recomputed first."""
        has_lost_state = self.blocks.states is not None and not sequence.state_slots
        if sequence.num_missing > 1 or has_lost_state:  # num_missing: paused while its KV was being recomputed
            sequence.release(self.blocks)
        self.decoding.start(sequence)

    def _unschedule(self, sequence: Sequence) -> None:
        self.decoding.remove(sequence)
        self.prompts.remove_restart(sequence)

    def _finish(self, prompt: Prompt, chosen: list[Chosen], result: StepResult) -> None:
        """Start decoding, or return the first tokens, now that the KV of a prompt is complete."""
        sequence = prompt.sequence
        sequence.is_scored = False
        if prompt.is_restart:
            self.prompts.remove(prompt)
            self.decoding.start(sequence)
            result.sampled.append((sequence, self._append(sequence, chosen[0])))
        elif self._config.decodes or prompt.is_local_decode:
            result.prefilled.append(self._start(prompt, chosen))
        else:
            result.prefilled.append(Prefilled(prompt, [sequence.peek(*first) for first in chosen]))
            self.cancel(prompt)

    def _finished(self, sequence: Sequence) -> None:
        """End a sequence that has its last token."""
        self._drafting.finished(sequence)
        self.end(sequence)

    def _fail(self, sequence: Sequence, result: StepResult) -> None:
        """End a sequence without a next token.

        Uncache its blocks, whose KV may be corrupt, unless its constraints are the cause.
        """
        self.end(sequence)
        if not sequence.is_contradicted:
            for prefix_hash in sequence.hashes():
                self.blocks.unfill(prefix_hash)
                if self.blocks.states:
                    self.blocks.states.forget(prefix_hash)
        result.failed.append(sequence)

    def _start(self, prompt: Prompt, firsts: list[Chosen]) -> Prefilled:
        """Fork a complete prompt into its choices, append each first token and decode those that are not finished."""
        self.prompts.remove(prompt)
        sequences = [prompt.sequence, *self._fork(prompt.sequence, prompt.choices[1:])]
        for sequence in sequences:
            self.decoding.start(sequence)
        tokens = [self._append(sequence, first) for sequence, first in zip(sequences, firsts, strict=True)]
        return Prefilled(prompt, tokens, sequences)

    def _append(self, sequence: Sequence, chosen: Chosen) -> SampledToken:
        token = sequence.append(*chosen)
        if token.finish_reason:
            self._finished(sequence)
        return token

    def _fork(self, root: Sequence, choices: Seq[int]) -> list[Sequence]:
        """Return the other choices of a request. A choice that gets no block starts without any and is recomputed."""
        forks = [(choice, root.fork(choice, self.blocks)) for choice in choices]
        copies = [fork[1] for _, fork in forks if fork and fork[1]]
        state_copies = self.blocks.states.take_copies() if self.blocks.states else []
        if copies or state_copies:
            parts = self.blocks.windows.take_changes() if self.blocks.windows else []
            orders = Orders(tiers=self._tier_orders(), parts=parts, copies=copies, state_copies=state_copies)
            self._runner.execute(None, orders)
        return [fork[0] if fork else root.without_blocks(choice) for choice, fork in forks]

    # Metrics.

    @property
    def num_running(self) -> int:
        """Sequences that run, or will run as soon as their KV is in the pool."""
        return self._admission.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.prompts.waiting) + len(self.decoding.preempted)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed here, except the next token of each decoding sequence."""
        again = sum(sequence.num_missing for sequence in self.decoding.preempted)
        return self.prompts.num_queued_tokens + again

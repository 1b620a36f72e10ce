"""The decode step loop, on rank 0: admit, receive, step, sample, and hand every token on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from cluster.errors import ClusterError, HandoffExpired
from cluster.handoff import Handoff
from cluster.messages import tokens_to_proto
from cluster.request import SampledToken, TokenLogprob
from cluster.rpc import transfer_pb2
from cluster.rpc import worker_pb2 as pb
from decode_worker.rank import DecodeRank
from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.decode_scheduler import Scheduler
from engine.group import Choice, Group
from engine.rate import Rate
from engine.sampler import SamplingRow, sample
from engine.sequence import Sequence
from kvtransfer.incoming import Landing
from kvtransfer.receiver import Receiver

logger = logging.getLogger(__name__)


class GroupListener(Protocol):
    """Who holds the lease of a request. Called on the step thread."""

    def reserved(self, handoff: Handoff | None, opening: transfer_pb2.OpenRequest | None, num_cached: int) -> None:
        """Blocks are set aside. With a handoff, the other ranks must open it too before anyone is told of it."""
        ...

    def started(self) -> None: ...

    def ended(self, error: ClusterError | None) -> None:
        """Last, and once."""
        ...


class Decoder:
    """All requests of one decode replica. Everything but the constructor runs on the step thread.

    `close_handoff` closes a handoff on the other ranks and then runs the command given, on this thread.
    """

    def __init__(
        self,
        rank: DecodeRank,
        receiver: Receiver,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        replica: str,
        addresses: list[str],
        handoff_s: float,
        close_handoff: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self.totals = pb.Totals()
        self._rank = rank
        self._receiver = receiver
        self._blocks = blocks
        self._scheduler = scheduler
        self._replica = replica
        self._addresses = tuple(addresses)
        self._handoff_s = handoff_s
        self._close_handoff = close_handoff
        self._listeners: dict[Group, GroupListener] = {}
        self._handoffs: dict[str, Group] = {}
        self._tokens: dict[str, list[pb.StreamTokens]] = {}
        self._step_rate = Rate()
        self._prefill_rate = Rate()

    # What the world asks for.

    def submit(self, group: Group, listener: GroupListener) -> None:
        """Queue a request. An error goes to the listener."""
        try:
            self._scheduler.add(group)
        except ClusterError as error:
            listener.ended(error)
            return
        self._listeners[group] = listener
        if group.prefill_here:
            self.totals.prompt_tokens += len(group.root.tokens)

    def cancel(self, group: Group) -> None:
        """The lease has ended: free everything. It may have ended by itself already."""
        if self._listeners.pop(group, None):
            self.totals.cancelled += 1
            self._free(group)

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """These choices need no more tokens."""
        for group in [group for group in self._listeners if group.router == router]:
            group.unwanted.update(streams)  # it may not have started yet
            for choice in [choice for choice in group.choices if choice.stream in group.unwanted]:
                self._end_choice(choice)

    def landed(self, rank: int, landing: Landing) -> None:
        """The KV of a handoff is whole on one rank."""
        group = self._handoffs.get(landing.handoff)
        whole = group and group.land(
            rank, epoch=landing.epoch, first_tokens=landing.first_tokens, num_ranks=len(self._addresses)
        )
        if group and whole:
            del self._handoffs[landing.handoff]
            self._receiver.close(landing.handoff)
            group.root.computed(group.root.num_missing, self._blocks)
            self._start(group, [(token, None) for token in group.first_tokens])

    # The step.

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        self._expire_handoffs()
        for group in self._scheduler.admit():
            self._admitted(group)
        chosen = self._scheduler.schedule()
        if not chosen:
            return False
        rows = [choice.sequence.row(count) for choice, count in chosen]
        batch = Batch.of(rows, block_size=self._rank.runner.layout.block_size)
        started = time.monotonic()
        logits = self._rank.lead(batch, {})
        assert logits is not None
        self._measure(batch, len(chosen), time.monotonic() - started)
        for choice, count in chosen:
            choice.sequence.computed(count, self._blocks)
        self._sample([choice for choice, _ in chosen if not choice.sequence.num_missing], logits)
        return True

    def heartbeat(self) -> None:
        """Keep the other ranks from giving us up while there is nothing to do, and watch the handoffs' time."""
        self._expire_handoffs()
        if self._rank.runner.parallel.size > 1:
            self._rank.lead(None, {})

    def stop(self) -> None:
        if self._rank.runner.parallel.size > 1:
            self._rank.lead(None, {"stop": True})

    # What the world is told.

    @property
    def num_requests(self) -> int:
        return len(self._listeners)

    def take_tokens(self) -> dict[str, list[pb.StreamTokens]]:
        tokens, self._tokens = self._tokens, {}
        return tokens

    def take_changes(self) -> dict[bytes, bool]:
        return self._blocks.take_changes()

    def sealed_hashes(self) -> list[bytes]:
        return self._blocks.sealed_hashes()

    def status(self) -> pb.Status:
        self.totals.preemptions = self._scheduler.num_preemptions
        return pb.Status(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            context_tokens=sum(len(choice.sequence.tokens) for choice in self._scheduler.decoding),
            blocks_total=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            prefill_tokens_per_s=self._prefill_rate.per_s,
            decode_step_s=1 / self._step_rate.per_s if self._step_rate.per_s else 0.0,
            totals=self.totals,
        )

    # Below: one request from admission to its end.

    def _admitted(self, group: Group) -> None:
        root, listener = group.root, self._listeners[group]
        self.totals.prefix_hit_tokens += group.num_cached
        if group.prefill_here:
            listener.reserved(None, None, group.num_cached)
            return
        group.handoff = f"{self._replica}/{group.id}/{time.monotonic_ns():x}"
        group.expires_at = time.monotonic() + self._handoff_s
        self._handoffs[group.handoff] = group
        opening = transfer_pb2.OpenRequest(
            handoff=group.handoff,
            first_token=group.num_cached,
            num_tokens=len(root.tokens),
            block_ids=root.blocks[group.num_cached // root.block_size :],
        )
        self._receiver.open(opening)
        handoff = Handoff(
            id=group.handoff,
            epoch=1,
            replica=self._replica,
            ranks=self._addresses,
            layout=self._rank.runner.layout.fingerprint,
            num_tokens=len(root.tokens),
            first_token=group.num_cached,
            ttl_s=self._handoff_s,
        )
        listener.reserved(handoff, opening, group.num_cached)

    def _start(self, group: Group, first_tokens: list[tuple[int, TokenLogprob | None]]) -> None:
        """The prompt's KV is whole and each choice has its first token: fork, and decode those that go on."""
        request = group.root.request
        self._scheduler.ready(group)
        sequences = [group.root, *self._fork(group.root, request.choices[1:])]
        group.choices = [Choice(group, sequence, request.stream + i) for i, sequence in enumerate(sequences)]
        self._listeners[group].started()
        for choice, (token_id, logprob) in zip(list(group.choices), first_tokens, strict=True):
            token = choice.sequence.append(token_id, logprob)
            if group.prefill_here:  # else the prefill replica has told the router
                self._emit(choice, token)
            if token.finish_reason or choice.stream in group.unwanted:
                self._end_choice(choice)
            else:
                self._scheduler.start(choice)

    def _fork(self, root: Sequence, indices: Seq[int]) -> list[Sequence]:
        """The other choices of a request. One for which no block is left starts without any, and is computed again."""
        forks = [(index, root.fork(index, self._blocks)) for index in indices]
        copies = [fork[1] for _, fork in forks if fork and fork[1]]
        if copies:
            self._rank.lead(None, {"copy": copies})
        return [fork[0] if fork else root.without_blocks(index) for index, fork in forks]

    def _sample(self, ready: list[Choice], logits_RV: Tensor) -> None:
        """Choose the next token of every row that is ready; a prompt that is new has one row for all its choices."""
        rows, source = [], []
        for i, choice in enumerate(ready):
            wanted = [choice.sequence.choice] if choice.group.choices else choice.sequence.request.choices
            rows += [SamplingRow.of(choice.sequence, index) for index in wanted]
            source += [i] * len(wanted)
        sampled = sample(logits_RV[source] if len(rows) > len(ready) else logits_RV, rows)
        self.totals.generated_tokens += len(sampled)
        for i, choice in enumerate(ready):
            tokens = [token for token, row in zip(sampled, source, strict=True) if row == i]
            if not choice.group.choices:
                self._start(choice.group, tokens)
            else:
                self._advance(choice, *tokens[0])

    def _advance(self, choice: Choice, token_id: int, logprob: TokenLogprob | None) -> None:
        token = choice.sequence.append(token_id, logprob)
        self._emit(choice, token)
        if token.finish_reason:
            self._end_choice(choice)
        else:
            self._scheduler.start(choice)

    def _emit(self, choice: Choice, token: SampledToken) -> None:
        tokens = pb.StreamTokens(stream=choice.stream, tokens=tokens_to_proto([token]))
        self._tokens.setdefault(choice.group.router, []).append(tokens)

    def _end_choice(self, choice: Choice) -> None:
        group = choice.group
        self._scheduler.remove_choice(choice)
        choice.sequence.release(self._blocks)
        group.choices.remove(choice)
        if not group.choices:
            self._listeners.pop(group).ended(None)

    def _free(self, group: Group) -> None:
        """Give back everything that a request holds, in whatever state it is."""
        self._scheduler.remove(group)
        if group.handoff in self._handoffs:
            self._abandon_handoff(group, group.handoff)
        for sequence in [choice.sequence for choice in group.choices] or [group.root]:
            sequence.release(self._blocks)
        group.choices = []

    def _abandon_handoff(self, group: Group, handoff: str) -> None:
        """A peer may still be writing: our own rank can be closed at once, the others must say that they are.

        Until they have, the blocks are in quarantine.
        """
        del self._handoffs[handoff]
        self._receiver.close(handoff)
        if len(self._addresses) == 1:
            return
        root = group.root
        num_cached = group.num_cached // root.block_size
        exposed, root.blocks = root.blocks[num_cached:], root.blocks[:num_cached]
        self._blocks.quarantine(exposed)
        self._close_handoff(handoff, lambda: self._blocks.release(exposed))

    def _expire_handoffs(self) -> None:
        now = time.monotonic()
        for handoff, group in [(h, g) for h, g in self._handoffs.items() if g.expires_at < now]:
            listener = self._listeners.pop(group)
            self._free(group)
            self.totals.transfer_failures += 1
            listener.ended(HandoffExpired(f"handoff {handoff}: no prefill came within {self._handoff_s} s"))

    def _measure(self, batch: Batch, num_rows: int, seconds: float) -> None:
        """Learn our rates: of steps that only decode, and of tokens in steps that also compute prompts."""
        if batch.num_tokens == num_rows:
            self._step_rate.add(1, seconds)
        else:
            self._prefill_rate.add(batch.num_tokens, seconds)

"""The requests that live on a decode replica: who listens to each, its choices, and the tokens that they get."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from cluster.rpc import worker_pb2 as pb
from cluster.wire.messages import tokens_to_proto
from cluster.words.errors import ClusterError
from cluster.words.handoff import Handoff
from cluster.words.request import SampledToken, TokenLogprob
from cluster.worker.fetches import Fetches
from cluster.worker.gang_runner import GangRunner
from decode_worker.moves import Moves
from engine.decode_scheduler import Scheduler
from engine.group import Choice, Group, Source
from engine.kv.block_manager import BlockManager
from engine.orders import Orders
from engine.sampler import SamplingRow, sample
from engine.sequence import Sequence
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.arrivals import Arrival
from kvtransfer.protocol.frames import Opening


class GroupListener(Protocol):
    """Who holds the lease of a request. Called on the step thread."""

    def reserved(self, handoff: Handoff | None, opening: Opening | None, num_cached: int) -> None:
        """Blocks are set aside. With a handoff, the other ranks must open it too before anyone is told of it."""
        ...

    def started(self, num_tokens: int, *, epoch: int, num_pulled: int) -> None:
        """Decoding has begun; the first token that is sent from here has position num_tokens."""
        ...

    def ended(self, error: ClusterError | None) -> None:
        """Last, and once."""
        ...


class Answers:
    """Owned by the step thread. Choices leave by their last token, because nobody wants them, or by a move."""

    def __init__(
        self,
        rank: GangRunner,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        fetches: Fetches[Group],
        tiers: Tiers[Group],
        totals: pb.Totals,
    ) -> None:
        self.moves = Moves(rank, blocks, pause=scheduler.remove_choice, resume=scheduler.start, leave=self.end)
        self._rank = rank
        self._blocks = blocks
        self._scheduler = scheduler
        self._fetches = fetches
        self._tiers = tiers
        self._totals = totals
        self._listeners: dict[Group, GroupListener] = {}
        self._tokens: dict[str, list[pb.StreamTokens]] = {}

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, group: Group, listener: GroupListener) -> None:
        """It lives here from now on, though it has no choices yet."""
        self._listeners[group] = listener

    def listener(self, group: Group) -> GroupListener:
        return self._listeners[group]

    def remove(self, group: Group) -> GroupListener | None:
        """Give back everything that a request holds here, in whatever state it is; its listener, if it lived here."""
        listener = self._listeners.pop(group, None)
        if listener:
            for choice in group.choices:
                self.moves.cancel(choice, "it has ended")
            self._scheduler.remove(group)
            self._fetches.cancel(group)
            for sequence in [choice.sequence for choice in group.choices] or [group.root]:
                sequence.release(self._blocks)
            group.choices = []
        return listener

    def find(self, router: str, stream: int) -> Choice | None:
        groups = (group for group in self._listeners if group.router == router)
        return next((choice for group in groups for choice in group.choices if choice.stream == stream), None)

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """These choices need no more tokens."""
        for group in [group for group in self._listeners if group.router == router]:
            group.unwanted.update(streams)  # it may not have started yet
            for choice in [choice for choice in group.choices if choice.stream in group.unwanted]:
                self.end(choice)

    def start(self, group: Group, first_tokens: list[tuple[int, TokenLogprob | None]], *, epoch: int = 0) -> None:
        """The prompt's KV is whole and each choice has its first token: fork, and decode those that go on."""
        request = group.root.request
        self._scheduler.ready(group)
        sequences = [group.root, *self._fork(group.root, request.choices[1:])]
        group.choices = [Choice(group, sequence, request.stream + i) for i, sequence in enumerate(sequences)]
        is_told = group.source is Source.PREFILL  # the prefill replica has told the router of the first tokens
        self._listeners[group].started(len(group.root.tokens) + is_told, epoch=epoch, num_pulled=group.num_fetched)
        self._fetches.forget(group)
        self._totals.prefix_hit_tokens += group.num_cached
        for choice, (token_id, logprob) in zip(list(group.choices), first_tokens, strict=True):
            token = choice.sequence.append(token_id, logprob)
            if not is_told:
                self._emit(choice, token)
            self._decode_on(choice, is_over=bool(token.finish_reason) or choice.stream in group.unwanted)

    def resume(self, group: Group, arrival: Arrival[Group]) -> None:
        """A sequence has come from another decode replica, with the tokens that it got on the way."""
        root = group.root
        self._totals.prefix_hit_tokens += group.num_cached
        root.tokens += arrival.next_tokens
        root.computed(arrival.num_tokens - root.num_computed, self._blocks)
        self._scheduler.ready(group)
        group.choices = [Choice(group, root, root.request.stream)]
        self._listeners[group].started(len(root.tokens), epoch=arrival.epoch, num_pulled=0)
        self._decode_on(group.choices[0], is_over=root.request.stream in group.unwanted)

    def sample(self, ready: list[Choice], logits_RV: Tensor) -> None:
        """Choose the next token of every row that is ready; a prompt that is new has one row for all its choices."""
        rows, source = [], []
        for i, choice in enumerate(ready):
            wanted = [choice.sequence.choice] if choice.group.choices else choice.sequence.request.choices
            rows += [SamplingRow.of(choice.sequence, index) for index in wanted]
            source += [i] * len(wanted)
        sampled = sample(logits_RV[source] if len(rows) > len(ready) else logits_RV, rows)
        self._totals.generated_tokens += len(sampled)
        for i, choice in enumerate(ready):
            tokens = [token for token, row in zip(sampled, source, strict=True) if row == i]
            if not choice.group.choices:
                self.start(choice.group, tokens)
            else:
                token = choice.sequence.append(*tokens[0])
                self._emit(choice, token)
                self._decode_on(choice, is_over=bool(token.finish_reason))

    def end(self, choice: Choice) -> None:
        """It gets no more tokens here."""
        group = choice.group
        self.moves.cancel(choice, "it has ended")
        self._scheduler.remove_choice(choice)
        choice.sequence.release(self._blocks)
        group.choices.remove(choice)
        if not group.choices:
            self._listeners.pop(group).ended(None)

    def take_tokens(self) -> dict[str, list[pb.StreamTokens]]:
        """What was sampled since the last time, by router."""
        tokens, self._tokens = self._tokens, {}
        return tokens

    def _fork(self, root: Sequence, indices: Seq[int]) -> list[Sequence]:
        """The other choices of a request. One for which no block is left starts without any, and is computed again."""
        forks = [(index, root.fork(index, self._blocks)) for index in indices]
        copies = [fork[1] for _, fork in forks if fork and fork[1]]
        if copies:
            self._rank.execute(None, Orders(tiers=self._tiers.take_orders(), copies=copies))
        return [fork[0] if fork else root.without_blocks(index) for index, fork in forks]

    def _decode_on(self, choice: Choice, *, is_over: bool) -> None:
        if is_over:
            self.end(choice)
        else:
            self._scheduler.start(choice)

    def _emit(self, choice: Choice, token: SampledToken) -> None:
        tokens = pb.StreamTokens(stream=choice.stream, tokens=tokens_to_proto([token]))
        self._tokens.setdefault(choice.group.router, []).append(tokens)

"""The requests that are answered by a replica: who listens to each, its choices, and the tokens that they get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from core.types.errors import ClusterError
from core.types.handoff import Handoff
from core.types.request import SampledToken
from core.wire.frames import StreamToken
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import Prefilled, StepResult
from kvtransfer.protocol.frames import Opening
from worker.migrations import MoveListener, Moves
from worker.replica_engine import ReplicaEngine


class RequestListener(Protocol):
    """Who holds the lease of a request. Called on the step thread."""

    def reserved(self, handoff: Handoff | None, opening: Opening | None, num_cached: int) -> None:
        """Blocks are set aside. With a handoff, the other ranks must open it too before anyone is told of it. Once; but
        again without a handoff, where a prefix did not come, and what was cached is looked up anew."""
        ...

    def started(self, num_tokens: int, *, epoch: int, num_from_peers: int) -> None:
        """Decoding has begun; the first token that is sent from here has position num_tokens."""
        ...

    def ended(self, error: ClusterError | None) -> None:
        """Last, and once."""
        ...


@dataclass(eq=False)
class LiveRequest:
    """A request that lives here."""

    prompt: Prompt
    router: str
    listener: RequestListener
    choices: dict[int, Sequence] = field(default_factory=dict)  # by stream; empty until the prompt's KV is whole
    unwanted: set[int] = field(default_factory=set)  # streams that were stopped, perhaps before they began


class Answers:
    """Owned by the step thread. Choices leave by their last token, because nobody wants them, or by a move."""

    def __init__(self, replica: ReplicaEngine, moves: Moves) -> None:
        self._moves = moves
        self._replica = replica
        self._engine = replica.engine
        self._requests: dict[Prompt, LiveRequest] = {}
        self._stream_of: dict[Sequence, tuple[LiveRequest, int]] = {}
        self._tokens: dict[str, list[StreamToken]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prompt: Prompt, router: str, listener: RequestListener) -> None:
        """It lives here from now on, though it has no choices yet."""
        self._requests[prompt] = LiveRequest(prompt, router, listener)

    def listener(self, prompt: Prompt) -> RequestListener:
        return self._requests[prompt].listener

    def remove(self, prompt: Prompt) -> RequestListener | None:
        """Give back everything that a request holds here, in whatever state it is; its listener, if it lived here."""
        request = self._requests.pop(prompt, None)
        if request is None:
            return None
        for sequence in list(request.choices.values()):
            self._let_go(sequence)
        self._replica.cancel(prompt)
        return request.listener

    def find(self, router: str, stream: int) -> Sequence | None:
        return next((r.choices[stream] for r in self._of(router) if stream in r.choices), None)

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Ship a choice to the replica that has made this handoff, if it is worth it."""
        sequence = self.find(router, stream)
        if sequence and sequence in self._engine.decoding.running:
            self._moves.begin(sequence, handoff, listener, step_s=self._replica.token_s)
        else:
            listener.stays("it does not decode here")

    def keep(self, router: str, stream: int) -> None:
        """Nobody waits any more for this choice to be moved."""
        if sequence := self.find(router, stream):
            self._moves.cancel(sequence, "the move is not wanted any more")

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """These choices need no more tokens."""
        streams = set(streams)
        for request in self._of(router):
            request.unwanted |= streams  # it may not have started yet
            for sequence in [sequence for stream, sequence in request.choices.items() if stream in streams]:
                self.end(sequence)

    def start(self, prefilled: Prefilled, *, epoch: int = 0) -> None:
        """The prompt's KV is whole. First tokens that came along with it are known to the router already."""
        prompt, request = prefilled.prompt, self._requests[prefilled.prompt]
        first_stream = prompt.sequence.request.stream
        request.choices = dict(enumerate(prefilled.sequences, first_stream))
        self._stream_of |= {sequence: (request, stream) for stream, sequence in request.choices.items()}
        is_new = not prompt.is_received
        num_tokens = len(prompt.sequence.tokens) - is_new
        request.listener.started(num_tokens, epoch=epoch, num_from_peers=prompt.num_from_peers)
        if is_new:
            for sequence, token in zip(prefilled.sequences, prefilled.tokens, strict=True):
                self._emit(sequence, token)
        for i, sequence in enumerate(prefilled.sequences):
            is_over = bool(prefilled.tokens and prefilled.tokens[i].finish_reason)
            if is_over or first_stream + i in request.unwanted:
                self.end(sequence)

    def take(self, result: StepResult) -> None:
        """Hand on what came of a step."""
        for sequence, token in result.sampled:
            self._emit(sequence, token)
            if token.finish_reason:
                self.end(sequence)
        for prefilled in result.prefilled:
            self.start(prefilled)
        for sequence in result.failed:
            self._fail(sequence)

    def end(self, sequence: Sequence) -> None:
        """It gets no more tokens here."""
        request = self._let_go(sequence)
        if not request.choices:
            self._requests.pop(request.prompt).listener.ended(None)

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        """What was sampled since the last time, by router."""
        tokens, self._tokens = self._tokens, {}
        return tokens

    def _of(self, router: str) -> list[LiveRequest]:
        return [request for request in self._requests.values() if request.router == router]

    def _fail(self, sequence: Sequence) -> None:
        """There is no next token for it, whether it decodes or was about to: the request ends, with all its choices."""
        for request in list(self._requests.values()):
            if request.prompt.sequence is sequence or sequence in request.choices.values():
                self.remove(request.prompt)
                request.listener.ended(sequence.failure)

    def _let_go(self, sequence: Sequence) -> LiveRequest:
        self._moves.cancel(sequence, "it has ended")
        self._engine.end(sequence)
        request, stream = self._stream_of.pop(sequence)
        del request.choices[stream]
        return request

    def _emit(self, sequence: Sequence, token: SampledToken) -> None:
        request, stream = self._stream_of[sequence]
        is_last = token.finish_reason is not None or sequence in self._moves  # of which nobody here knows when
        token.drafts = sequence.take_drafts(is_last=is_last)
        self._tokens.setdefault(request.router, []).append((stream, token))

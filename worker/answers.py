"""Requests that a replica decodes: their listeners, choices and sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from core.types.errors import ClusterError
from core.types.handoff import Handoff
from core.types.request import SampledToken
from core.wire.frames import StreamToken
from engine.engine import Engine
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import Prefilled, StepResult
from kvtransfer.protocol.frames import Opening
from worker.migrations import Moves


class RequestListener(Protocol):
    """Observer of one request. Called on the step thread."""

    def reserved(self, handoff: Handoff | None, opening: Opening | None, num_cached: int) -> None:
        """Report that blocks are reserved.

        The other ranks must open the handoff, if any, before it is sent to a peer. With a handoff, called once. Without
        one, called again after a failed prefix fetch, with the prefix cached by then.
        """
        ...

    def started(self, num_tokens: int, *, epoch: int, num_from_peers: int) -> None:
        """Report that decoding has begun. The first token sent from this replica has position num_tokens."""
        ...

    def ended(self, error: ClusterError | None) -> None:
        """Report the end of the request. Called last and once."""
        ...


@dataclass(eq=False)
class LiveRequest:
    """Request on this replica."""

    prompt: Prompt
    router: str
    listener: RequestListener
    # By stream key (SequenceRequest.stream); empty until the prompt's KV is complete.
    choices: dict[int, Sequence] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)  # streams that the router stopped, started or not


class Answers:
    """Registry of requests, owned by the step thread.

    A choice leaves with its last token, when it is stopped, or by a migration.
    """

    def __init__(self, engine: Engine[Tensor], moves: Moves, *, cancel: Callable[[Prompt], None]) -> None:
        """cancel: frees a prompt's blocks in the engine, and its fetches."""
        self._moves = moves
        self._engine = engine
        self._cancel = cancel
        self._requests: dict[Prompt, LiveRequest] = {}
        self._stream_of: dict[Sequence, tuple[LiveRequest, int]] = {}
        self._tokens: dict[str, list[StreamToken]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prompt: Prompt, router: str, listener: RequestListener) -> None:
        """Register a request. Its choices are added by `start`."""
        self._requests[prompt] = LiveRequest(prompt, router, listener)

    def listener(self, prompt: Prompt) -> RequestListener:
        return self._requests[prompt].listener

    def remove(self, prompt: Prompt) -> RequestListener | None:
        """Free everything that a request holds, in any state. Returns its listener, or None if it is unknown."""
        request = self._requests.pop(prompt, None)
        if request is None:
            return None
        for sequence in list(request.choices.values()):
            self._release(sequence)
        self._cancel(prompt)
        return request.listener

    def find(self, router: str, stream: int) -> Sequence | None:
        return next((r.choices[stream] for r in self._of(router) if stream in r.choices), None)

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """Stop the router's choices with these stream keys."""
        streams = set(streams)
        for request in self._of(router):
            request.unwanted |= streams  # the request may not have started yet
            for sequence in [sequence for stream, sequence in request.choices.items() if stream in streams]:
                self.end(sequence)

    def start(self, prefilled: Prefilled, *, epoch: int = 0) -> None:
        """Start the choices of a prompt whose KV is complete.

        First tokens that arrived with the KV are not sent, because the router has them.
        """
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
        """Distribute the results of a step."""
        for sequence, token in result.sampled:
            self._emit(sequence, token)
            if token.finish_reason:
                self.end(sequence)
        for prefilled in result.prefilled:
            self.start(prefilled)
        for sequence in result.failed:
            self._fail(sequence)

    def end(self, sequence: Sequence) -> None:
        """End a choice, and its request with the last choice."""
        request = self._release(sequence)
        if not request.choices:
            self._requests.pop(request.prompt).listener.ended(None)

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        """Return and clear the tokens sampled since the last call, by router."""
        tokens, self._tokens = self._tokens, {}
        return tokens

    def _of(self, router: str) -> list[LiveRequest]:
        return [request for request in self._requests.values() if request.router == router]

    def _fail(self, sequence: Sequence) -> None:
        """End the request of a failed sequence, with all its choices."""
        for request in list(self._requests.values()):
            if request.prompt.sequence is sequence or sequence in request.choices.values():
                self.remove(request.prompt)
                request.listener.ended(sequence.failure)

    def _release(self, sequence: Sequence) -> LiveRequest:
        self._moves.cancel(sequence, "the choice has ended")
        self._engine.end(sequence)
        request, stream = self._stream_of.pop(sequence)
        del request.choices[stream]
        return request

    def _emit(self, sequence: Sequence, token: SampledToken) -> None:
        request, stream = self._stream_of[sequence]
        if sequence.drafts:
            # A migrating choice may leave after any token.
            is_last = token.finish_reason is not None or sequence in self._moves
            token.drafts = sequence.take_drafts(is_last=is_last)
        self._tokens.setdefault(request.router, []).append((stream, token))

"""What one replica says of a prompt's own tokens, on its way to the request."""

from __future__ import annotations

from core.rpc import worker_pb2 as pb
from core.types.errors import TransferError
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import SequenceRequest
from core.wire.prompt_logprob_messages import prompt_logprobs_from_proto


class PromptParts:
    """Of one call. What a call has brought that breaks off is of no use: the next one tells all of it."""

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        self._request = request
        self._vocab_size = vocab_size
        self._num_top = request.num_prompt_logprobs
        self._num_missing = 0 if self._num_top is None else request.num_prompt_tokens - 1
        self._parts: list[PromptLogprobs] = []

    def add(self, message: pb.PromptLogprobs) -> None:
        """Raises TransferError for what nobody has asked for, or no model says."""
        if self._num_top is None:
            return
        part = prompt_logprobs_from_proto(message, num_top=self._num_top, vocab_size=self._vocab_size)
        self._num_missing -= len(part)
        if self._num_missing < 0:
            raise TransferError(f"request {self._request.id}: more is said of its prompt than that has tokens")
        self._parts.append(part)

    def whole(self) -> PromptLogprobs | None:
        """None where nothing was asked for. Raises TransferError where something is missing."""
        if self._num_top is None:
            return None
        if self._num_missing:
            raise TransferError(f"request {self._request.id}: nothing is said of {self._num_missing} of its tokens")
        return PromptLogprobs.joined(self._parts, num_top=min(self._num_top, self._vocab_size))

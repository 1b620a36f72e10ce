"""Conversion of prompt log-probabilities to protobuf messages and back. The only place that validates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from core.rpc import worker_pb2 as pb
from core.types.errors import TransferError
from core.types.prompt_logprobs import PromptLogprobs

Number = TypeVar("Number", np.float32, np.int32)

_FLOAT, _INT = np.dtype("<f4"), np.dtype("<i4")


def prompt_logprobs_to_proto(logprobs: PromptLogprobs) -> Iterator[pb.PromptLogprobs]:
    """Yield messages in order; none for no tokens."""
    for part in logprobs.parts():
        yield pb.PromptLogprobs(
            logprobs=part.logprobs_P.astype(_FLOAT).tobytes(),
            ranks=part.ranks_P.astype(_INT).tobytes(),
            top_ids=part.top_ids_PK.astype(_INT).tobytes(),
            top_logprobs=part.top_logprobs_PK.astype(_FLOAT).tobytes(),
        )


def prompt_logprobs_from_proto(message: pb.PromptLogprobs, *, num_top: int, vocab_size: int) -> PromptLogprobs:
    """Parse and validate a message. num_top: requested top tokens. Raises TransferError for impossible values."""
    num_tokens, num_top = len(message.logprobs) // _FLOAT.itemsize, min(num_top, vocab_size)
    logprobs = _column(message.logprobs, _FLOAT, num_tokens)
    ranks = _column(message.ranks, _INT, num_tokens)
    top_ids = _column(message.top_ids, _INT, num_tokens * num_top)
    top_logprobs = _column(message.top_logprobs, _FLOAT, num_tokens * num_top)
    # This form rejects NaN, too.
    if not ((logprobs <= 0).all() and (top_logprobs <= 0).all()):
        raise TransferError("invalid log-probabilities of a prompt: above 0, or NaN")
    if not (_is_within(ranks, 1, vocab_size) and _is_within(top_ids, 0, vocab_size - 1)):
        raise TransferError(f"invalid tokens or ranks of a prompt: not within the vocabulary of {vocab_size}")
    shape = num_tokens, num_top
    return PromptLogprobs(
        logprobs_P=logprobs,
        ranks_P=ranks,
        top_ids_PK=top_ids.reshape(shape),
        top_logprobs_PK=top_logprobs.reshape(shape),
    )


def _column(packed: bytes, kind: np.dtype[Number], size: int) -> NDArray[Number]:
    if len(packed) != size * kind.itemsize:
        raise TransferError(f"invalid log-probabilities of a prompt: {len(packed)} bytes are not {size} numbers")
    return np.frombuffer(packed, kind)


def _is_within(numbers: NDArray[np.int32], lowest: int, highest: int) -> bool:
    return not numbers.size or bool(numbers.min() >= lowest and numbers.max() <= highest)

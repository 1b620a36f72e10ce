"""Validation of requests before they reach the engine.

The frontend validates client input, but a router may be compromised, and with `security.tls: off` any process that
reaches the port can send requests. One id outside the vocabulary would fail a step for all its requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from core.rpc import worker_pb2 as pb
from core.types.errors import ContextLengthExceeded
from core.types.handoff import PrefixSource
from core.types.prompt_logprobs import MAX_PROMPT_NUMBERS
from core.types.request import Sampling, SequenceRequest
from core.types.validation import check as _check
from core.types.validation import check_address, check_name
from core.wire.messages import from_message

_MAX_ID = 512  # shorter than the limit of a handoff id, which contains it
_MAX_CHOICES = 1024
_MAX_STOP_TOKENS = 65_536  # includes the model's own; the frontend accepts fewer
_SALT = re.compile(r"(?:[0-9a-f]{32})?")  # see salt_of in frontend/access/access.py
_STREAMS = 1 << 63


def check_request(request: SequenceRequest, *, vocab_size: int, max_tokens: int) -> None:
    """Check a request. max_tokens: limit of a sequence. Raises RequestError that names the field."""
    tokens, choices = request.token_ids, request.choices
    check_name(request.id, "id", most=_MAX_ID)
    check_name(request.adapter, "adapter", may_be_empty=True)
    _check(_SALT.fullmatch(request.salt) is not None, "salt", "must be 32 hex digits, or empty")
    if len(tokens) > max_tokens:
        raise ContextLengthExceeded(
            f"prompt has {len(tokens)} tokens, the limit of a sequence is {max_tokens}", param="prompt"
        )
    _check(bool(tokens), "token_ids", "must not be empty")
    _check(0 <= min(tokens) and max(tokens) < vocab_size, "token_ids", f"must be below {vocab_size}")
    _check(1 <= request.num_prompt_tokens <= len(tokens), "num_prompt_tokens", f"must be 1 to {len(tokens)}")
    _check(1 <= len(choices) <= _MAX_CHOICES, "choices", f"must be 1 to {_MAX_CHOICES}")
    _check(len(set(choices)) == len(choices) and min(choices) >= 0, "choices", "must be distinct and not negative")
    _check(0 <= request.stream <= _STREAMS - len(choices), "stream", f"must be below {_STREAMS}")
    _check_sampling(request.sampling, vocab_size)
    if (num_top := request.num_prompt_logprobs) is not None:
        most = MAX_PROMPT_NUMBERS // request.num_prompt_tokens - 1
        _check(0 <= num_top <= most, "num_prompt_logprobs", f"must be 0 to {most} for so long a prompt")
    if request.grammar:
        request.grammar.check("grammar")
    if request.thinking:
        request.thinking.check(vocab_size)


def prefix_source_of(message: pb.PrefillRequest | pb.GenerateRequest) -> PrefixSource | None:
    """Return the replica that may hold a prefix, or None. Raises RequestError."""
    if not message.HasField("prefix_source"):
        return None
    prefix_source = from_message(PrefixSource, message.prefix_source)
    check_name(prefix_source.replica, "prefix_source.replica")
    check_address(prefix_source.address, "prefix_source.address")
    return prefix_source


def check_streams(router: str, streams: Sequence[int]) -> None:
    """Check the streams of a router. Raises RequestError."""
    check_name(router, "router")
    _check(len(streams) <= _MAX_CHOICES, "streams", f"must be at most {_MAX_CHOICES}")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Check the limits that a step relies on. The frontend is stricter."""
    _check(len(sampling.stop_token_ids) <= _MAX_STOP_TOKENS, "stop_token_ids", f"must be at most {_MAX_STOP_TOKENS}")
    _check(sampling.max_tokens >= 1, "max_tokens", "must be 1 or more")
    _check(sampling.min_tokens >= 0, "min_tokens", "must be 0 or more")
    _check(0 <= sampling.temperature < math.inf, "temperature", "must be finite, and 0 or more")
    _check(sampling.top_k >= 0, "top_k", "must be 0 or more")
    _check(0 <= sampling.top_p <= 1, "top_p", "must be 0 to 1")
    _check(0 <= sampling.min_p <= 1, "min_p", "must be 0 to 1")
    _check(0 < sampling.repetition_penalty < math.inf, "repetition_penalty", "must be finite, and above 0")
    _check(math.isfinite(sampling.presence_penalty), "presence_penalty", "must be finite")
    _check(math.isfinite(sampling.frequency_penalty), "frequency_penalty", "must be finite")
    _check(0 <= (sampling.num_logprobs or 0) <= vocab_size, "num_logprobs", f"must be 0 to {vocab_size}")
    if sampling.token_rules:
        sampling.token_rules.check(vocab_size)

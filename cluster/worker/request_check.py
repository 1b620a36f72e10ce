"""What a worker makes sure of before a request reaches its engine.

The doors have looked at what clients send; a worker's port is open to more than our routers. A step computes many
requests at once: one id outside the vocabulary would end it for all of them.
"""

from __future__ import annotations

import math

from cluster.words.errors import RequestError
from cluster.words.request import Sampling, SequenceRequest

_MAX_CHOICES = 1024
_STREAMS = 1 << 63


def check_request(request: SequenceRequest, *, vocab_size: int) -> None:
    """Raises RequestError that names the field."""
    tokens, choices = request.token_ids, request.choices
    _check(bool(tokens), "token_ids", "must hold a token")
    _check(0 <= min(tokens) and max(tokens) < vocab_size, "token_ids", f"must be below {vocab_size}")
    _check(1 <= request.num_prompt_tokens <= len(tokens), "num_prompt_tokens", f"must be 1 to {len(tokens)}")
    _check(1 <= len(choices) <= _MAX_CHOICES, "choices", f"must be 1 to {_MAX_CHOICES}")
    _check(len(set(choices)) == len(choices) and min(choices) >= 0, "choices", "must be different, and not negative")
    _check(0 <= request.stream <= _STREAMS - len(choices), "stream", f"must be below {_STREAMS}")
    _check_sampling(request.sampling, vocab_size)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """The doors are stricter; this much a step must be able to rely upon."""
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


def _check(is_met: bool, param: str, rule: str) -> None:
    if not is_met:
        raise RequestError(f"{param}: {rule}", param=param)

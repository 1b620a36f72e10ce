"""Conversion of requests, tokens and prompt log-probabilities between dataclasses and protobuf messages.

Checks the plausibility of a replica's status and of its prompt log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from numpy.typing import NDArray

from core.rpc import worker_pb2 as pb
from core.types.errors import RequestError, TransferError
from core.types.json_records import Record
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import (
    DraftTally,
    FinishReason,
    Grammar,
    GrammarKind,
    SampledToken,
    Sampling,
    SequenceRequest,
    ThinkingBudget,
    TokenLogprob,
    TokenRules,
)

Number = TypeVar("Number", np.float32, np.int32)
M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Record)

# Numbers of prompt log-probabilities.
_FLOAT, _INT = np.dtype("<f4"), np.dtype("<i4")
_MOST_STEPS, _MOST_DRAFTED = 256, 64  # steps between two reports of a tally; tokens of a draft
_MOST_FLOOR = 1000.0  # above 1 if no draft pays off
# Measurements in a status, on which the router bases its costs.
_MEASURED = (
    "prefill_tokens_per_s", "decode_step_s", "link_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s",
    "tokens_per_row", "drafted_per_row",
)  # fmt: skip
_ADDED_UP = ("transfer_seconds", "fetch_seconds")
_SMALLEST, _LARGEST = 1e-12, 1e18  # of any measurement: seconds, and things per second


def sequence_to_proto(request: SequenceRequest) -> pb.Sequence:
    grammar = to_message(pb.Grammar, request.grammar) if request.grammar else None
    thinking = to_message(pb.ThinkingBudget, request.thinking) if request.thinking else None
    sampling = _sampling_to_proto(request.sampling)
    return to_message(pb.Sequence, request, sampling=sampling, grammar=grammar, thinking=thinking)


def sequence_from_proto(message: pb.Sequence) -> SequenceRequest:
    """Parse a request. Raises RequestError for an unknown kind of grammar: ignoring it would change the tokens."""
    grammar = _grammar_from_proto(message.grammar) if message.HasField("grammar") else None
    thinking = from_message(ThinkingBudget, message.thinking) if message.HasField("thinking") else None
    sampling = _sampling_from_proto(message.sampling)
    return from_message(SequenceRequest, message, sampling=sampling, grammar=grammar, thinking=thinking)


def tokens_to_proto(tokens: Iterable[SampledToken]) -> list[pb.SampledToken]:
    messages = []
    for token in tokens:
        messages.append(message := pb.SampledToken(token_id=token.token_id))
        _add_details(message, token)
    return messages


def add_stream_token(frame: pb.Frame, stream: int, token: SampledToken) -> None:
    # Adding to the repeated fields in place avoids copies; this may run for each row of each step.
    _add_details(frame.streams.add(stream=stream).tokens.add(token_id=token.token_id), token)


def tokens_from_proto(messages: Iterable[pb.SampledToken]) -> list[SampledToken]:
    return [
        SampledToken(
            token_id=message.token_id,
            logprob=_logprob_from_proto(message.logprob) if message.HasField("logprob") else None,
            finish_reason=_reason_from(message.finish_reason) if message.finish_reason else None,
            drafts=_drafts_from_proto(message.drafts) if message.HasField("drafts") else None,
        )
        for message in messages
    ]


def _drafts_from_proto(message: pb.DraftTally) -> DraftTally:
    """Parse draft statistics. They are only displayed, so implausible values are clamped instead of failing."""
    steps = min(message.steps, _MOST_STEPS)
    drafts = min(message.drafts, steps)
    drafted = min(message.drafted, drafts * _MOST_DRAFTED)
    return DraftTally(
        steps=steps,
        drafts=drafts,
        unguessed=min(message.unguessed, steps - drafts),
        drafted=drafted,
        accepted=min(message.accepted, drafted),
        floors=max(0.0, min(message.floors, steps * _MOST_FLOOR)) if math.isfinite(message.floors) else 0.0,
    )


def _sampling_to_proto(sampling: Sampling) -> pb.Sampling:
    rules = sampling.token_rules
    if rules is None:
        return to_message(pb.Sampling, sampling, token_rules=None)
    bad_words = [pb.BadWord(token_ids=word) for word in rules.bad_words]
    token_rules = to_message(pb.TokenRules, rules, logit_bias=dict(rules.logit_bias), bad_words=bad_words)
    return to_message(pb.Sampling, sampling, token_rules=token_rules)


def _sampling_from_proto(message: pb.Sampling) -> Sampling:
    if not message.HasField("token_rules"):
        return from_message(Sampling, message, token_rules=None)
    fields = message.token_rules
    rules = TokenRules(
        logit_bias=tuple(sorted(fields.logit_bias.items())),
        allowed_token_ids=tuple(fields.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in fields.bad_words),
    )
    return from_message(Sampling, message, token_rules=None if rules.says_nothing else rules)


def _grammar_from_proto(message: pb.Grammar) -> Grammar:
    try:
        return Grammar(kind=GrammarKind(message.kind), text=message.text)
    except ValueError:
        raise RequestError(f"grammar: unknown kind {message.kind[:64]!r}", param="grammar") from None


def _reason_from(text: str) -> FinishReason:
    """Parse a finish reason. An unknown one, of a newer worker, still ends the sequence."""
    try:
        return FinishReason(text)
    except ValueError:
        return FinishReason.STOP


def _add_details(message: pb.SampledToken, token: SampledToken) -> None:
    """Set the optional fields that the token has. Setting each of them always would cost time per token."""
    if token.logprob:
        message.logprob.CopyFrom(_logprob_to_proto(token.logprob))
    if token.finish_reason:
        message.finish_reason = token.finish_reason
    if token.drafts:
        message.drafts.CopyFrom(to_message(pb.DraftTally, token.drafts))


def _logprob_to_proto(logprob: TokenLogprob) -> pb.Logprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.Logprob(logprob=logprob.logprob, top=top)


def _logprob_from_proto(message: pb.Logprob) -> TokenLogprob:
    return TokenLogprob(logprob=message.logprob, top=tuple((top.token_id, top.logprob) for top in message.top))


def make_plausible(status: pb.Status) -> bool:
    """Clear implausible metrics of a status in place: NaN, infinite and negative ones. They then count as not measured.

    Returns False if it cleared any.
    """
    bad = [name for name in _MEASURED if not _is_plausible(getattr(status, name))]
    for name in bad:
        status.ClearField(name)
    timing, totals = status.timing, status.totals
    is_good = not bad
    if not all(map(_is_plausible, (timing.base_s, timing.token_s, timing.pair_s, timing.context_s))):
        status.ClearField("timing")
        is_good = False
    for name in _ADDED_UP:
        if not 0 <= getattr(totals, name) < math.inf:
            totals.ClearField(name)
            is_good = False
    return is_good


def _is_plausible(number: float) -> bool:
    return number == 0 or _SMALLEST <= number <= _LARGEST


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


def to_message(kind: type[M], record: Record, **given: object) -> M:
    """Fill every field of the message from `given`, or else from the record's attribute of the same name."""
    return kind(
        **{name: getattr(record, name) for name, _, _ in _described(kind.DESCRIPTOR) if name not in given}, **given
    )


def from_message(kind: type[R], message: Message, **given: object) -> R:
    """Fill every field of the record from `given`, or else from the message; other fields keep their defaults.

    Repeated fields become tuples. An unset optional field becomes None.
    """
    for name, is_repeated, may_be_missing in _described(message.DESCRIPTOR):
        if name in given or name not in kind.__dataclass_fields__:
            continue
        value = getattr(message, name)
        if is_repeated:
            value = tuple(value)
        elif may_be_missing and not message.HasField(name):
            value = None
        given[name] = value
    return kind(**given)


@cache
def _described(kind: Descriptor) -> list[tuple[str, bool, bool]]:
    """Return (name, is repeated, has presence) of each field."""
    return [(field.name, field.is_repeated, field.has_presence) for field in kind.fields]

"""What the doors take and what they answer, for docs/CLIENTS.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from core.types import errors as tree
from core.types import token_rules
from core.types.errors import ClusterError, outcome_of
from docs.generate.table import table
from frontend.anthropic.types import MessagesBody
from frontend.http.batch_types import BatchBody
from frontend.openai.fields import EMPTY, Only
from frontend.openai.messages import MAX_CALLS, MAX_PARTS, MAX_TOOLS, ChatMessage
from frontend.openai.types import MAX_PROMPTS_TIMES_N, ChatBody, TextBody
from frontend.responses.items import MAX_ID_CHARS, InputItem
from frontend.responses.types import ResponsesBody
from frontend.text import completion_request as rules
from frontend.text.bad_words import MAX_BAD_WORD_CHARS

_NOT_FOR_CLIENTS = (
    tree.SpecError,
    tree.DeployError,
    tree.Interrupted,
    tree.NotDeployed,
    tree.ReplicaFailed,
    tree.RequestFailed,
    tree.EndpointUnavailable,
)
_LIMITS = {
    "stop": f"{rules.MAX_STOPS} strings of 1 to {rules.MAX_STOP_CHARS:,} characters",
    "stop_token_ids": f"{rules.MAX_STOP_TOKENS:,}",
    "logit_bias": f"{token_rules.MAX_LOGIT_BIAS:,}, each from {-token_rules.MAX_BIAS:g} to {token_rules.MAX_BIAS:g}",
    "allowed_token_ids": f"1 to {token_rules.MAX_ALLOWED_TOKENS:,}",
    "bad_words": f"{token_rules.MAX_BAD_WORDS} of 1 to {MAX_BAD_WORD_CHARS} characters; "
    f"{token_rules.MAX_BAD_WORD_TOKENS:,} tokens",
    "cache_salt": f"{rules.MAX_SALT_CHARS:,} characters",
    "prompt": f"prompts times `n`: {MAX_PROMPTS_TIMES_N:,}",
    "n": f"1 to {rules.MAX_CHOICES}, and to `decode.max_running`",
    "best_of": f"`n` to {rules.MAX_CHOICES}, and to `decode.max_running`",
    "max_tokens": "1 to the context; times `n` and prompts: `decode.max_running` contexts",
    "max_output_tokens": "1 to the context",
    "user": f"{rules.MAX_USER_CHARS} characters",
    "messages": f"{rules.MAX_MESSAGES:,}",
    "role": f"{rules.MAX_ROLE_CHARS} characters",
    "content": f"{MAX_PARTS:,} parts",
    "system": f"{MAX_PARTS:,} blocks",
    "tools": f"{MAX_TOOLS}",
    "tool_calls": f"{MAX_CALLS}",
    "input": f"{rules.MAX_MESSAGES:,} items",
    **dict.fromkeys(("id", "call_id", "previous_response_id"), f"{MAX_ID_CHARS} characters"),
    "top_logprobs": f"0 to {rules.MAX_LOGPROBS}",
}
_ORDER = ("yes", "only", "ignored", "refused")
_OF = ("text:", "chat:")
_SAME_AS = {
    "max_completion_tokens": "max_tokens",
    "thinking_budget": "thinking_token_budget",
    "stop_sequences": "stop",
    "output": "content",
    "summary": "content",
}


def errors() -> str:
    """The table from error to gRPC status and HTTP status."""
    rows = []
    for kind in _kinds(ClusterError):
        outcome = outcome_of(kind(""))
        meaning = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        rows.append((f"`{kind.__name__}`", meaning, outcome.grpc, str(outcome.http), outcome.type, f"`{outcome.code}`"))
    bug = outcome_of(Exception())
    meaning = "A bug of ours: nothing of it is told, and the router's log says more."
    rows.append(("any other", meaning, bug.grpc, str(bug.http), bug.type, f"`{bug.code}`"))
    return table(("error", "meaning", "gRPC status", "HTTP", "`type`", "`code`"), rows)


def fields() -> str:
    """What the bodies of both OpenAI endpoints take."""
    bodies = (TextBody.model_fields, ChatBody.model_fields)
    rows = []
    for name in dict.fromkeys(name for body in bodies for name in body):
        supports = [_support(name, body[name]) if name in body else ("refused", "", "") for body in bodies]
        taken = [support[0] for support in supports]
        told = list(
            dict.fromkeys(support[1:] for name_, support in zip(bodies, supports, strict=True) if any(support[1:]))
        )
        if len(told) == 2:
            bounds, notes = (
                "; ".join(f"{of} {text}" for of, text in zip(_OF, texts, strict=True) if text)
                for texts in zip(*told, strict=True)
            )
        else:
            bounds, notes = told[0] if told else ("", "")
        rows.append((f"`{name}`", *taken, bounds, notes))
    rows.sort(key=lambda row: min(_ORDER.index(taken.split()[0]) for taken in row[1:3]))
    return table(("field", "`/v1/completions`", "`/v1/chat/completions`", "bounds", "notes"), rows)


def messages() -> str:
    rows = [(f"`{name}`", *_support(name, field)) for name, field in ChatMessage.model_fields.items()]
    return table(("field of a message", "taken", "bounds", "notes"), rows)


def responses() -> str:
    """What the body of /v1/responses takes."""
    rows = [(f"`{name}`", *_support(name, field)) for name, field in ResponsesBody.model_fields.items()]
    rows.sort(key=lambda row: _ORDER.index(row[1].split()[0]))
    return table(("field of `/v1/responses`", "taken", "bounds", "notes"), rows)


def batches() -> str:
    """What the body of /v1/batches takes."""
    rows = [(f"`{name}`", *_support(name, field)) for name, field in BatchBody.model_fields.items()]
    return table(("field of `/v1/batches`", "taken", "bounds", "notes"), rows)


def items() -> str:
    rows = [(f"`{name}`", *_support(name, field)) for name, field in InputItem.model_fields.items()]
    return table(("field of an item", "taken", "bounds", "notes"), rows)


def anthropic_fields() -> str:
    """What the body of Anthropic's endpoint takes."""
    rows = [(f"`{name}`", *_support(name, field)) for name, field in MessagesBody.model_fields.items()]
    rows.sort(key=lambda row: (_ORDER.index(row[1].split()[0]), not row[3].startswith("required")))
    return table(("field", "`/v1/messages`", "bounds", "notes"), rows)


def limits() -> str:
    return (
        f"One request has at most {rules.MAX_REQUEST_BYTES // 2**20} MiB at either door, a request id 1 to 128 visible "
        f"ASCII characters. A temperature below {rules.GREEDY_BELOW:g} counts as 0."
    )


def _kinds(kind: type[ClusterError]) -> Iterator[type[ClusterError]]:
    """The errors that a client can meet, as the tree has them."""
    for below in kind.__subclasses__():
        if below.__module__ == tree.__name__ and below not in _NOT_FOR_CLIENTS:
            yield below
            yield from _kinds(below)


def _support(name: str, field: FieldInfo) -> tuple[str, str, str]:
    if rule := next(
        (m.func for m in field.metadata if isinstance(m, AfterValidator) and isinstance(m.func, Only)), None
    ):
        note = f"Instead: `{rule.instead}`." if rule.instead else field.description or ""
        if rule.neutral in ((), EMPTY):
            return "refused", "", note
        return f"only {' or '.join(f'`{json.dumps(value)}`' for value in rule.neutral)}", "", note
    if field.annotation is Any and not field.metadata:
        return "ignored", "", ""
    required = "required. " if field.is_required() else ""
    return "yes", _bounds(_SAME_AS.get(name, name), field), required + (field.description or "")


def _bounds(name: str, field: FieldInfo) -> str:
    if name in _LIMITS:
        return _LIMITS[name]
    if name not in rules.RANGES or "bool" in str(field.annotation):
        return ""
    low, high, takes_low = rules.RANGES[name]
    return f"{_number(low)} to {_number(high)}" if takes_low else f"above {_number(low)}, to {_number(high)}"


def _number(value: float) -> str:
    for power in (31, 63, 64):
        for base in (2**power, 2**power - 1):
            if abs(value) == base:
                return f"{'-' if value < 0 else ''}2^{power}{' - 1' if base % 2 else ''}"
    return f"{value:g}"

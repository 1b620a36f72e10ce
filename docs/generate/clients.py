"""Tables of request fields, limits and errors, for docs/CLIENTS.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from core.types import errors as tree
from core.types import request
from core.types.errors import ClusterError, outcome_of
from docs.generate.table import table
from frontend.anthropic.types import MessagesBody
from frontend.openai.fields import EMPTY, Only
from frontend.openai.messages import MAX_PARTS, MAX_TOOLS
from frontend.openai.types import MAX_PROMPTS_TIMES_N, ChatBody, TextBody
from frontend.responses.items import MAX_ID_CHARS
from frontend.responses.types import ResponsesBody
from frontend.text import completion_request as rules
from frontend.text.completion_request import MAX_BAD_WORD_CHARS

_NOT_FOR_CLIENTS = (
    tree.SpecError,
    tree.DeployError,
    tree.Interrupted,
    tree.NotDeployed,
    tree.ReplicaFailed,
    tree.RequestFailed,
)
_LIMITS = {
    "stop": f"{rules.MAX_STOPS} strings of 1 to {rules.MAX_STOP_CHARS:,} characters",
    "stop_token_ids": f"{rules.MAX_STOP_TOKENS:,}",
    "logit_bias": f"{request.MAX_LOGIT_BIAS:,}, each from {-request.MAX_BIAS:g} to {request.MAX_BIAS:g}",
    "allowed_token_ids": f"1 to {request.MAX_ALLOWED_TOKENS:,}",
    "bad_words": f"{request.MAX_BAD_WORDS} of 1 to {MAX_BAD_WORD_CHARS} characters; "
    f"{request.MAX_BAD_WORD_TOKENS:,} tokens",
    "cache_salt": f"{rules.MAX_SALT_CHARS:,} characters",
    "prompt": f"prompts times `n`: {MAX_PROMPTS_TIMES_N:,}",
    "n": f"1 to {rules.MAX_CHOICES}, and to `decode.max_running`",
    "best_of": f"`n` to {rules.MAX_CHOICES}, and to `decode.max_running`",
    "max_tokens": "1 to the context; times `n` and prompts: `decode.max_running` contexts",
    "max_output_tokens": "at least 1",
    "user": f"{rules.MAX_USER_CHARS} characters",
    "messages": f"{rules.MAX_MESSAGES:,}",
    "system": f"{MAX_PARTS:,} blocks",
    "tools": f"{MAX_TOOLS}",
    "input": f"{rules.MAX_MESSAGES:,} items",
    "previous_response_id": f"{MAX_ID_CHARS} characters",
    "top_logprobs": f"0 to {rules.MAX_LOGPROBS}",
}
_OF = ("text:", "chat:")
_OWN_MEANING = {"tools", "top_logprobs"}  # of /v1/responses: as bounded as in a chat, with other rules
_SAME_AS = {
    "max_completion_tokens": "max_tokens",
    "thinking_budget": "thinking_token_budget",
    "stop_sequences": "stop",
}


def errors() -> str:
    """Return the table of HTTP status, error code and gRPC status; errors that clients see alike share a row."""
    rows: dict[tuple[str, ...], str] = {}
    for kind in _kinds(ClusterError):
        rows.setdefault(_outcome(kind("")), " ".join((kind.__doc__ or "").partition("\n\n")[0].split()))
    rows[_outcome(Exception())] = "Internal error. The router's log has the details."
    heading = ("HTTP", "`code`", "gRPC status", "meaning")
    return table(heading, sorted((*outcome, meaning) for outcome, meaning in rows.items()))


def fields() -> str:
    """Return the table of fields of both OpenAI endpoints, and the ignored and refused fields below it."""
    bodies = (TextBody.model_fields, ChatBody.model_fields)
    rows, others = [], {}
    for name in dict.fromkeys(name for body in bodies for name in body):
        supports = [_support(name, body[name]) if name in body else ("refused", "", "") for body in bodies]
        taken = [support[0] for support in supports]
        if not any(support.startswith(("yes", "only")) for support in taken):
            others[name] = supports[1] if name in bodies[1] else supports[0]
            continue
        notes = list(dict.fromkeys(support[1:] for support in supports if any(support[1:])))
        if len(notes) == 2:
            bounds, note = (
                "; ".join(f"{of} {text}" for of, text in zip(_OF, texts, strict=True) if text)
                for texts in zip(*notes, strict=True)
            )
        else:
            bounds, note = notes[0] if notes else ("", "")
        rows.append((f"`{name}`", bounds, f"{_where(*taken)} {note}"))
    heading = ("field", "bounds", "notes")
    return f"{table(heading, rows)}\n\n{_not_taken(others)}"


def responses() -> str:
    """Return the table of fields of /v1/responses that a chat lacks or defines otherwise, and lists of the others."""
    chat = {name: _support(name, field) for name, field in ChatBody.model_fields.items()}
    rows, same, others = [], [], {}
    for name, field in ResponsesBody.model_fields.items():
        support = _support(name, field)
        if support[0] in ("ignored", "refused"):
            others[name] = support
        elif name not in _OWN_MEANING and chat.get(name, ("", "", ""))[:2] == support[:2]:
            same.append(f"`{name}`")
        else:
            taken, bounds, note = support
            rows.append((f"`{name}`", bounds, f"{'' if taken == 'yes' else f'{taken.capitalize()}.'} {note}"))
    heading = ("field of `/v1/responses`", "bounds", "notes")
    return f"{table(heading, rows)}\n\nAs in a chat: {', '.join(same)}. {_not_taken(others)}"


def anthropic_fields() -> str:
    """Return the table of fields of Anthropic's endpoint, and the ignored and refused fields below it."""
    clamped = {"max_tokens": "max_output_tokens"}
    supports = {name: _support(clamped.get(name, name), field) for name, field in MessagesBody.model_fields.items()}
    others = {name: support for name, support in supports.items() if support[0] in ("ignored", "refused")}
    rows = [(f"`{name}`", *support[1:]) for name, support in supports.items() if name not in others]
    rows.sort(key=lambda row: not row[2].startswith("Required"))
    return f"{table(('field of `/v1/messages`', 'bounds', 'notes'), rows)}\n\n{_not_taken(others)}"


def limits() -> str:
    return (
        f"A request has at most {rules.MAX_REQUEST_BYTES // 2**20} MiB. A request id has 1 to 128 visible ASCII "
        f"characters. A temperature below {rules.GREEDY_BELOW:g} counts as 0."
    )


def _outcome(error: Exception) -> tuple[str, ...]:
    outcome = outcome_of(error)
    return str(outcome.http), f"`{outcome.code}`", outcome.grpc


def _where(text: str, chat: str) -> str:
    """Return the endpoint that takes a field, if only one does, and the only values that it takes."""
    place = "" if "refused" not in (text, chat) else "In a chat only." if text == "refused" else "Not in a chat."
    value = next((taken for taken in (text, chat) if taken.startswith("only")), "")
    return f"{place} {value and f'{value[0].upper()}{value[1:]}.'}".strip()


def _not_taken(supports: dict[str, tuple[str, str, str]]) -> str:
    """Return one line on the fields that are ignored and one on those that are refused."""
    ignored = [f"`{name}`" for name, support in supports.items() if support[0] == "ignored"]
    refused = [
        f"`{name}`" + (f" (i{support[2].rstrip('.')[1:]})" if support[2].startswith("Instead") else "")
        for name, support in supports.items()
        if support[0] == "refused"
    ]
    lines = [f"{kind}: {', '.join(names)}." for kind, names in (("Ignored", ignored), ("Refused", refused)) if names]
    return "\n\n".join(lines)


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
    required = "Required. " if field.is_required() else ""
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

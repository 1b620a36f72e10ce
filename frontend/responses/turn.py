"""A /v1/responses body with everything it refers to: the previous response, and referenced items."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from fastapi import Request
from msgspec import Raw
from pydantic import ValidationError

from core.types.errors import RequestError, UnknownResponse
from frontend.http.event_stream import JSON, to_json
from frontend.http.request_contexts import ParsedBody
from frontend.openai.fields import OpenAIObject
from frontend.responses.items import REFERENCE, InputItem, shown
from frontend.responses.types import ResponsesBody
from frontend.text.completion_request import MAX_REQUEST_BYTES

MAX_REFERRED = 64  # responses referenced by the items of one body
PREVIOUS = "previous_response_id"
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_i?[0-9]{1,6}")  # item id, which contains that of its response
_MAX_TOLD = 64


class StoredTurn(msgspec.Struct):
    """Stored form of a response."""

    response: Raw
    input: list[Raw]  # items, including those of all previous turns

    @classmethod
    def of(cls, value: bytes) -> StoredTurn:
        """Decode a stored value. Raises UnknownResponse."""
        try:
            return msgspec.json.decode(value, type=cls)
        except msgspec.MsgspecError:
            raise _other_form() from None

    @property
    def items(self) -> list[Raw]:
        """Items of its input, then of its output."""
        return [*self.input, *msgspec.json.decode(self.response, type=_Output).output]


def id_of(item: Raw) -> str:
    return msgspec.json.decode(item, type=_Named).id


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Parsed body with everything derived from visiting all of it."""

    body: ResponsesBody
    # Input in stored form: history included, items that the model does not see excluded.
    items: Sequence[Raw]
    echoed_fields: JSON
    needed: Mapping[str, str]  # ids of referenced responses, and the field that names each
    parsed: ParsedBody[ResponsesBody] | None = None  # None while referenced responses are missing

    @classmethod
    def of(cls, request: Request, id: str, body: ResponsesBody) -> Turn:
        """Build the turn of a body. id: of the new response. Raises RequestError."""
        body.check_items()
        own = id.partition("_")[2]
        items = [Raw(to_json(item.to_store(f"{own}_i{number}"))) for number, item in enumerate(body.input)]
        needed = dict.fromkeys(_referred(body.input), "input")
        if len(needed) > MAX_REFERRED:
            raise RequestError(
                f"input: items refer to {len(needed)} responses; at most {MAX_REFERRED} are accepted", param="input"
            )
        if body.previous_response_id is not None:
            needed[body.previous_response_id] = PREVIOUS
        turn = cls(body=body, items=items, echoed_fields=body.echoed_fields(), needed=needed)
        return turn if needed else turn._with_request(request, body)

    def completed(self, stored: Mapping[str, bytes], request: Request) -> Turn:
        """Add the referenced responses. stored: their values, by id. Raises RequestError."""
        try:
            turns = {id: StoredTurn.of(value) for id, value in stored.items()}
            known = {id_of(item): item for id in set(_referred(self.body.input)) for item in turns[id].items}
            previous = self.body.previous_response_id
            history = turns[previous].items if previous is not None else []
            items = [self._resolved(number, item, known) for number, item in enumerate(self.items)]
            whole = [*history, *items]
            _check_size(whole)
            read = _Items.model_validate_json(to_json({"items": whole})).items
        except (msgspec.MsgspecError, ValidationError):
            raise _other_form() from None
        return replace(self, items=whole)._with_request(request, self.body.model_copy(update={"input": read}))

    def _with_request(self, request: Request, body: ResponsesBody) -> Turn:
        """Build the request. body: with history and referenced items resolved. Raises RequestError."""
        items = [self.items[number] for number in shown(body.input)]
        return replace(self, items=items, parsed=ParsedBody.of(request, body))

    def _resolved(self, number: int, item: Raw, known: Mapping[str, Raw]) -> Raw:
        given = self.body.input[number]
        if given.kind != REFERENCE:
            return item
        if (found := known.get(given.id or "")) is None:
            raise _no_item(number, given)
        return found


class _Output(msgspec.Struct):
    output: list[Raw]


class _Named(msgspec.Struct):
    id: str


class _Items(OpenAIObject):
    items: list[InputItem]


def _referred(items: Sequence[InputItem]) -> Iterator[str]:
    """Yield the ids of the responses whose items are referenced. Raises UnknownResponse."""
    for number, item in enumerate(items):
        if item.kind == REFERENCE:
            if not (found := _ID.fullmatch(item.id or "")):
                raise _no_item(number, item)
            yield f"resp_{found[1]}"


def _check_size(items: Sequence[Raw]) -> None:
    """Apply the limit of a body to the whole history. Raises RequestError."""
    if sum(memoryview(item).nbytes for item in items) > MAX_REQUEST_BYTES:
        text = f"input: exceeds {MAX_REQUEST_BYTES} bytes, including its history and referenced items"
        raise RequestError(text, param="input")


def _no_item(number: int, item: InputItem) -> UnknownResponse:
    field = f"input[{number}].id"
    text = f"{field}: item {(item.id or '')[:_MAX_TOLD]!r} not found; send the item itself"
    return UnknownResponse(text, param=field)


def _other_form() -> UnknownResponse:
    return UnknownResponse("the stored response has an unknown format", param=PREVIOUS)

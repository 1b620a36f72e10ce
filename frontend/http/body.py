"""A request's body over HTTP: read within bounds, and parsed where it holds up nobody.

What makes a body expensive is how many values are in it. Those of a large one are counted first, field by field and
without making any of them: 10 MB of token ids take 0.2 s to parse, and 0.04 s to be refused (one core, 2026-11-22).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from core.types.errors import ContextLengthExceeded, RequestError, RequestTooLarge
from frontend.openai.fields import OpenAIObject, explain, unknown_fields
from frontend.responses.byte_budget import ByteBudget
from frontend.text.completion_request import MAX_REQUEST_BYTES
from frontend.text.text_threads import TextThreads

Body = TypeVar("Body", bound=OpenAIObject)
T = TypeVar("T")

_SMALL = 16 * 1024  # bytes, at most 1 ms of parsing: less than it takes to reach a thread and come back
_MAX_HELD = 256 * 2**20  # bytes of the large bodies that a router has at a time. Small ones always find room
# Of a large body, by field: values between brackets, and bytes. Other fields need neither.
_MAX_PROMPT_VALUES = 2**18  # all prompts together, or a context if that is longer
_MAX_VALUES = 2**12
_MAX_FIELD_BYTES = 2**18
_MAX_TOOLS_BYTES = 2**20
_MAX_VALUES_OF = {**dict.fromkeys(("messages", "input", "system"), 2**17), "tools": 2**15}
_MAX_FIELDS = 256
_MAX_NAME = 128  # characters, of a field
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


class BodyReader:
    """Reads bodies for one router. Belongs to its event loop."""

    def __init__(
        self,
        threads: TextThreads,
        *,
        max_context: Callable[[], int],
        within_s: float,
        rejects_unknown_fields: bool = False,
    ) -> None:
        """max_context: the longest of the models that are served now. within_s: how long a client may take to send
        one."""
        self._rejects_unknown_fields = rejects_unknown_fields
        self._threads = threads
        self._max_context = max_context
        self._within_s = within_s
        self._held = ByteBudget(_MAX_HELD, "requests")  # by key

    async def read(self, kind: type[Body], request: Request, make: Callable[[Body], T], *, key_id: str = "") -> T:
        """What `make` makes of the body, on the thread that has parsed it: nothing that visits all of a large one is
        for the event loop. The content type is not looked at. key_id: whose part of the room a large body takes; empty:
        nobody's.

        Raises what `make` raises, RequestError that names the first wrong field, RequestTooLarge as soon as that is
        known, CapacityError, and HTTPException 408 when the body does not arrive in time.
        """
        body = bytearray()
        try:
            await self._receive(body, request, key_id)
            if len(body) <= _SMALL:
                return make(self._parse(kind, bytes(body)))
            return await self._threads.run(key_id, self._parse_large, kind, bytes(body), make)
        finally:
            self._held.add(key_id, -_counted(body))

    async def _receive(self, body: bytearray, request: Request, key_id: str) -> None:
        """No more than MAX_REQUEST_BYTES are ever held."""
        too_large = RequestTooLarge(f"the body is larger than {MAX_REQUEST_BYTES} bytes")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > MAX_REQUEST_BYTES:
            raise too_large
        try:
            async with asyncio.timeout(self._within_s):
                async for part in request.stream():
                    before = _counted(body)
                    body += part
                    self._held.add(key_id, _counted(body) - before)
                    if len(body) > MAX_REQUEST_BYTES:
                        raise too_large
                    if _counted(body):
                        self._held.check(key_id)
        except TimeoutError:
            raise HTTPException(408, headers={"connection": "close"}) from None

    def _parse_large(self, kind: type[Body], body: bytes, make: Callable[[Body], T]) -> T:
        self._check_values(body)
        return make(self._parse(kind, body))

    def _parse(self, kind: type[Body], body: bytes) -> Body:
        try:
            parsed = kind.model_validate_json(body)
        except ValidationError as error:
            raise explain(error) from None
        if self._rejects_unknown_fields and (name := next(unknown_fields(parsed), None)):
            raise RequestError(f"{name[:_MAX_NAME]}: unknown field", param=name[:_MAX_NAME])
        return parsed

    def _check_values(self, body: bytes) -> None:
        try:
            fields = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=_Names().add)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None
        for field, raw in fields.items():
            name, value = field.text, bytes(raw).strip()
            if value.startswith(b'"') and name == "prompt":
                continue  # one string; its length is looked at where the context is known
            ids = max(_MAX_PROMPT_VALUES, self._max_context())
            limit = {"prompt": ids, "tokens": ids, **_MAX_VALUES_OF}.get(name)
            most = {"tools": _MAX_TOOLS_BYTES}.get(name, _MAX_FIELD_BYTES if limit is None else len(value))
            if len(value) > most:
                raise RequestError(f"{name[:64]}: at most {most} bytes are taken", param=name[:64])
            if _has_more_values(value, limit or _MAX_VALUES):
                text = f"{name[:64]}: more than {limit or _MAX_VALUES} values are not taken"
                raise (ContextLengthExceeded if limit == ids else RequestError)(text, param=name[:64])


class _Name:
    """The name of a field; no dataclass, for msgspec would read an object into that."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Names:
    """The names of the fields of one body, each once: a parser would count the last of two of a name, and make both."""

    def __init__(self) -> None:
        self._seen = set[str]()

    def add(self, kind: type, text: str) -> _Name:
        """For msgspec, of each as it comes. Raises RequestError."""
        assert kind is _Name
        if text in self._seen:
            raise RequestError(f"{text[:64]}: is given twice", param=text[:64])
        self._seen.add(text)
        if len(self._seen) > _MAX_FIELDS:
            raise RequestError(f"the body has more than {_MAX_FIELDS} fields")
        return _Name(text)


def _counted(body: bytearray) -> int:
    """Bytes that count as held."""
    return len(body) if len(body) > _SMALL else 0


def _has_more_values(value: bytes, limit: int) -> bool:
    """Whether there are more strings than twice the limit, or more values between brackets than the limit."""
    # At least as many as there are strings: what ends a string may look escaped, what begins one may not.
    if value.count(b'"') - value.count(b'\\"') > 2 * limit:
        return True
    bare = _STRING.sub(b"", value)
    return sum(bare.count(mark) for mark in (b",", b"[", b"{")) > limit

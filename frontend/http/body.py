"""Request bodies over HTTP: read and decoded within limits, and parsed off the event loop if large.

Parsing cost depends on the number of values. Those of a large body are counted first, field by field, without creating
them: 10 MB of token ids take 0.2 s to parse, and 0.04 s to reject (one core, 2026-11-22).
"""

from __future__ import annotations

import asyncio
import codecs
import gzip
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from core.types.errors import CapacityError, ContextLengthExceeded, RequestError, RequestTooLarge, UnsupportedEncoding
from frontend.openai.fields import OpenAIObject, explain, unknown_fields
from frontend.text.completion_request import MAX_REQUEST_BYTES
from frontend.text.text_threads import TextThreads

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Body = TypeVar("Body", bound=OpenAIObject)
T = TypeVar("T")

_SMALL = 16 * 1024  # bytes, at most 1 ms of parsing: cheaper than a thread switch
_MAX_HELD = 256 * 2**20  # bytes of large bodies in memory per router; small ones are exempt
# Limits of a large body, by field: values between brackets, and bytes. Other fields use the defaults.
_MAX_PROMPT_VALUES = 2**18  # all prompts together, or the context length if that is larger
_MAX_VALUES = 2**12
_MAX_FIELD_BYTES = 2**18
_MAX_TOOLS_BYTES = 2**20
_MAX_VALUES_OF = {**dict.fromkeys(("messages", "input", "system"), 2**17), "tools": 2**15}
_MAX_FIELDS = 256
_MAX_NAME = 128  # characters of a field name
_TEXTS = frozenset(
    ("messages", "prompt", "input", "system", "instructions")
)  # fields in which lone surrogates are replaced
SUPPORTED = "gzip, deflate, zstd"
_MAX_ENCODINGS = 4  # applied to one body, one after the other
# RFC 9659 limits the window of this content encoding to 8 MB.
_ZSTD_BOUNDS: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
# Matches the escapes of a surrogate pair, or of a lone surrogate (the group), but not an escaped backslash before `u`.
_SURROGATES = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?<=(?<!\\)\\u[dD])([89a-fA-F][0-9a-fA-F]{2}))"
)


@dataclass(eq=False)
class BodyReader:
    """Reader of request bodies of one router. Bound to its event loop."""

    threads: TextThreads
    max_context: Callable[[], int]  # largest context of the served models
    within_s: float  # time limit for receiving a body
    rejects_unknown_fields: bool = False

    def __post_init__(self) -> None:
        self._held = ByteBudget(_MAX_HELD, "requests")  # by key

    async def read(self, kind: type[Body], request: Request, make: Callable[[Body], T], *, key_id: str = "") -> T:
        """Return `make(body)`, computed on the thread that parsed it: visiting all of a large body must not block the
        event loop. Ignores the content type. key_id: API key whose share of the memory a large body takes; empty: none.

        Raises what `make` raises, RequestError with the first invalid field, RequestTooLarge and UnsupportedEncoding as
        early as possible, CapacityError, and HTTPException 408 if the body does not arrive in time.
        """
        body = bytearray()
        try:
            encodings = encodings_of(request.headers.getlist("content-encoding"))
            await self._receive(body, request, key_id)
            if encodings:
                await self._decode(body, encodings, key_id)
            if len(body) <= _SMALL:
                return make(self._parse(kind, _mended(bytes(body))))
            return await self.threads.run(key_id, self._parse_large, kind, bytes(body), make)
        finally:
            self._held.add(key_id, -_counted(body))

    async def _receive(self, body: bytearray, request: Request, key_id: str) -> None:
        """Read the body into `body`, at most MAX_REQUEST_BYTES."""
        too_large = RequestTooLarge(f"the body is larger than {MAX_REQUEST_BYTES} bytes")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > MAX_REQUEST_BYTES:
            raise too_large
        try:
            async with asyncio.timeout(self.within_s):
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

    async def _decode(self, body: bytearray, encodings: list[str], key_id: str) -> None:
        """Decode `body` in place, on another thread unless it is small before and after."""
        num_held, encoded = _counted(body), bytes(body)
        if not num_held:
            with suppress(RequestTooLarge):
                body[:] = decoded(encoded, encodings, max_bytes=_SMALL)
                return
        body[:] = await self.threads.run(key_id, decoded, encoded, encodings, max_bytes=MAX_REQUEST_BYTES)
        self._held.add(key_id, _counted(body) - num_held)
        if _counted(body):
            self._held.check(key_id)

    def _parse_large(self, kind: type[Body], body: bytes, make: Callable[[Body], T]) -> T:
        mended = _mended(body)
        self._check_values(mended)
        return make(self._parse(kind, mended))

    def _parse(self, kind: type[Body], body: bytes) -> Body:
        try:
            parsed = kind.model_validate_json(body)
        except ValidationError as error:
            raise explain(error) from None
        if self.rejects_unknown_fields and (name := next(unknown_fields(parsed), None)):
            raise RequestError(f"{name[:_MAX_NAME]}: unknown field", param=name[:_MAX_NAME])
        return parsed

    def _check_values(self, body: bytes) -> None:
        num_fields = 0

        def name_of(kind: type, text: str) -> _Name:
            nonlocal num_fields
            num_fields += 1
            if num_fields > _MAX_FIELDS:
                raise RequestError(f"the body has more than {_MAX_FIELDS} fields")
            return _Name(text)

        try:
            fields = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=name_of)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None
        values = dict[str, list[bytes]]()  # several of a repeated field, of which the parser takes the last
        for field, raw in fields.items():
            values.setdefault(field.text, []).append(bytes(raw).strip())
        for name, given in values.items():
            value = b",".join(given)
            if name == "prompt" and all(one.startswith(b'"') for one in given):
                continue  # one string; its length is checked later, against the model's context
            ids = max(_MAX_PROMPT_VALUES, self.max_context())
            limit = {"prompt": ids, "tokens": ids, **_MAX_VALUES_OF}.get(name)
            most = {"tools": _MAX_TOOLS_BYTES}.get(name, _MAX_FIELD_BYTES if limit is None else len(value))
            if len(value) > most:
                raise RequestError(f"{name[:64]}: at most {most} bytes are accepted", param=name[:64])
            if _has_more_values(value, limit or _MAX_VALUES):
                text = f"{name[:64]}: at most {limit or _MAX_VALUES} values are accepted"
                raise (ContextLengthExceeded if limit == ids else RequestError)(text, param=name[:64])


class _Name:
    """One occurrence of a field name. Not a dataclass, because msgspec would decode an object into one."""

    def __init__(self, text: str) -> None:
        self.text = text


def _mended(body: bytes) -> bytes:
    """Remove a byte order mark, and replace lone surrogates by U+FFFD, as JavaScript's TextEncoder does.

    A client that cuts a text between the halves of a surrogate pair would send it again with every later turn. Only
    texts change: a lone surrogate in another field, such as a schema, is left for the parser to reject.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    mended = _with_surrogates_as(rb"\ufffd", body)
    if mended == body:
        return body
    try:
        fields, marked = (
            msgspec.json.decode(one, type=dict[str, msgspec.Raw])
            for one in (mended, _with_surrogates_as(rb"\ufffc", body))
        )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return mended  # not JSON, which the parser reports
    are_texts = fields.keys() == marked.keys() and all(
        name in _TEXTS or bytes(value) == bytes(marked[name]) for name, value in fields.items()
    )
    return mended if are_texts else body


def _with_surrogates_as(escape: bytes, body: bytes) -> bytes:
    return _SURROGATES.sub(lambda match: escape if match[1] else match[0], body)


def _counted(body: bytearray) -> int:
    """Return the number of bytes that count against the memory limit."""
    return len(body) if len(body) > _SMALL else 0


def _has_more_values(value: bytes, limit: int) -> bool:
    """Return whether there are more than 2 * limit strings, or more than `limit` values between brackets."""
    # A cheap lower bound on the number of strings: a closing quote may look escaped, an opening one may not.
    if value.count(b'"') - value.count(b'\\"') > 2 * limit:
        return True
    bare = _STRING.sub(b"", value)
    return sum(bare.count(mark) for mark in (b",", b"[", b"{")) > limit


class ByteBudget:
    """Counts bytes held. Limits their total, and each owner to a quarter of it. Bound to an event loop."""

    def __init__(self, max_bytes: int, name: str) -> None:
        """name: plural name of the values, for the error message."""
        self._max_bytes = max_bytes
        self._name = name
        self._held: Counter[str] = Counter()  # by owner; the empty owner has no limit of its own

    def add(self, owner: str, num_bytes: int) -> None:
        """Add bytes to an owner's count; a negative number releases them."""
        self._held[owner] += num_bytes
        if not self._held[owner]:
            del self._held[owner]

    def check(self, owner: str) -> None:
        """Raise CapacityError if the budget is exceeded."""
        if self._held.total() > self._max_bytes or (owner and 4 * self._held[owner] > self._max_bytes):
            raise CapacityError(f"too many large {self._name} are being read; retry", retry_after_s=1.0)

    @contextmanager
    def reserved(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Hold bytes for the duration of the block. Raises CapacityError before it."""
        self.add(owner, num_bytes)
        try:
            self.check(owner)
            yield
        finally:
            self.add(owner, -num_bytes)


def encodings_of(headers: Iterable[str]) -> list[str]:
    """Return the encodings of a body in the order in which they were applied, without `identity`.

    headers: values of all Content-Encoding headers. Raises UnsupportedEncoding.
    """
    named = [name.strip().lower() for value in headers for name in value.split(",")]
    encodings = [name for name in named if name not in ("", "identity")]
    for name in encodings:
        if name not in _READERS:
            raise UnsupportedEncoding(
                f"Content-Encoding: {name[:64]!r} is not supported; use {SUPPORTED}, or send the body as it is"
            )
    if len(encodings) > _MAX_ENCODINGS:
        raise UnsupportedEncoding(
            f"Content-Encoding: names {len(encodings)} encodings; at most {_MAX_ENCODINGS} are supported"
        )
    return encodings


def decoded(body: bytes, encodings: list[str], *, max_bytes: int) -> bytes:
    """Undo the encodings, the last one first; no result grows beyond `max_bytes`.

    Raises RequestTooLarge, and RequestError for a body that is not in the named encoding.
    """
    for name in reversed(encodings):
        try:
            body = _READERS[name](body, max_bytes + 1)
        except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
            raise RequestError(f"the body is not valid {name}, which its Content-Encoding names: {error}") from None
        if len(body) > max_bytes:
            raise RequestTooLarge(f"the body is larger than {max_bytes} bytes without its {name} encoding")
    return body


def _read_gzip(body: bytes, num_bytes: int) -> bytes:
    with gzip.GzipFile(fileobj=BytesIO(body)) as file:
        return file.read(num_bytes)


def _read_zstd(body: bytes, num_bytes: int) -> bytes:
    with zstd.ZstdFile(BytesIO(body), options=_ZSTD_BOUNDS) as file:
        return file.read(num_bytes)


def _read_deflate(body: bytes, num_bytes: int) -> bytes:
    """Read zlib's format, which the standard names, or raw deflate, which some clients send instead."""
    has_header = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0
    decoder = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    result = decoder.decompress(body, num_bytes)
    if len(result) < num_bytes and not decoder.eof:
        raise EOFError("the body ends before its last block")
    if decoder.unused_data:
        raise zlib.error("more bytes follow the last block")
    return result


_READERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _read_gzip,
    "x-gzip": _read_gzip,
    "deflate": _read_deflate,
    "zstd": _read_zstd,
}

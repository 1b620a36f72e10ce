"""Content-Encoding of request bodies: gzip, deflate and zstd, decoded within a limit."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO

from core.types.errors import RequestError, RequestTooLarge, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUPPORTED = "gzip, deflate, zstd"
_MAX_ENCODINGS = 4  # applied to one body, one after the other
# RFC 9659 limits the window of this content encoding to 8 MB.
_ZSTD_BOUNDS: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: 23}


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

    Raises RequestTooLarge, and RequestError for a body that is not what its encoding names.
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

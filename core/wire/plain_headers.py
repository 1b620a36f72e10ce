"""Headers of HTTP/2 in HPACK's plainest forms (RFC 7541), as gRPC writes them to who keeps no table of them."""

from __future__ import annotations

from collections.abc import Iterable

_PREFIX_7, _PREFIX_6, _PREFIX_5, _PREFIX_4 = 0x7F, 0x3F, 0x1F, 0x0F
_MAX_SHIFT = 28  # of a number: more bits are no length of ours
# Of the static table (appendix A) what a response of gRPC has; what else it takes from there is of no interest.
_STATIC = {8: (b":status", b"200"), 9: (b":status", b"204"), 10: (b":status", b"206"), 11: (b":status", b"304"),
           12: (b":status", b"400"), 13: (b":status", b"404"), 14: (b":status", b"500")}  # fmt: skip
_UNKNOWN = (b"", b"")


class HeadersUnread(ValueError):
    """They are not in these forms."""


def plain_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """As literals that nobody is to remember."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def read_headers(block: bytes) -> list[tuple[str, str]]:
    """Of a sender that was told to keep no table, and writes its texts as they are. Raises HeadersUnread."""
    headers, at = [], 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _number(block, at, _PREFIX_7)
                name, value = _STATIC.get(index, _UNKNOWN)
            elif first & 0xE0 == 0x20:  # how large a table it keeps
                _, at = _number(block, at, _PREFIX_5)
                continue
            else:
                index, at = _number(block, at, _PREFIX_6 if first & 0x40 else _PREFIX_4)
                name, at = (_STATIC.get(index, _UNKNOWN)[0], at) if index else _read_text(block, at)
                value, at = _read_text(block, at)
            headers.append((name.decode("latin-1"), value.decode("latin-1")))
    except IndexError:
        raise HeadersUnread("headers end in the middle") from None
    return headers


def _text(text: str) -> bytes:
    written = text.encode()
    left = len(written) - _PREFIX_7
    if left < 0:
        return bytes([len(written)]) + written
    size = bytearray([_PREFIX_7])
    while left >= 0x80:
        size.append(0x80 | left & 0x7F)
        left >>= 7
    return bytes([*size, left]) + written


def _read_text(block: bytes, at: int) -> tuple[bytes, int]:
    if block[at] & 0x80:
        raise HeadersUnread("a text is in Huffman's code")
    size, at = _number(block, at, _PREFIX_7)
    if at + size > len(block):
        raise HeadersUnread("a text ends in the middle")
    return block[at : at + size], at + size


def _number(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """Section 5.1; with where it ends."""
    number = block[at] & prefix
    at += 1
    if number < prefix:
        return number, at
    for shift in range(0, _MAX_SHIFT, 7):
        number += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return number, at
    raise HeadersUnread("a number is too large")

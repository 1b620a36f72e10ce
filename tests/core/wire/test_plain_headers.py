"""Headers in HPACK's plainest forms."""

from __future__ import annotations

import pytest

from core.wire.plain_headers import HeadersUnread, plain_headers, read_headers

_HEADERS = [
    (":path", "/a/B"),
    ("te", "trailers"),
    ("empty", ""),
    *((str(size), "y" * size) for size in (126, 127, 254, 255, 20_000)),
]


def test_what_is_written_is_read() -> None:
    assert read_headers(plain_headers(_HEADERS)) == _HEADERS


def test_other_forms_are_read() -> None:
    """RFC 7541, appendix C: an indexed field, a name of the table, one that is to be remembered, one that never is."""
    assert read_headers(b"\x88") == [(":status", "200")]
    assert read_headers(b"\x48\x03302") == [(":status", "302")]
    assert read_headers(b"\x20\x3f\xe1\x1f\x40\x0acustom-key\x0dcustom-header") == [("custom-key", "custom-header")]
    assert read_headers(b"\x10\x08password\x06secret") == [("password", "secret")]
    assert read_headers(b"\x00\x01x\x7f\x80\x01" + 255 * b"y") == [("x", 255 * "y")]


@pytest.mark.parametrize(
    "block", [b"\x00", b"\x00\x01", b"\x00\x01x\x02y", b"\x00\x81x\x01y", b"\x7f", b"\x00\x7f" + 9 * b"\xff" + b"\x01"]
)
def test_what_is_in_none_of_them_is_refused(block: bytes) -> None:
    with pytest.raises(HeadersUnread):
        read_headers(block)

"""A multipart body is read the same however it is cut, and what is no such body is refused within bounds."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.errors import RequestError
from frontend.http.multipart import Field, FileBegin, MultipartReader

_TYPE = 'multipart/form-data; charset=x; boundary="b-1"'


def fed(content_type: str, body: bytes, *, size: int) -> tuple[dict[str, str], dict[str, bytes], bool]:
    """Fields, files, and whether it was over, fed by so many bytes."""
    reader = MultipartReader(content_type)
    fields, files, last = dict[str, str](), dict[str, bytes](), ""
    for begin in range(0, len(body), size):
        for found in reader.feed(body[begin : begin + size]):
            match found:
                case Field(name=name, value=value):
                    fields[name] = value
                case FileBegin(name=name, filename=filename):
                    last = f"{name}:{filename}"
                    files[last] = b""
                case bytes():
                    files[last] += found
    return fields, files, reader.is_over


@given(content=st.lists(st.sampled_from([b"\r\n", b"--b-1", b"-", b"\n", b"x", b"\r\n--b-"]), max_size=12))
def test_however_it_is_cut(content: list[bytes]) -> None:
    whole = b"".join(content)
    if b"\r\n--b-1" in b"\r\n" + whole:
        return  # a client takes another boundary then
    body = (
        b'--b-1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b-1\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; name="file"; filename="a \\"b\\".jsonl"'
        b"\r\n\r\n" + whole + b"\r\n--b-1--\r\nwhat comes after does not count"
    )
    for size in (1, 2, 3, 7, len(body)):
        assert fed(_TYPE, body, size=size) == ({"purpose": "batch"}, {'file:a "b".jsonl': whole}, True)


def test_what_httpx_sends() -> None:
    request = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": ("ä.jsonl", b"\r\n{}\r\n")})
    body = request.read()
    fields, files, is_over = fed(request.headers["content-type"], body, size=5)
    assert (fields, list(files.values()), is_over) == ({"purpose": "batch"}, [b"\r\n{}\r\n"], True)
    assert not fed(request.headers["content-type"], body[:-4], size=5)[2]


def test_what_comes_after_the_end_is_not_kept() -> None:
    reader = MultipartReader(_TYPE)
    assert not list(reader.feed(b"--b-1--")) and reader.is_over
    for _ in range(10):
        assert not list(reader.feed(b"x" * 1000)) and not reader.num_held


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        (f"multipart/form-data; boundary={'b' * 71}", b""),
        (_TYPE, b"--b-1\r\nX: y\r\n\r\n"),
        (_TYPE, b"--b-1\r\nX: " + b"y" * 5000),
        (_TYPE, b'--b-1\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"v" * 2000),
        (_TYPE, b'--b-1\r\nContent-Disposition: form-data; name="a"\r\n\r\nv\r\n' * 20),
    ],
)
def test_what_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(RequestError):
        fed(content_type, body, size=100)

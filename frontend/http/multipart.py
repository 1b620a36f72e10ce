"""A multipart/form-data body (RFC 7578) as it comes: fields whole, for they are short, and the file piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from core.types.errors import RequestError

_MAX_PARTS = 16
_MAX_HEADER = 4096  # bytes, of a part
_MAX_FIELD = 1024
_MAX_BOUNDARY = 70
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*\bboundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_WORD = re.compile(r'\b(name|filename)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Field:
    """A field with its value."""

    name: str
    value: str


@dataclass(frozen=True)
class FileBegin:
    """What comes next is the content of this one."""

    name: str
    filename: str


class MultipartReader:
    """Of one body. Holds a boundary's length and a header at most, beside what it is fed."""

    def __init__(self, content_type: str) -> None:
        """Raises RequestError."""
        found = _BOUNDARY.match(content_type)
        boundary = (found[1] or found[2]) if found else ""
        if not boundary or len(boundary) > _MAX_BOUNDARY:
            raise RequestError("send multipart/form-data, with the fields purpose and file")
        self._mark = b"\r\n--" + boundary.encode()
        self._held = b"\r\n"  # the first mark has no line before it
        self._is_in: FileBegin | str | None = None  # a file, or a field by its name; None: before the first mark
        self._value = b""
        self._num_parts = 0
        self.is_over = False

    @property
    def num_held(self) -> int:
        """Bytes, of which it is not known yet what they are."""
        return len(self._held)

    def feed(self, piece: bytes) -> Iterator[Field | FileBegin | bytes]:
        """Fields, the beginnings of files, and what is in these. Raises RequestError."""
        if self.is_over:
            return  # what comes after does not count, and is not kept
        self._held += piece
        while not self.is_over:
            at = self._held.find(self._mark)
            content = self._held[: at if at >= 0 else max(0, len(self._held) - len(self._mark))]
            yield from self._content(content)
            self._held = self._held[len(content) :]
            if at < 0:
                return
            ending = self._held[len(self._mark) :][:2]
            if len(ending) < 2:
                return
            if ending == b"--":
                self.is_over, self._held = True, b""
                yield from self._part_ends()
                return
            end = self._held.find(b"\r\n\r\n", len(self._mark))
            if end < 0:
                if len(self._held) > _MAX_HEADER + len(self._mark):
                    raise _broken("the header of a part is too long")
                return
            yield from self._part_ends()
            yield from self._part_begins(self._held[len(self._mark) : end])
            self._held = self._held[end + 4 :]

    def _content(self, content: bytes) -> Iterator[bytes]:
        if isinstance(self._is_in, FileBegin):
            if content:
                yield content
        elif self._is_in is not None:
            self._value += content
            if len(self._value) > _MAX_FIELD:
                raise _broken(f"{self._is_in[:64]}: at most {_MAX_FIELD} bytes are taken")

    def _part_begins(self, header: bytes) -> Iterator[FileBegin]:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _broken(f"at most {_MAX_PARTS} parts are taken")
        for line in header.decode(errors="replace").split("\r\n"):
            kind, _, rest = line.partition(":")
            if kind.strip().lower() == "content-disposition":
                words = {word: re.sub(r"\\(.)", r"\1", value) for word, value in _WORD.findall(rest)}
                if "filename" in words:
                    self._is_in = FileBegin(words.get("name", ""), words["filename"])
                    yield self._is_in
                else:
                    self._is_in = words.get("name", "")
                return
        raise _broken("a part has no Content-Disposition")

    def _part_ends(self) -> Iterator[Field]:
        if isinstance(self._is_in, str):
            yield Field(self._is_in, self._value.decode(errors="replace"))
        self._is_in, self._value = None, b""


def _broken(why: str) -> RequestError:
    return RequestError(f"the body is no multipart/form-data that is taken here: {why}")

"""The lines of an input file: cut out of its parts as they come, and each looked at before any is answered."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from router.batches.bounds import MAX_CUSTOM_ID, MAX_LINE_BYTES
from router.batches.records import BatchProblem

MAX_PROBLEMS = 100  # that are told of one file
_TOLD = 64  # characters of what a client wrote, told again


@dataclass(frozen=True, kw_only=True)
class NumberedLine:
    number: int  # in its file, from 1, blank ones among them
    text: bytes


@dataclass(frozen=True, kw_only=True)
class AskedLine:
    """A request of a batch."""

    number: int
    custom_id: str
    body: bytes  # JSON


async def lines_of(parts: AsyncIterator[bytes]) -> AsyncIterator[NumberedLine]:
    """Those that are not blank, without the mark by which some editors begin a file.

    One that is too long comes cut off, longer than MAX_LINE_BYTES by one, and is the last.
    """
    rest, number = b"", 0
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        if whole and not number:
            whole[0] = whole[0].removeprefix(BOM_UTF8)
        for text in whole:
            number += 1
            if text.strip():
                yield NumberedLine(number=number, text=text[: MAX_LINE_BYTES + 1])
            if len(text) > MAX_LINE_BYTES:
                return
        if len(rest) > MAX_LINE_BYTES:
            break
    if not number:
        rest = rest.removeprefix(BOM_UTF8)
    if rest.strip():
        yield NumberedLine(number=number + 1, text=rest[: MAX_LINE_BYTES + 1])


def read_line(line: NumberedLine) -> AskedLine:
    """One that was found to be right."""
    fields = msgspec.json.decode(line.text, type=_Fields)
    return AskedLine(number=line.number, custom_id=str(fields.custom_id), body=bytes(fields.body))


@dataclass(kw_only=True)
class LineCheck:
    """Of one file, line by line in its order."""

    endpoint: str
    models: Sequence[str]  # that are served, or should be; the first is meant where a line names none
    max_lines: int
    num_lines: int = 0
    model: str = ""  # of the first line that is right
    problems: list[BatchProblem] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)  # custom_id -> line

    @property
    def is_over(self) -> bool:
        """What comes need not be looked at."""
        return len(self.problems) >= MAX_PROBLEMS or self.num_lines > self.max_lines

    def add(self, line: NumberedLine) -> None:
        self.num_lines += 1
        if self.num_lines > self.max_lines:
            self._tell("too_many_tasks", f"a batch has at most {self.max_lines} lines", None, None)
        elif problem := self._problem(line):
            code, param, text = problem
            self._tell(code, text, param, line.number)

    def end(self) -> None:
        if not self.num_lines:
            self._tell("empty_file", "the input file has no line", None, None)

    def _problem(self, line: NumberedLine) -> tuple[str, str | None, str] | None:
        """The first one: code, param, text."""
        if len(line.text) > MAX_LINE_BYTES:
            return "line_too_long", None, f"a line has at most {MAX_LINE_BYTES} bytes"
        try:
            fields = msgspec.json.decode(line.text, type=_Fields)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return "invalid_json_line", None, f"this line is not a JSON object: {error}"
        if not isinstance(fields.custom_id, str) or not 0 < len(fields.custom_id) <= MAX_CUSTOM_ID:
            code = "missing_required_parameter" if fields.custom_id is None else "invalid_custom_id"
            return code, "custom_id", f"custom_id: must be a text of 1 to {MAX_CUSTOM_ID} characters"
        first = self._seen.setdefault(fields.custom_id, line.number)
        if first != line.number:
            told = fields.custom_id[:_TOLD]
            return "duplicate_custom_id", "custom_id", f"custom_id: {told!r} is that of line {first}, too"
        if fields.method != "POST":
            return "invalid_method", "method", "method: must be POST"
        if fields.url != self.endpoint:
            return "invalid_url", "url", f"url: must be {self.endpoint}, the endpoint of this batch"
        return self._body_problem(fields.body)

    def _body_problem(self, raw: msgspec.Raw) -> tuple[str, str, str] | None:
        try:
            body = msgspec.json.decode(raw, type=_Body) if raw else None
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            body = None
        if body is None:
            return "invalid_body", "body", "body: must be an object, the request itself"
        if body.model is not None and body.model not in self.models:
            *others, last = map(repr, self.models)
            served = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            return "model_not_found", "body.model", f"body.model: {served} served here, not {str(body.model)[:_TOLD]!r}"
        if not self.model:
            self.model = str(body.model or self.models[0])
        if body.stream:
            return "invalid_value", "body.stream", "body.stream: a batch has whole answers; leave it out"
        return None

    def _tell(self, code: str, message: str, param: str | None, line: int | None) -> None:
        self.problems.append(BatchProblem(code=code, message=message, param=param, line=line))


class _Fields(msgspec.Struct):
    custom_id: object = None
    method: object = None
    url: object = None
    body: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: object = None
    stream: object = None

"""Kinds of fields in request bodies of all APIs: supported, ignored, or known but unsupported.

Null always means the same as omitting the field. Unknown fields are kept apart; the deployment's `unknown_fields`
setting decides whether they are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from core.types.errors import RequestError, UnsupportedField

UNSUPPORTED = "unsupported"  # type of a pydantic error
_MAX_NAMED, _MAX_NAME = 32, 64  # fields in a header, and characters of each
_MAX_PATH = 128
_UNSEEN = re.compile(r"[^A-Za-z0-9_.\-\[\]]")  # replaced in the header, because names come from the client


@dataclass(frozen=True)
class Only:
    """Validator of an unsupported field. neutral: values without effect, which are accepted. instead: path of a
    supported field with the same purpose."""

    neutral: tuple[Any, ...]
    instead: str = ""

    def __call__(self, value: Any) -> Any:
        if value is None or value in self.neutral:
            return value
        problem = "is not supported; use {instead}" if self.instead else "is not supported"
        raise PydanticCustomError(UNSUPPORTED, problem, {"instead": self.instead})


def whole(value: Any) -> Any:
    """Return a float without fraction as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(whole)]  # 40.0 as well: some JSON libraries write all numbers as floats
Ignored = Any  # accepted; no effect on the answer
EMPTY: tuple[Any, ...] = ([], {})
Unsupported = Annotated[Any, AfterValidator(Only(EMPTY))]


class OpenAIObject(BaseModel):
    """Body, or an object inside one. Also used for Anthropic's API."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def skipped(self) -> str:
        """Kind of an object that is skipped as a whole, for the header; empty for others."""
        return ""


def unknown_fields(given: OpenAIObject, path: str = "") -> Iterator[str]:
    """Yield the paths of unknown fields, such as messages[0].mood, and of skipped objects, such as tools[0].custom."""
    if given.skipped:
        yield f"{path}{given.skipped}"
        return
    yield from (f"{path}{name}" for name, value in (given.model_extra or {}).items() if value is not None)
    for name in given.model_fields_set & type(given).model_fields.keys():
        value = getattr(given, name)
        if isinstance(value, OpenAIObject):
            yield from unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, OpenAIObject):
                    yield from unknown_fields(one, f"{path}{name}[{number}].")


def ignored_header(body: OpenAIObject) -> dict[str, str]:
    """Return the header that lists the unknown fields."""
    names = [_UNSEEN.sub("?", name[:_MAX_NAME]) for name in islice(unknown_fields(body), _MAX_NAMED)]
    return {"x-ignored-fields": ", ".join(names)} if names else {}


def also_ignored(header: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Add names to the header of `ignored_header`."""
    listed = [*header.values(), *(_UNSEEN.sub("?", name[:_MAX_PATH]) for name in names)]
    return {"x-ignored-fields": ", ".join(listed)} if listed else {}


def explain(error: ValidationError) -> RequestError:
    """Return the first problem of a body, with its path, such as messages[0].content."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    path = path[:_MAX_PATH]  # the client's own field names have no length limit
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    kind = UnsupportedField if first["type"] == UNSUPPORTED else RequestError
    return kind(f"{path}: {message}" if path else f"the body {message}", param=path or None)

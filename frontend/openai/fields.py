"""What a field of a body over HTTP may be: taken, taken and ignored, or known and refused, in every API.

Null stands for a field that was left out, everywhere. A field that nobody knows is told apart from these, and what
becomes of it is the door's to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from core.types.errors import RequestError, UnsupportedField

UNSUPPORTED = "unsupported"  # the type of a validation error
_MAX_NAMED, _MAX_NAME = 32, 64  # fields in a header, and characters of each
_MAX_PATH = 128
_UNSEEN = re.compile(r"[^A-Za-z0-9_.\-\[\]]")  # what a client writes goes into a header


@dataclass(frozen=True)
class Only:
    """Validates a field that we know and cannot serve: what it may be without changing the answer, and which field of
    ours, by its path, asks for the same."""

    neutral: tuple[Any, ...]
    instead: str = ""

    def __call__(self, value: Any) -> Any:
        if value is not None and value not in self.neutral:
            if self.instead:
                raise PydanticCustomError(
                    UNSUPPORTED, "is not supported here; use {instead}", {"instead": self.instead}
                )
            raise PydanticCustomError(UNSUPPORTED, "is not supported here")
        return value


Ignored = Any  # changes nothing about the answer
EMPTY: tuple[Any, ...] = ([], {})
Unsupported = Annotated[Any, AfterValidator(Only(EMPTY))]


class OpenAIObject(BaseModel):
    """A body, or an object inside of one; of Anthropic's API, too."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def unknown_fields(given: OpenAIObject, path: str = "") -> Iterator[str]:
    """The paths of those that it has, such as messages[0].mood."""
    yield from (f"{path}{name}" for name, value in (given.model_extra or {}).items() if value is not None)
    for name in given.model_fields_set:
        value = getattr(given, name)
        if isinstance(value, OpenAIObject):
            yield from unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, OpenAIObject):
                    yield from unknown_fields(one, f"{path}{name}[{number}].")


def ignored_header(body: OpenAIObject) -> dict[str, str]:
    """The header that names fields which nobody knows here."""
    names = [_UNSEEN.sub("?", name[:_MAX_NAME]) for name in islice(unknown_fields(body), _MAX_NAMED)]
    return {"x-ignored-fields": ", ".join(names)} if names else {}


def explain(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body, by its path, such as messages[0].content."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    path = path[:_MAX_PATH]  # a client's own field may have any name
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    kind = UnsupportedField if first["type"] == UNSUPPORTED else RequestError
    return kind(f"{path}: {message}" if path else f"the body {message}", param=path or None)

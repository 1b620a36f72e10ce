"""instructor: answers as pydantic models, whole and partial, with retries of invalid ones."""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, field_validator

_ASKED: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Is Rome a capital?"}],
    "temperature": 0,
}
_CLIENT = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # otherwise a model may add fields until the context is full
    name: Literal["Paris", "Rome"]
    is_capital: bool


def _check(mode: instructor.Mode, asked: dict[str, Any]) -> None:
    client = instructor.from_openai(_CLIENT, mode=mode).chat.completions
    assert isinstance(client.create(response_model=City, max_retries=0, **asked), City)
    *before, last = client.create_partial(response_model=City, max_retries=0, **asked)
    assert City(name=last.name, is_capital=last.is_capital)
    assert before and before[0].is_capital is None, "it came in pieces"


def _check_retries(mode: instructor.Mode) -> None:
    seen: list[str] = []

    class Rejected(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: Literal["Paris", "Rome"]

        @field_validator("name")
        @classmethod
        def not_at_first(cls, name: str) -> str:
            seen.append(name)
            if len(seen) == 1:
                raise ValueError("say that again")
            return name

    client = instructor.from_openai(_CLIENT, mode=mode).chat.completions
    client.create(response_model=Rejected, max_retries=2, max_tokens=100, **_ASKED)
    assert len(seen) == 2


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    _check(mode, {**_ASKED, "max_tokens": 100})
_check(instructor.Mode.RESPONSES_TOOLS, {**_ASKED, "max_output_tokens": 100})
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    _check_retries(mode)

"""A conversation, and what the model's template is to make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from core.types.errors import RequestError
from frontend.chat.chat_template import Message


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Messages for the model's template, with what the client sets in it besides."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    effort_field: str = "reasoning_effort"  # what the client calls it
    thinks: bool | None = None  # True: it is to think before it answers; None: as its template has it
    tools: tuple[Mapping[str, Any], ...] = ()  # that the model may call, as OpenAI describes them
    is_parallel: bool = True  # False: an answer ends after its first call
    forced: str | None = None  # the answer is bound to be a call of this tool; "": of any. None: it is not
    is_continued: bool = False  # the answer goes on with the last message
    opens_answer: bool = True  # the prompt ends where an answer begins

    @cached_property
    def num_chars(self) -> int:
        """Of all that a template could print."""
        told = sum(sum(map(len, _texts(message))) for message in self.messages)
        told += len(repr(self.variables)) if self.variables else 0
        return told + (len(repr(self.tools)) if self.tools else 0)

    @cached_property
    def num_calls(self) -> int:
        """In all messages."""
        return sum(len(message.get("tool_calls", ())) for message in self.messages)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """By tool, the JSON schema of its arguments."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def _texts(message: Message) -> Iterator[str]:
    for value in message.values():
        if isinstance(value, str):
            yield value
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield call["function"]["arguments"]


def opens_answer(asked: bool | None, *, is_continued: bool) -> bool:
    """True if a prompt ends where an answer begins. asked: by the client. Raises RequestError."""
    if is_continued and asked:
        text = "continue_final_message: not together with add_generation_prompt, which begins an answer"
        raise RequestError(text, param="continue_final_message")
    return not is_continued if asked is None else asked

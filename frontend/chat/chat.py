"""Conversation with its template options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from core.types.errors import RequestError
from frontend.chat.history import Message


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Messages for the chat template, with the client's options."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    effort_field: str = "reasoning_effort"  # the client's name of the field
    thinks: bool | None = None  # whether to think before answering; None: as the template decides
    thinks_field: str = "thinking"  # the client's name of the field
    paths: tuple[str, ...] = ()  # names of the messages in the client's body; empty: messages[0] and so on
    tools: tuple[Mapping[str, Any], ...] = ()  # tools that the model may call, in OpenAI's form
    is_parallel: bool = True  # False: an answer ends after its first call
    forced: str | None = None  # the tool that must be called; "": any; None: calls are optional
    is_continued: bool = False  # the answer continues the last message
    opens_answer: bool = True  # the prompt ends with the beginning of an answer

    @cached_property
    def num_chars(self) -> int:
        """Number of characters that a template could print."""
        num_chars = sum(sum(map(len, _texts(message))) for message in self.messages)
        num_chars += len(repr(self.variables)) if self.variables else 0
        return num_chars + (len(repr(self.tools)) if self.tools else 0)

    @cached_property
    def num_calls(self) -> int:
        return sum(len(message.get("tool_calls", ())) for message in self.messages)

    @property
    def wants_thinking(self) -> bool | None:
        """True if the client turns thinking on, False if off, None if it sets neither."""
        if self.thinks is not None or self.reasoning_effort is None:
            return self.thinks
        return self.reasoning_effort != "none"

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """JSON schema of the arguments, by tool name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def _texts(message: Message) -> Iterator[str]:
    for value in message.values():
        if isinstance(value, str):
            yield value
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield call["function"]["arguments"]


def opens_answer(add_generation_prompt: bool | None, *, is_continued: bool) -> bool:
    """Return whether the prompt ends where an answer begins. Raises RequestError."""
    if is_continued and add_generation_prompt:
        problem = "cannot be combined with add_generation_prompt, which begins a new answer"
        raise RequestError.at("continue_final_message", problem)
    return not is_continued if add_generation_prompt is None else add_generation_prompt

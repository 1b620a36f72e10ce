"""Messages and tools of Anthropic's Messages API, and their conversion to those of a chat (openai.messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from core.types.errors import RequestError
from frontend.openai.fields import UNSUPPORTED, Ignored, OpenAIObject
from frontend.openai.messages import (
    MAX_CALLS,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    CallInHistory,
    ChatMessage,
    FunctionAsTool,
    FunctionName,
    TextPart,
    ToolGiven,
    as_parts,
)
from frontend.text.completion_request import MAX_MESSAGES

_BLOCKS_OF = {  # by role
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_BLOCKS = frozenset(type for types in _BLOCKS_OF.values() for type in types)
_NEEDED = {"text": "text", "thinking": "thinking", "tool_use": "input", "tool_result": "tool_use_id"}


@dataclass(frozen=True)
class _Known:
    """Validator that rejects other values of `type` by name."""

    noun: str
    types: frozenset[str]

    def __call__(self, value: str | None) -> str | None:
        if value is not None and value not in self.types:
            context = {"noun": self.noun, "type": repr(value[:64])}
            raise PydanticCustomError(UNSUPPORTED, "{noun} of type {type} are not supported", context)
        return value


class TextBlock(OpenAIObject):
    type: Annotated[str, AfterValidator(_Known("blocks", frozenset(["text"])))]
    text: str
    citations: Ignored = None
    cache_control: Ignored = None


Texts = Annotated[Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)], BeforeValidator(as_parts)]


class ContentBlock(OpenAIObject):
    """Part of a message, with the fields of its type."""

    type: Annotated[str, AfterValidator(_Known("blocks", _BLOCKS))]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Texts | None = None
    # Templates have no field for is_error, so the text has to say it. Signatures and redacted data are not ours.
    is_error: Ignored = None
    signature: Ignored = None
    data: Ignored = None
    citations: Ignored = None
    caller: Ignored = None
    cache_control: Ignored = None


class AnthropicMessage(OpenAIObject):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_PARTS)], BeforeValidator(as_parts)
    ]

    def turns(self, path: str) -> Iterator[_Turn]:
        """Yield the message's turns, in order; each tool result is a turn of its own. Raises RequestError."""
        turn = _Turn(self.role)
        for number, block in enumerate(self.content):
            _check(block, self.role, f"{path}.content[{number}]")
            if block.type == "tool_result":
                if turn.parts:
                    yield turn
                    turn = _Turn(self.role)
                yield _Turn("tool", parts=[_part(one.text) for one in block.content or ()], answered=block.tool_use_id)
            else:
                turn.add(block)
        if len(turn.calls) > MAX_CALLS:
            text = f"{path}.content: has {len(turn.calls)} tool_use blocks; at most {MAX_CALLS} are accepted"
            raise RequestError(text, param=f"{path}.content")
        if turn.has_content or not self.content:
            yield turn


AnthropicMessages = Annotated[list[AnthropicMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def chat_messages(system: Sequence[TextBlock] | None, messages: Sequence[AnthropicMessage]) -> list[ChatMessage]:
    """Convert a conversation; consecutive messages of one role are merged. Raises RequestError."""
    turns = [_Turn("system", parts=[_part(one.text) for one in system])] if system else []
    for number, message in enumerate(messages):
        for turn in message.turns(f"messages[{number}]"):
            if turns and turns[-1].role == turn.role != "tool":
                turns[-1].join(turn)
            else:
                turns.append(turn)
    if turns and turns[-1].calls:
        raise RequestError("messages: a tool_use must be followed by its tool_result", param="messages")
    return [turn.message() for turn in turns]


@dataclass
class _Turn:
    """Chat message under construction."""

    role: str
    parts: list[TextPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[CallInHistory] = field(default_factory=list)
    answered: str | None = None  # id of the answered call

    @property
    def has_content(self) -> bool:
        return bool(self.parts or self.thoughts or self.calls)

    def add(self, block: ContentBlock) -> None:
        if block.type == "text":
            self.parts.append(_part(block.text))
        elif block.type == "thinking":
            self.thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            function = CalledFunction(name=block.name or "", arguments=json.dumps(block.input, ensure_ascii=False))
            self.calls.append(CallInHistory(id=block.id, function=function))

    def join(self, more: _Turn) -> None:
        self.parts += more.parts
        self.thoughts += more.thoughts
        self.calls += more.calls

    def message(self) -> ChatMessage:
        return ChatMessage.model_construct(
            role=self.role,
            content=None if self.calls and not self.parts else self.parts,
            tool_calls=self.calls or None,
            tool_call_id=self.answered,
            reasoning_content="\n".join(self.thoughts) if self.thoughts else None,
        )


class AnthropicTool(OpenAIObject):
    """Tool that the model may call; the client runs it."""

    type: Annotated[str | None, AfterValidator(_Known("tools", frozenset(["custom"])))] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None

    def given(self) -> ToolGiven:
        function = FunctionAsTool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return ToolGiven(type="function", function=function)


AnthropicTools = Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class AnthropicToolChoice(OpenAIObject):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def forced(self) -> str | None:
        """Return the name of the tool that must be called, "" for any, or None if no call is required. Raises
        RequestError."""
        if self.type == "tool" and not self.name:
            raise RequestError("tool_choice.name: required for type tool", param="tool_choice.name")
        return {"any": "", "tool": self.name}.get(self.type)


def _check(block: ContentBlock, role: str, path: str) -> None:
    if block.type not in _BLOCKS_OF[role]:
        text = f"{path}.type: {block.type} is not allowed in a message of role {role}"
        raise RequestError(text, param=f"{path}.type")
    needed = _NEEDED.get(block.type)
    for name in (needed, "name" if needed == "input" else None):
        if name and getattr(block, name) is None:
            raise RequestError(f"{path}.{name}: required", param=f"{path}.{name}")


def _part(text: str | None) -> TextPart:
    return TextPart(type="text", text=text or "")

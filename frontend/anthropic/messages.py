"""Messages and tools of Anthropic's Messages API, and their conversion to those of a chat (openai.messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from core.types.errors import RequestError, UnsupportedField
from frontend.openai.fields import Ignored, OpenAIObject
from frontend.openai.messages import (
    MAX_CALLS,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    CallInHistory,
    ChatMessage,
    ContentPart,
    FunctionAsTool,
    FunctionName,
    MessageDraft,
    as_parts,
    placeholder,
)
from frontend.text.completion_request import MAX_MESSAGES


def _blocks(value: Any) -> Any:
    """Return the blocks of a tool's result; a malformed block counts as text."""
    if isinstance(value, dict):
        value = [value]
    parts = as_parts(value)
    return parts and [one if isinstance(one, dict) else {"type": "text", "text": str(one)} for one in parts]


_BLOCKS_OF = {  # by role
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_BLOCKS = frozenset(type for types in _BLOCKS_OF.values() for type in types)
_NEEDED = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
# The first line of Claude Code's `system`. Anthropic's API hides it from the model. It differs in each request, so a
# prompt that kept it would never reuse a cached prefix.
_BILLING = "x-anthropic-billing-header"


class TextBlock(OpenAIObject):
    type: Literal["text"]
    text: str
    citations: Ignored = None
    cache_control: Ignored = None

    @property
    def skipped(self) -> str:
        return _BILLING if self.text.startswith(f"{_BILLING}:") else ""

    @property
    def shown(self) -> str:
        """The text without a billing header."""
        return self.text.partition("\n")[2] if self.skipped else self.text


Texts = Annotated[Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)], BeforeValidator(as_parts)]


class ContentBlock(OpenAIObject):
    """Part of a message, with the fields of its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Annotated[
        Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_PARTS)] | None, BeforeValidator(_blocks)
    ] = None
    source: Any = None
    title: Any = None
    # Chat templates have no field for is_error: the model sees an error only in the result's text. Signatures and
    # redacted data belong to Anthropic's own models.
    is_error: Ignored = None
    signature: Ignored = None
    data: Ignored = None
    citations: Ignored = None
    caller: Ignored = None
    server_name: Ignored = None
    encrypted_content: Ignored = None
    cache_control: Ignored = None

    # Fields that the model reads beside the text: of a document, and of a server tool's result or error, such as the
    # address of a web page or the output of code.
    _facts: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        extra = {} if self.model_extra is None else self.model_extra
        given: dict[str, Any] = {}
        if self.type.endswith(("_result", "_error")):
            given = {"title": self.title, "source": self.source, **extra}
            extra.clear()
        elif self.type == "document":
            given = {"title": self.title, "context": extra.pop("context", None)}
        self._facts = {name: fact for name, fact in given.items() if fact is not None}

    @property
    def kind(self) -> str:
        """Block type. Server tools (`mcp_tool_use`) count as `tool_use`, their results as `tool_result`."""
        return next((kind for kind in ("tool_use", "tool_result") if self.type.endswith(f"_{kind}")), self.type)

    @property
    def skipped(self) -> str:
        """Type of a block that this model cannot read; empty for others."""
        return "" if self.kind in _BLOCKS or self.in_result != placeholder(self.type) else self.type

    @property
    def in_result(self) -> str:
        """The block's text inside a tool's result, or a placeholder."""
        if self.text is not None:
            return self.text
        texts = [*_source_texts(self.source), *(one.in_result for one in self.content or ())]
        if self._facts and (texts or self.type != "document"):
            texts.insert(0, json.dumps(self._facts, ensure_ascii=False))
        return "\n".join(texts) if texts else placeholder(self.type)


def _source_texts(source: Any) -> list[str]:
    """Return the texts of a document's source; none for a file. Images in it become placeholders."""
    match source:
        case {"type": "text"}:
            return [str(source.get("data") or "")]
        case {"type": "content", "content": str(text)}:
            return [text]
        case {"type": "content", "content": [*blocks]}:
            found = [one if isinstance(one, dict) else {"text": one} for one in blocks]
            return [str(one.get("text") or "") if "text" in one else placeholder(str(one.get("type"))) for one in found]
    return []


class AnthropicMessage(OpenAIObject):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_PARTS)], BeforeValidator(as_parts)
    ]

    def turns(self, path: str) -> Iterator[MessageDraft]:
        """Yield the message's turns, in order; each tool result becomes a separate turn. Raises RequestError."""
        turn = MessageDraft(self.role, path)
        for number, block in enumerate(self.content):
            if self.role == "assistant" and block.skipped:
                continue
            place = f"{path}.content[{number}]"
            _check(block, self.role, place)
            if block.kind == "tool_result":
                if turn.has_content:
                    yield turn
                    turn = MessageDraft(self.role, path)
                parts = [_part(one.in_result) for one in block.content or ()]
                yield MessageDraft("tool", place, parts, answered=block.tool_use_id)
            else:
                _add(block, turn)
        if len(turn.calls) > MAX_CALLS:
            problem = f"has {len(turn.calls)} tool_use blocks; at most {MAX_CALLS} are accepted"
            raise RequestError.at(f"{path}.content", problem)
        if turn.has_content or not self.content:
            yield turn


AnthropicMessages = Annotated[list[AnthropicMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def chat_messages(system: Sequence[TextBlock] | None, messages: Sequence[AnthropicMessage]) -> list[ChatMessage]:
    """Convert a conversation; consecutive messages of one role are merged. Raises RequestError."""
    parts = [_part(one.shown) for one in system or () if one.shown]
    turns = [MessageDraft("system", "system", parts)] if parts else []
    for number, message in enumerate(messages):
        for turn in message.turns(f"messages[{number}]"):
            if turns and turns[-1].role == turn.role != "tool":
                turns[-1].parts += turn.parts
                turns[-1].thoughts += turn.thoughts
                turns[-1].calls += turn.calls
            else:
                turns.append(turn)
    if turns and turns[-1].calls:
        raise RequestError.at("messages", "a tool_use must be followed by its tool_result")
    return [turn.message() for turn in turns]


def _add(block: ContentBlock, turn: MessageDraft) -> None:
    if block.type == "text":
        turn.parts.append(_part(block.text))
    elif block.type == "thinking":
        turn.thoughts.append(block.thinking or "")
    elif block.kind == "tool_use":
        function = CalledFunction(name=block.name or "", arguments=block.input)
        turn.calls.append(CallInHistory(id=block.id, function=function))
    elif block.type not in _BLOCKS:
        turn.parts.append(_part(block.in_result))


class AnthropicTool(OpenAIObject):
    """Tool that the model may call; the client runs it."""

    type: str | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None

    @property
    def skipped(self) -> str:
        return "" if self.type in (None, "custom") else str(self.type)

    def function(self) -> FunctionAsTool:
        return FunctionAsTool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


AnthropicTools = Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class AnthropicToolChoice(OpenAIObject):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def forced(self) -> str | None:
        """Return the name of the tool that must be called, "" for any, or None if no call is required. Raises
        RequestError."""
        if self.type == "tool" and not self.name:
            raise RequestError.at("tool_choice.name", "required for type tool")
        return {"any": "", "tool": self.name}.get(self.type)


def _check(block: ContentBlock, role: str, path: str) -> None:
    if block.skipped:
        raise UnsupportedField.at(f"{path}.type", f"blocks of type {block.type[:64]!r} are not supported")
    if block.type not in _BLOCKS:
        return  # has text, such as a document or a search result
    if block.type not in _BLOCKS_OF[role]:
        raise RequestError.at(f"{path}.type", f"{block.type} is not allowed in a message of role {role}")
    if (name := _NEEDED.get(block.type)) and getattr(block, name) is None:
        raise RequestError.at(f"{path}.{name}", "required")


def _part(text: str | None) -> ContentPart:
    return ContentPart(type="text", text=text or "")

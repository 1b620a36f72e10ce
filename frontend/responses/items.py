"""Items of /v1/responses: validation, storage form, and conversion to chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from core.types.errors import RequestError
from frontend.http.json_response import JSON
from frontend.openai.fields import UNSUPPORTED, Ignored, OpenAIObject
from frontend.openai.messages import MAX_PARTS, CalledFunction, CallInHistory, ChatMessage, TextPart
from frontend.text.completion_request import MAX_MESSAGES, MAX_ROLE_CHARS

MAX_ID_CHARS = 128
_MAX_SHOWN = 64  # characters of a client's value in an error message
_ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
REFERENCE = "item_reference"
_NEEDED = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
           "function_call_output": ("call_id", "output"), REFERENCE: ("id",)}  # fmt: skip


@dataclass(frozen=True)
class Kinds:
    """Validator that rejects other values of `type` by name."""

    taken: tuple[str, ...]

    def __call__(self, value: str | None) -> str | None:
        if value is not None and value not in self.taken:
            context = {"value": value[:_MAX_SHOWN], "taken": ", ".join(self.taken)}
            raise PydanticCustomError(UNSUPPORTED, "'{value}' is not supported; supported: {taken}", context)
        return value


class ItemPart(OpenAIObject):
    """Text part of an item."""

    type: Annotated[str, AfterValidator(Kinds(("input_text", "output_text", "text", "reasoning_text", "summary_text")))]
    text: str
    # Clients may send parts of an answer back as they came.
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


def _parts(value: Any) -> Any:
    if value is not None and not isinstance(value, str | list):
        raise ValueError("must be a string or a list of text parts")
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Parts = Annotated[
    Annotated[list[ItemPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None, BeforeValidator(_parts)
]
Id = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class InputItem(OpenAIObject):
    type: Annotated[str | None, AfterValidator(Kinds((*_ID_PREFIX, REFERENCE)))] = None
    """`message` (default), `function_call`, `function_call_output`, `reasoning`, or `item_reference`, which stands for
    an item of a stored response by its `id`."""
    id: Id | None = None
    """Stored and returned with the item."""
    role: Annotated[str, Field(max_length=MAX_ROLE_CHARS)] | None = None
    """Role of a message: `user`, `assistant`, `system` or `developer`."""
    content: Parts = None
    """Content of a message or reasoning item: a string, or a list of text parts."""
    call_id: Id | None = None
    """Id that connects a call and its output."""
    name: str | None = None
    """Name of the called function."""
    arguments: str | None = None
    """Arguments of a call: a JSON object, encoded as a string."""
    output: Parts = None
    """Output of a call: a string, or a list of text parts."""
    summary: Parts = None
    """Summary of a reasoning item; used if it has no `content`."""
    # Clients may send items of an answer back as they came.
    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None
    parsed_arguments: Ignored = None

    @property
    def kind(self) -> str:
        return self.type or "message"

    def check(self, path: str) -> None:
        """Check that the fields required by its type are set. Raises RequestError."""
        for name in _NEEDED.get(self.kind, ()):
            given = getattr(self, name)
            if given is None or (name == "id" and not given):
                raise RequestError(f"{path}.{name}: required for type {self.kind}", param=f"{path}.{name}")

    def to_store(self, default_id: str) -> JSON:
        """Return the item as it is stored and returned. default_id: used if the client set no id."""
        stored: JSON = {"id": self.id or f"{_ID_PREFIX[self.kind]}_{default_id}", "type": self.kind}
        match self.kind:
            case "message" if self.role == "assistant":
                content: list[JSON] = [
                    {"type": "output_text", "text": part.text, "annotations": []} for part in self.content or ()
                ]
                stored |= {"role": self.role, "content": content}
            case "message":
                content = [{"type": "input_text", "text": part.text} for part in self.content or ()]
                stored |= {"role": self.role, "content": content}
            case "function_call":
                stored |= {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
            case "function_call_output":
                stored |= {"call_id": self.call_id, "output": _text(self.output)}
            case "reasoning":
                content = [{"type": "reasoning_text", "text": self.thinking}]
                return stored | {"summary": [], "content": content if self.thinking else []}
        return stored | {"status": "completed"}

    @property
    def is_assistants(self) -> bool:
        return self.kind in ("function_call", "reasoning") or (self.kind == "message" and self.role == "assistant")

    @property
    def thinking(self) -> str:
        return _text(self.content) or _text(self.summary)

    @property
    def texts(self) -> list[TextPart]:
        """Text parts of the item, for a chat message."""
        parts = self.output if self.kind == "function_call_output" else self.content
        return [TextPart.model_construct(type="text", text=part.text) for part in parts or ()]


Items = Annotated[
    Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)],
    BeforeValidator(_items),
]


def shown(items: Sequence[InputItem]) -> list[int]:
    """Return the indices of items that the model sees: all but reasoning not followed by the assistant's own items."""
    numbers, is_followed = list[int](), False
    for number, item in reversed([*enumerate(items)]):
        if item.kind != "reasoning":
            is_followed = item.is_assistants
        if item.kind != "reasoning" or is_followed:
            numbers.append(number)
    return numbers[::-1]


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Convert items to messages. Consecutive assistant items (thoughts, text, calls, in this order) form one."""
    given = [_message("system", [TextPart.model_construct(type="text", text=instructions)])] if instructions else []
    return [*given, *_messages([items[number] for number in shown(items)])]


def _messages(items: Sequence[InputItem]) -> Iterator[ChatMessage]:
    turn: _Turn | None = None  # the assistant's open message
    for item in items:
        if turn and not turn.takes(item):
            yield turn.message()
            turn = None
        if item.is_assistants:
            turn = turn or _Turn()
            turn.add(item)
        else:
            answers = item.kind == "function_call_output"
            yield _message("tool" if answers else item.role or "", item.texts, tool_call_id=item.call_id)
    if turn:
        yield turn.message()


@dataclass
class _Turn:
    """Assistant message under construction: thoughts, then one text, then calls."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[TextPart] | None = None
    calls: list[CallInHistory] = field(default_factory=list)

    def takes(self, item: InputItem) -> bool:
        return item.kind == "function_call" or (item.is_assistants and self.texts is None and not self.calls)

    def add(self, item: InputItem) -> None:
        match item.kind:
            case "reasoning":
                self.thoughts.append(item.thinking)
            case "function_call":
                function = CalledFunction.model_construct(name=item.name or "", arguments=item.arguments or "")
                self.calls.append(CallInHistory.model_construct(id=item.call_id, function=function))
            case _:
                self.texts = item.texts

    def message(self) -> ChatMessage:
        return ChatMessage.model_construct(
            role="assistant",
            content=self.texts,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.thoughts) if self.thoughts else None,
        )


def _message(role: str, content: list[TextPart] | None, *, tool_call_id: str | None = None) -> ChatMessage:
    return ChatMessage.model_construct(role=role, content=content, tool_call_id=tool_call_id)


def _text(parts: Sequence[ItemPart] | None) -> str:
    return "\n".join(part.text for part in parts or ())

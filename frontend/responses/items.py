"""Items of /v1/responses: validation, storage form, and conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from core.types.errors import RequestError
from frontend.http.event_stream import JSON
from frontend.openai.fields import Ignored, OpenAIObject
from frontend.openai.messages import (
    MAX_PARTS,
    CalledFunction,
    CallInHistory,
    ChatMessage,
    ContentPart,
    MessageDraft,
    as_parts,
)
from frontend.text.completion_request import MAX_MESSAGES, MAX_ROLE_CHARS

MAX_ID_CHARS = 128
_ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
REFERENCE = "item_reference"
_NEEDED = {"message": ("role", "content"), "function_call": ("call_id", "name"),
           "function_call_output": ("call_id",), REFERENCE: ("id",)}  # fmt: skip


def _output(value: Any) -> Any:
    """Return the parts of a tool's output. An object of a built-in tool is not a part, and becomes its JSON text."""
    given = [value] if isinstance(value, dict) else value
    if not isinstance(given, list):
        return as_parts(given)
    return [
        {"type": "input_text", "text": json.dumps(one, ensure_ascii=False)}
        if isinstance(one, dict) and not one.keys() & {"type", "text"}
        else one
        for one in given
    ]


def _items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_PartsGiven = Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None
Parts = Annotated[_PartsGiven, BeforeValidator(as_parts)]
Id = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class InputItem(OpenAIObject):
    type: str | None = None
    """`message` (default), `function_call`, `function_call_output`, `reasoning`, or `item_reference`, which stands for
    an item of a stored response by its `id`. Calls of other tools with a `call_id`, and their outputs, become calls of
    functions; other items are skipped, and listed in `x-ignored-fields`."""
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
    """Arguments of a call: a JSON object, encoded as a string, or null."""
    input: Any = None
    """Input of a call of a custom tool."""
    action: Any = None
    """Action of a call of a built-in tool."""
    operation: Any = None
    """Operation of a call of a built-in tool."""
    output: Annotated[_PartsGiven, BeforeValidator(_output)] = None
    """Output of a call: a string, a list of text parts, or null. Other objects count as JSON text."""
    summary: Parts = None
    """Summary of a reasoning item; used if it has no `content`."""
    # Clients may send items of an answer back as they came.
    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None
    parsed_arguments: Ignored = None

    def model_post_init(self, context: Any, /) -> None:
        if self.id and self.type is None and self.model_fields_set <= {"id", "type"}:
            self.type = REFERENCE  # its type may be omitted
        if self.type == "local_shell_call_output" and not self.call_id:  # its id is the call's
            self.call_id = self.id

    @property
    def kind(self) -> str:
        """Type of the item; calls of all tools count as function calls. Empty for a skipped item."""
        type = self.type or "message"
        if type in _ID_PREFIX or type == REFERENCE:
            return type
        if type.endswith(("_call", "_call_output")) and self.call_id:
            return "function_call_output" if type.endswith("_output") else "function_call"
        return ""

    @property
    def skipped(self) -> str:
        return "" if self.kind else str(self.type)

    @property
    def function(self) -> CalledFunction:
        given = {"input": self.input, "action": self.action, "operation": self.operation}
        made = json.dumps({name: value for name, value in given.items() if value is not None}, ensure_ascii=False)
        name = self.name or (self.type or "").removesuffix("_call")
        return CalledFunction.model_construct(name=name, arguments=made if self.arguments is None else self.arguments)

    def check(self, path: str) -> None:
        """Check that the fields required by its type are set. Raises RequestError."""
        for name in _NEEDED.get(self.type or "message", ()):
            given = getattr(self, name)
            if given is None or (name == "id" and not given):
                raise RequestError.at(f"{path}.{name}", f"required for type {self.kind}")

    def to_store(self, default_id: str) -> JSON:
        """Return the item as it is stored and returned. default_id: used if the client set no id."""
        stored: JSON = {
            "id": self.id or f"{_ID_PREFIX.get(self.kind, 'item')}_{default_id}",
            "type": self.kind or self.type,
        }
        match self.kind:
            case "message" if self.role == "assistant":
                content: list[JSON] = [
                    {"type": "output_text", "text": part.written, "annotations": []} for part in self.content or ()
                ]
                stored |= {"role": self.role, "content": content}
            case "message":
                content = [{"type": "input_text", "text": part.written} for part in self.content or ()]
                stored |= {"role": self.role, "content": content}
            case "function_call":
                called = self.function
                stored |= {"call_id": self.call_id, "name": called.name, "arguments": called.arguments}
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
    def parts(self) -> list[ContentPart]:
        """Parts of the item, for a chat message."""
        return (self.output if self.kind == "function_call_output" else self.content) or []


Items = Annotated[
    Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)],
    BeforeValidator(_items),
]


def shown(items: Sequence[InputItem]) -> list[int]:
    """Return the indices of items that the model sees: all except skipped ones, and except reasoning that no item of
    the assistant follows."""
    numbers, is_followed = list[int](), False
    for number, item in reversed([pair for pair in enumerate(items) if pair[1].kind]):
        if item.kind != "reasoning":
            is_followed = item.is_assistants
        if item.kind != "reasoning" or is_followed:
            numbers.append(number)
    return numbers[::-1]


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Convert items to messages. Consecutive assistant items (thoughts, text, calls, in this order) form one."""
    text = ContentPart.model_construct(type="text", text=instructions)
    drafts = [MessageDraft("system", "instructions", [text])] if instructions else []
    before = ""  # kind of the assistant's last item; empty if it is not the assistant's turn
    for number in shown(items):
        item, path = items[number], f"input[{number}]"
        if not item.is_assistants:
            role = "tool" if item.kind == "function_call_output" else item.role or ""
            drafts.append(MessageDraft(role, path, item.parts, answered=item.call_id))
            before = ""
            continue
        if before != "reasoning" and not (before and item.kind == "function_call"):
            drafts.append(MessageDraft("assistant", path))
        before, draft = item.kind, drafts[-1]
        if item.kind == "reasoning":
            draft.thoughts.append(item.thinking)
        elif item.kind == "function_call":
            draft.calls.append(CallInHistory.model_construct(id=item.call_id, function=item.function))
        else:
            draft.parts = item.parts
    return [draft.message() for draft in drafts]


def _text(parts: Sequence[ContentPart] | None) -> str:
    """Return the text of parts that the model or a tool wrote."""
    return "\n".join(part.text_for("tool", "") for part in parts or ())

"""Messages and tools of the OpenAI API, and their conversion for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from core.types.errors import RequestError
from frontend.chat.chat import Chat, opens_answer
from frontend.openai.fields import Only, OpenAIObject, Unsupported
from frontend.text.completion_request import MAX_MESSAGES

MAX_PARTS = 4096  # per message
MAX_CALLS = 512  # per message
MAX_TOOLS = 512
_MAY_BE_EMPTY = ("assistant", "tool")


def as_parts(value: Any) -> Any:
    """Convert a string to a list of one part. Raises ValueError for other types than string and list."""
    if value is not None and not isinstance(value, str | list):
        raise ValueError("must be a string or a list of text parts")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(OpenAIObject):
    type: Literal["text"]
    text: str


class CalledFunction(OpenAIObject):
    name: str
    arguments: str


class CallInHistory(OpenAIObject):
    """Tool call from an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(OpenAIObject):
    role: str
    """`system`, `user`, `assistant`, `tool`, or another role that the model's template accepts. `developer` becomes
    `system` if the template does not know it."""
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None, BeforeValidator(as_parts)
    ] = None
    """A string, or a list of parts of type `text`, which are joined by newlines. Other types are rejected. May be null
    for `assistant` and `tool` only."""
    tool_calls: Annotated[list[CallInHistory], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    """Tool calls of an earlier answer, sent back unchanged. `arguments` is a JSON object, encoded as a string."""
    tool_call_id: str | None = None
    """Id of the tool call that a message of role `tool` answers."""
    name: str | None = None
    """Passed to the template."""
    reasoning_content: str | None = None
    """Extension. Passed to the template."""
    # Clients may send an answer back as it came. In our answers these fields are null or empty.
    refusal: Annotated[str | None, AfterValidator(Only(("",)))] = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the message in the form that templates expect. Raises RequestError."""
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            text = f"{path}.content: required; a string or a list of text parts, null only for roles assistant and tool"
            raise RequestError(text, param=f"{path}.content")
        content = None
        if self.content is not None or not self.tool_calls:
            content = "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
        return message


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


FUNCTION_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
FunctionName = Annotated[str, Field(pattern=f"^{FUNCTION_NAME}$")]


class FunctionAsTool(OpenAIObject):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolGiven(OpenAIObject):
    """Tool that the model may call."""

    type: Literal["function"]
    function: FunctionAsTool

    def for_template(self) -> dict[str, Any]:
        """Return the tool in transformers' form. `strict` is left out: it concerns this server, not the model."""
        function = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


@dataclass(frozen=True)
class ToolNamed:
    """Tool that the model must call."""

    name: str


def _tool_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolNamed(name)
    raise ValueError('must be "none", "auto", "required", or {"type": "function", "function": {"name": …}}')


ToolChoiceGiven = Literal["none", "auto", "required"] | dict[str, Any] | None
ToolChoice = Annotated[str | ToolNamed | None, PlainValidator(_tool_choice, json_schema_input_type=ToolChoiceGiven)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatSettings(OpenAIObject):
    """Template options common to all endpoints that take messages."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: variables for the chat template, for example `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Extension. Append the beginning of an answer to the prompt. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Extension: continue the last message instead of beginning a new one."""
    reasoning_effort: ReasoningEffort | None = None
    """Passed to a chat template that supports it; the template may reject some values. `none` also works with templates
    that have `enable_thinking`, and with models that do not think."""
    tools: Annotated[list[ToolGiven], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call. The chat template shows them to the model."""

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        has_tools: bool = True,
        is_parallel: bool = True,
        forced: str | None = None,
    ) -> Chat:
        """Build the chat. has_tools: show the tools to the model. forced: as in Chat. Raises RequestError."""
        is_continued = bool(self.continue_final_message)
        opens = opens_answer(self.add_generation_prompt, is_continued=is_continued)
        names = [tool.function.name for tool in self.tools or ()]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"tools: the name {duplicate!r} appears twice", param="tools")
        return Chat(
            messages=tuple(one.for_template(f"messages[{number}]") for number, one in enumerate(messages)),
            variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            tools=tuple(tool.for_template() for tool in self.tools or () if has_tools),
            is_parallel=is_parallel,
            forced=forced,
            is_continued=is_continued,
            opens_answer=opens,
        )


def _call(call: CallInHistory) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return (
        {"id": call.id, "type": "function", "function": function}
        if call.id
        else {"type": "function", "function": function}
    )

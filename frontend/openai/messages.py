"""Messages and tools, as the OpenAI API has them, and as chat templates know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from core.types.errors import RequestError
from frontend.chat.chat import Chat, opens_answer
from frontend.openai.fields import Only, OpenAIObject, Unsupported
from frontend.text.completion_request import MAX_MESSAGES

MAX_PARTS = 4096  # of one message
MAX_CALLS = 512  # of one message
MAX_TOOLS = 512
_MAY_SAY_NOTHING = ("assistant", "tool")


def as_parts(value: Any) -> Any:
    """A string as a list of one part; what is neither is refused."""
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
    """A call that the model made before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(OpenAIObject):
    role: str
    """`system`, `user`, `assistant`, `tool`, or what the model's template knows; `developer` is `system` to one that
    does not."""
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None, BeforeValidator(as_parts)
    ] = None
    """A string, or a list of parts of type `text`, each of which becomes a line of its own; no other type is
    taken. Null only of an `assistant` or a `tool`."""
    tool_calls: Annotated[list[CallInHistory], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    """Those of an answer, as they came. Arguments are a JSON object, written as a string."""
    tool_call_id: str | None = None
    """Which call a message of role `tool` answers."""
    name: str | None = None
    """For the template."""
    reasoning_content: str | None = None
    """Extension, for the template."""
    # A client may send back an answer as it came; these are null or empty in ours.
    refusal: Annotated[str | None, AfterValidator(Only(("",)))] = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as templates know it: a role, a text, and what else the client set. Raises RequestError."""
        if self.content is None and self.role not in _MAY_SAY_NOTHING:
            text = f"{path}.content: is required: a string or a list of text parts; null only of an assistant or a tool"
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
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionAsTool

    def for_template(self) -> dict[str, Any]:
        """As transformers describes functions; `strict` is a word to us, and not to the model."""
        function = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


@dataclass(frozen=True)
class ToolNamed:
    """The one tool that the model is to call."""

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
    """How the model's template is to show messages, and what besides."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: variables of the template, for example `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Extension. Default true, unless `continue_final_message`: the prompt ends where an answer begins."""
    continue_final_message: bool | None = None
    """Extension: the answer goes on with the last message's text."""
    reasoning_effort: ReasoningEffort | None = None
    """For a template that knows it, which may refuse some; `none` also for one that knows `enable_thinking`, and where
    the model does not think."""
    tools: Annotated[list[ToolGiven], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call; its template shows them."""

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        has_tools: bool = True,
        is_parallel: bool = True,
        forced: str | None = None,
    ) -> Chat:
        """has_tools: whether the model sees them. forced: as in Chat. Raises RequestError."""
        is_continued = bool(self.continue_final_message)
        opens = opens_answer(self.add_generation_prompt, is_continued=is_continued)
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"tools: {twice!r} is there twice", param="tools")
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

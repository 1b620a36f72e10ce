"""Messages and tools of the OpenAI API, and their conversion for chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr

from core.types.errors import RequestError, UnsupportedField
from frontend.chat.chat import Chat, opens_answer
from frontend.openai.fields import Ignored, Integer, OpenAIObject, Unsupported
from frontend.text.completion_request import MAX_MESSAGES

MAX_PARTS = 4096  # per message
MAX_CALLS = 512  # per message
MAX_TOOLS = 512
_MAX_KIND = 64  # characters of a client's value in a text
_MAY_BE_EMPTY = ("assistant", "tool", "function")
_THOUGHTS = ("thinking", "redacted_thinking")
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")


def as_parts(value: Any) -> Any:
    """Convert a string to a list of one part. Raises ValueError for other types than string and list."""
    if value is not None and not isinstance(value, str | list):
        raise ValueError("must be a string or a list of text parts")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ContentPart(OpenAIObject):
    """Part of a message. Parts without text become a placeholder, unless they are the user's."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None
    # Clients may send parts of an answer back as they came.
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None

    @property
    def skipped(self) -> str:
        return "" if self.written is not None or self.type in _THOUGHTS else self.type

    @property
    def written(self) -> str | None:
        """The part's text; None for an image or the like."""
        if self.type in TEXT_PARTS:
            return self.text or ""
        return self.refusal or "" if self.type == "refusal" else None

    def text_for(self, role: str, path: str) -> str:
        """Return the text for a message of `role`. Raises RequestError for what the user cannot send."""
        if role not in _MAY_BE_EMPTY and self.type in TEXT_PARTS and self.text is None:
            raise RequestError.at(f"{path}.text", "required")
        if self.written is not None:
            return self.written
        if role not in _MAY_BE_EMPTY:
            raise UnsupportedField.at(f"{path}.type", f"{self.type[:_MAX_KIND]!r} is not supported; supported: text")
        return placeholder(self.type)


def placeholder(kind: str) -> str:
    """Return the text that stands for a part of a tool's result that a text model cannot read."""
    noun = next((noun for noun in ("image", "document", "audio", "video") if noun in kind), kind[:_MAX_KIND])
    return f"[{noun} omitted: this model reads text only]"


def _as_text(value: Any) -> Any:
    """Return arguments as JSON text: some clients send an object, or null."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


class CalledFunction(OpenAIObject):
    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)] = ""


class CalledCustom(OpenAIObject):
    name: str
    input: str = ""


class CallInHistory(OpenAIObject):
    """Tool call from an earlier answer."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    @property
    def skipped(self) -> str:
        return "" if self.function or self.custom else self.type

    @property
    def called(self) -> CalledFunction:
        """The called function; a call of a custom tool counts as one."""
        if self.custom:
            return CalledFunction(name=self.custom.name, arguments=_as_text({"input": self.custom.input}))
        assert self.function
        return self.function


class ChatMessage(OpenAIObject):
    role: str
    """`system`, `user`, `assistant`, `tool`, or another role that the model's template accepts. `developer` becomes
    `system` if the template does not know it."""
    content: Annotated[
        Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None, BeforeValidator(as_parts)
    ] = None
    """A string, or a list of parts of type `text`, which are joined by newlines. Other types are rejected; in messages
    of `assistant` and `tool` a placeholder stands for them. May be null for these two only."""
    tool_calls: Annotated[list[CallInHistory], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    """Tool calls of an earlier answer, sent back unchanged. Other `arguments` than a JSON object are given to
    the template as text, or as an empty object if it needs one."""
    tool_call_id: str | None = None
    """Id of the tool call that a message of role `tool` answers."""
    name: str | None = None
    """Passed to the template."""
    reasoning_content: str | None = None
    """Extension: thoughts of an earlier answer, passed to the template by its own name of the field."""
    reasoning: Any = None
    """Extension: the same, as in vLLM and OpenRouter."""
    reasoning_details: Any = None
    """Extension: the same, as in OpenRouter."""
    # Clients may send an answer back as it came.
    refusal: str | None = None
    annotations: Ignored = None
    audio: Unsupported = None
    function_call: CalledFunction | None = None
    """The older form of `tool_calls`; a message of role `function` answers it."""

    _path: str = PrivateAttr("")  # path in the client's body, if it uses another API

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the message in the form that templates expect. Raises RequestError."""
        calls = [_call(call) for call in self.tool_calls or () if not call.skipped]
        if self.function_call:
            calls.append(_call(CallInHistory.model_construct(function=self.function_call)))
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            problem = "required; a string or a list of text parts, null only for roles assistant and tool"
            raise RequestError.at(f"{path}.content", problem)
        content = None
        if self.content is not None or not calls:
            parts = [*enumerate(self.content or ())]
            texts = [one.text_for(self.role, f"{path}.content[{i}]") for i, one in parts if one.type not in _THOUGHTS]
            content = "\n".join(texts) if self.content else self.refusal or ""
        others = {
            "name": self.name,
            "reasoning_content": self._thoughts,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }
        role = "tool" if self.role == "function" else self.role
        return {"role": role, "content": content, **{name: one for name, one in others.items() if one is not None}}

    @property
    def _thoughts(self) -> str | None:
        if self.reasoning_content is not None:
            return self.reasoning_content
        if isinstance(self.reasoning, str):
            return self.reasoning
        details = self.reasoning_details if isinstance(self.reasoning_details, list) else []
        parts = [part.thinking for part in self.content or () if part.type == "thinking"]
        return "\n".join([*_texts(parts), *_texts(details)]) or None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


@dataclass
class MessageDraft:
    """Message under construction, from parts of another API's messages."""

    role: str
    path: str  # of the message, in the client's body
    parts: list[ContentPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[CallInHistory] = field(default_factory=list)
    answered: str | None = None  # id of the answered call

    @property
    def has_content(self) -> bool:
        return bool(self.parts or self.thoughts or self.calls)

    def message(self) -> ChatMessage:
        message = ChatMessage.model_construct(
            role=self.role,
            content=None if self.calls and not self.parts else self.parts,
            tool_calls=self.calls or None,
            tool_call_id=self.answered,
            reasoning_content="\n".join(self.thoughts) if self.thoughts else None,
        )
        message._path = self.path
        return message


FUNCTION_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
FunctionName = Annotated[str, Field(pattern=f"^{FUNCTION_NAME}$")]


class FunctionAsTool(OpenAIObject):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool in transformers' form. `strict` is left out: it concerns this server, not the model."""
        function = {name: getattr(self, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class ToolGiven(OpenAIObject):
    """Tool that the model may call. Other tools than functions are skipped."""

    type: str = "function"
    function: FunctionAsTool | None = None

    @property
    def skipped(self) -> str:
        return "" if self.type == "function" else self.type


@dataclass(frozen=True)
class ToolNamed:
    """Tool that the model must call."""

    name: str


@dataclass(frozen=True)
class ToolsAllowed:
    """Subset of the tools that the model may call; mode `required`: it must call one of them."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]


def _tool_choice(value: Any) -> Any:
    """Parse a choice in the form of a chat or of /v1/responses. Raises ValueError."""
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function"} if name := _function_name(value):
            return ToolNamed(name)
        case {"type": "allowed_tools"}:
            match value.get("allowed_tools", value):
                case {"mode": "auto" | "required" as mode, "tools": [*tools]}:
                    return ToolsAllowed(mode, tuple(name for tool in tools if (name := _function_name(tool))))
            raise ValueError('must have a mode, "auto" or "required", and a list of tools')
    raise ValueError(
        'must be "none", "auto", "required", or an object of type "function" with a name, or of type "allowed_tools"'
    )


def _function_name(tool: Any) -> str | None:
    """Return the name of a function; None for other tools, which are skipped in `tools` as well."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None


_ToolChoiceGiven = Literal["none", "auto", "required"] | dict[str, Any] | None
ToolChoice = Annotated[
    str | ToolNamed | ToolsAllowed | None, PlainValidator(_tool_choice, json_schema_input_type=_ToolChoiceGiven)
]


class ThinkingGiven(OpenAIObject):
    """Thinking as in Anthropic's API."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def thinks(self) -> bool:
        return self.type != "disabled"

    @property
    def budget_fields(self) -> dict[str, Any]:
        """The CompletionRequest fields of the budget; empty if there is none."""
        if not self.thinks or self.budget_tokens is None:
            return {}
        return {"thinking_token_budget": self.budget_tokens, "thinking_field": "thinking.budget_tokens"}


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningGiven(OpenAIObject):
    """Thinking as in OpenRouter's API."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatSettings(OpenAIObject):
    """Template options common to all endpoints that take messages."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: variables for the chat template, for example `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Extension. Append the beginning of an answer to the prompt. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Extension: continue the last message instead of beginning a new one."""
    reasoning_effort: ReasoningEffort | None = None
    """Given to the chat template by its own variable: the nearest `reasoning_effort` that it accepts, or thinking
    turned on or off. Without such a variable it is listed in `x-ignored-fields`."""
    reasoning: ReasoningGiven | None = None
    """Extension: `effort` as above, and `enabled` and `exclude`, as in OpenRouter."""
    thinking: ThinkingGiven | None = None
    """Extension: `type` is `enabled`, `adaptive` or `disabled`, as in Anthropic's API."""
    enable_thinking: bool | None = None
    """Extension: the same, as in Qwen's API."""
    tools: Annotated[list[ToolGiven], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call. Other tools are skipped, and listed in `x-ignored-fields`."""

    @property
    def function_tools(self) -> list[FunctionAsTool]:
        """The tools that are functions. Raises RequestError."""
        for number, tool in enumerate(self.tools or ()):
            if not tool.skipped and tool.function is None:
                raise RequestError.at(f"tools[{number}].function", "required")
        return [tool.function for tool in self.tools or () if tool.function and not tool.skipped]

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
        functions = self.function_tools
        names = [function.name for function in functions]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise RequestError.at("tools", f"the name {duplicate!r} appears twice")
        paths = tuple(one._path or f"messages[{number}]" for number, one in enumerate(messages))
        thinks_field, thinks = self._thinks
        effort, of_reasoning = self.reasoning_effort, self.reasoning.effort if self.reasoning else None
        return Chat(
            messages=tuple(one.for_template(path) for one, path in zip(messages, paths, strict=True)),
            paths=paths,
            variables=self.chat_template_kwargs or {},
            reasoning_effort=effort or of_reasoning,
            effort_field="reasoning_effort" if effort else "reasoning.effort",
            thinks=thinks,
            thinks_field=thinks_field,
            tools=tuple(function.for_template() for function in functions if has_tools),
            is_parallel=is_parallel,
            forced=forced,
            is_continued=is_continued,
            opens_answer=opens,
        )

    @property
    def _thinks(self) -> tuple[str, bool | None]:
        """The field that asks to think or not to, and its value."""
        given = {
            "thinking": self.thinking.thinks if self.thinking else None,
            "reasoning.enabled": self.reasoning.enabled if self.reasoning else None,
            "enable_thinking": self.enable_thinking,
        }
        return next(((name, value) for name, value in given.items() if value is not None), ("thinking", None))


def _texts(details: Sequence[Any]) -> Iterator[str]:
    """Yield the texts of thoughts, which clients send in the forms of several APIs."""
    for one in details:
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            yield from _texts(one)
        elif isinstance(one, dict):
            yield from _texts([one.get("text") or one.get("summary")])


def _call(call: CallInHistory) -> dict[str, Any]:
    called = call.called
    function = {"name": called.name, "arguments": called.arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}

"""Request body of POST /v1/responses, and its conversion to a chat.

Reference: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Raw
from pydantic import AfterValidator, Field

from core.types.errors import RequestError
from frontend.chat.chat import Chat
from frontend.http.event_stream import JSON, to_json
from frontend.http.request_contexts import GenerationBody
from frontend.openai.constraints import ResponseFormat
from frontend.openai.fields import EMPTY, Ignored, Integer, Only, OpenAIObject, Unsupported
from frontend.openai.messages import (
    MAX_TOOLS,
    FunctionAsTool,
    FunctionName,
    ReasoningEffort,
    ToolChoice,
    ToolGiven,
    ToolNamed,
    ToolsAllowed,
)
from frontend.openai.types import ChatBody, TopLogprobs, reject_fields_of_others
from frontend.responses.items import Id, Items, Kinds, messages_of
from frontend.text.completion_request import CompletionRequest

_MAX_PAIRS = 16  # of metadata
_MAX_KEY, _MAX_VALUE = 64, 512  # characters
_LOGPROBS = "message.output_text.logprobs"
# Fields that a chat has under the same name.
_SAME = ("model", "temperature", "top_p", "user", "tool_choice", "parallel_tool_calls", "seed", "top_k", "min_p",
         "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "priority",
         "chat_template_kwargs", "thinking_token_budget")  # fmt: skip


class FunctionTool(OpenAIObject):
    """Function that the model may call. Other tools are skipped."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def skipped(self) -> str:
        return "" if self.type == "function" else self.type

    def for_chat(self) -> ToolGiven:
        fields = {name: getattr(self, name) for name in FunctionAsTool.model_fields}
        return ToolGiven.model_construct(type="function", function=FunctionAsTool.model_construct(**fields))


class TextFormat(OpenAIObject):
    type: Annotated[str, AfterValidator(Kinds(("text", "json_object", "json_schema")))]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> ResponseFormat:
        schema = {"name": self.name or "", "schema": self.schema_, "strict": self.strict}
        return ResponseFormat.model_validate(
            {"type": self.type, "json_schema": schema if self.type == "json_schema" else None}
        )


class TextConfig(OpenAIObject):
    format: TextFormat | None = None


class ReasoningConfig(OpenAIObject):
    effort: ReasoningEffort | None = None
    # Not summarized: reasoning text is returned verbatim.
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses"""

    model: str | None = None
    """Default: the model of the router's own deployment."""
    input: Items
    """A string, or a list of items."""
    instructions: str | None = None
    """Message of role `system` before all others. Instructions of a previous response do not apply."""
    previous_response_id: Id | None = None
    """Continue a stored response: its input and output precede `input`."""
    store: bool | None = None
    """Store the response, so that it can be continued or fetched. Default true. The response's `store` is true if it
    was stored."""
    max_output_tokens: Integer | None = None
    """Maximum number of tokens of the output, including reasoning and calls. Default: the rest of the context, to which
    larger values are clamped."""
    temperature: float | None = None
    """0 means greedy decoding. Default, as of `top_p`: the model's; see /v1/chat/completions."""
    top_p: float | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    """`format`: `text`, `json_object` or `json_schema`; see `response_format` of /v1/chat/completions."""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call. Other tools are skipped, and listed in `x-ignored-fields`."""
    tool_choice: ToolChoice = None
    """`auto` (default), `none`, `required`, a function's name, or `allowed_tools`."""
    parallel_tool_calls: bool | None = None
    """Default true. If false, the answer ends after its first call."""
    reasoning: ReasoningConfig | None = None
    """`effort`: see `reasoning_effort` of /v1/chat/completions. `summary` is ignored: there are no summaries."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto`: keep only the last tokens of a prompt that is too long. `max_output_tokens`, at most half of the context,
    are left for the answer."""
    include: Annotated[list[str], Field(max_length=64)] | None = None
    """`message.output_text.logprobs`; other values have no effect."""
    top_logprobs: TopLogprobs | None = None
    """Return this many of the most likely tokens beside each token of the text."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=_MAX_KEY)],
                Annotated[str, Field(max_length=_MAX_VALUE)],
            ],
            Field(max_length=_MAX_PAIRS),
        ]
        | None
    ) = None
    """Returned with the response. At most 16 pairs; keys of 64, values of 512 characters."""
    user: str | None = None
    """Id of the end user. Users of a tenant share its capacity fairly."""
    seed: Integer | None = None
    """Extension; see /v1/chat/completions."""
    top_k: Integer | None = None
    """Extension; see /v1/chat/completions."""
    min_p: float | None = None
    """Extension; see /v1/chat/completions."""
    presence_penalty: float | None = None
    """Extension; see /v1/chat/completions."""
    frequency_penalty: float | None = None
    """Extension; see /v1/chat/completions."""
    repetition_penalty: float | None = None
    """Extension; see /v1/chat/completions."""
    cache_salt: str | None = None
    """Extension; see /v1/chat/completions."""
    priority: Integer | None = None
    """Extension; see /v1/chat/completions."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension; see /v1/chat/completions."""
    thinking_token_budget: Integer | None = None
    """Extension; see /v1/chat/completions."""
    background: Annotated[bool | None, AfterValidator(Only((False,)))] = None
    stream_options: Ignored = None
    max_tool_calls: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    conversation: Annotated[Any, AfterValidator(Only(EMPTY, "previous_response_id"))] = None
    prompt: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return the one request, converted from the equivalent chat. Raises RequestError."""
        reject_fields_of_others(self)
        self.check_items()
        (request,) = self._chat().requests(request_id, peer=peer)
        is_formatted = request.grammar_field.startswith("response_format")
        field = "text.format" if is_formatted else request.grammar_field
        if isinstance(request.prompt, Chat):
            request = replace(request, prompt=replace(request.prompt, effort_field="reasoning.effort"))
        fields: JSON = {"max_tokens_field": "max_output_tokens", "clamps_max_tokens": True, "grammar_field": field}
        return [replace(request, **fields)]

    def check_items(self) -> None:
        """Check that there is input, and each item. Raises RequestError."""
        if not self.input:
            raise RequestError("input: must not be empty", param="input")
        for number, item in enumerate(self.input):
            item.check(f"input[{number}]")
        for number, tool in enumerate(self.tools or ()):
            if not tool.skipped and tool.name is None:
                raise RequestError(f"tools[{number}].name: required", param=f"tools[{number}].name")

    def echoed_fields(self) -> JSON:
        """Return the request fields that a response repeats; large ones are encoded already.

        An omitted temperature or top_p is None, because its default is the model's.
        """
        tools = [tool.model_dump(by_alias=True, exclude_unset=True) for tool in self.tools or () if not tool.skipped]
        config = self.text.format if self.text else None
        shown = config.model_dump(by_alias=True, exclude_none=True) if config else {"type": "text"}
        return {
            "background": False,
            "instructions": Raw(to_json(self.instructions)),
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "service_tier": "default",
            "temperature": self.temperature,
            "text": Raw(to_json({"format": shown})),
            "tool_choice": _shown(self.tool_choice),
            "tools": Raw(to_json([{"parameters": None, "strict": None, **tool} for tool in tools])),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    def _chat(self) -> ChatBody:
        has_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        config = self.text.format if self.text else None
        return ChatBody.model_construct(
            **{name: getattr(self, name) for name in _SAME},
            messages=messages_of(self.input, self.instructions),
            tools=[tool.for_chat() for tool in self.tools or () if not tool.skipped] or None,
            max_completion_tokens=self.max_output_tokens,
            response_format=config.for_chat() if config else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
        )


def _shown(choice: str | ToolNamed | ToolsAllowed | None) -> str | JSON:
    match choice:
        case ToolNamed(name):
            return {"type": "function", "name": name}
        case ToolsAllowed(mode, names):
            return {"type": "allowed_tools", "mode": mode, "tools": [_shown(ToolNamed(name)) for name in names]}
    return choice or "auto"

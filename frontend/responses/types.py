"""The body of POST /v1/responses: what is taken, what is taken and ignored, and what is refused; and the chat that it
asks for. Reference: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Raw
from pydantic import AfterValidator, Field, PlainValidator

from core.types.errors import RequestError
from frontend.http.json_response import JSON, to_json
from frontend.http.open_requests import AskingBody
from frontend.openai.constraints import ResponseFormat
from frontend.openai.fields import EMPTY, Ignored, Only, OpenAIObject, Unsupported
from frontend.openai.messages import (
    MAX_TOOLS,
    FunctionAsTool,
    FunctionName,
    ReasoningEffort,
    ToolChoiceGiven,
    ToolGiven,
    ToolNamed,
)
from frontend.openai.types import ChatBody, reject_fields_of_others
from frontend.responses.items import Id, Items, Kinds, messages_of
from frontend.text.completion_request import MAX_LOGPROBS, CompletionRequest

_MAX_PAIRS = 16  # of metadata
_MAX_KEY, _MAX_VALUE = 64, 512  # characters
_LOGPROBS = "message.output_text.logprobs"
_SAME = ("model", "temperature", "top_p", "user", "tool_choice", "parallel_tool_calls", "seed", "top_k", "min_p",
         "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "priority",
         "chat_template_kwargs", "thinking_token_budget")  # as a chat has them  # fmt: skip


class FunctionTool(OpenAIObject):
    """A function that the model may call; of OpenAI's built-in tools there are none here."""

    type: Annotated[str, AfterValidator(Kinds(("function",)))]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

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
    verbosity: Annotated[Any, AfterValidator(Only(("medium",)))] = None


class ReasoningConfig(OpenAIObject):
    effort: ReasoningEffort | None = None
    # There are no summaries: what was thought is told as it is.
    summary: Ignored = None
    generate_summary: Ignored = None


def _tool_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "name": str(name)}:
            return ToolNamed(name)
    raise ValueError('must be "none", "auto", "required", or {"type": "function", "name": …}')


class ResponsesBody(AskingBody):
    """POST /v1/responses"""

    model: str | None = None
    """Left out: the one that is served."""
    input: Items
    """A string, or a list of items."""
    instructions: str | None = None
    """A message of role `system` before all others; those of a previous response are not."""
    previous_response_id: Id | None = None
    """Goes on from a stored response: its input and its output come before `input`."""
    store: bool | None = None
    """Default true: it can be gone on from, and asked for again. The answer's `store` says whether it is stored."""
    max_output_tokens: int | None = None
    """Thinking and calls are among them. Left out: what the context has room for."""
    temperature: float | None = None
    """Default 1; 0 is greedy."""
    top_p: float | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    """`format`: `text`, `json_object` or `json_schema`, as `response_format` of a chat."""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call; no other type is taken."""
    tool_choice: Annotated[
        str | ToolNamed | None, PlainValidator(_tool_choice, json_schema_input_type=ToolChoiceGiven)
    ] = None
    """`auto`, the default, `none`, `required`, or a function's name."""
    parallel_tool_calls: bool | None = None
    """Default true; false: an answer ends after its first call."""
    reasoning: ReasoningConfig | None = None
    """`effort`: as `reasoning_effort` of a chat. There are no summaries; `summary` is ignored."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto`: of a prompt that is too long the last tokens are kept."""
    include: Annotated[list[str], Field(max_length=64)] | None = None
    """`message.output_text.logprobs`; others add nothing here."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """So many of the likeliest tokens beside each of the text."""
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
    """Told again with the answer: 16 pairs, of 64 and 512 characters."""
    user: str | None = None
    """Whose share it takes of what its tenant has."""
    seed: int | None = None
    """Extension, as of a chat."""
    top_k: int | None = None
    """Extension, as of a chat."""
    min_p: float | None = None
    """Extension, as of a chat."""
    presence_penalty: float | None = None
    """Extension, as of a chat."""
    frequency_penalty: float | None = None
    """Extension, as of a chat."""
    repetition_penalty: float | None = None
    """Extension, as of a chat."""
    cache_salt: str | None = None
    """Extension, as of a chat."""
    priority: int | None = None
    """Extension, as of a chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension, as of a chat."""
    thinking_token_budget: int | None = None
    """Extension, as of a chat."""
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
    context_management: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """The one request, as of a chat that says the same. Raises RequestError."""
        reject_fields_of_others(self)
        self.check_items()
        (request,) = self._chat().requests(request_id, peer=peer)
        is_formatted = request.grammar_field.startswith("response_format")
        field = "text.format" if is_formatted else request.grammar_field
        return [replace(request, max_tokens_field="max_output_tokens", grammar_field=field)]

    def check_items(self) -> None:
        """Raises RequestError."""
        if not self.input:
            raise RequestError("input: must not be empty", param="input")
        for number, item in enumerate(self.input):
            item.check(f"input[{number}]")

    def told_again(self) -> JSON:
        """What an answer repeats of it; what may be large is written already."""
        tools = [tool.model_dump(by_alias=True, exclude_unset=True) for tool in self.tools or ()]
        config = self.text.format if self.text else None
        shown = config.model_dump(by_alias=True, exclude_none=True) if config else {"type": "text"}
        choice = self.tool_choice or "auto"
        return {
            "background": False,
            "instructions": Raw(to_json(self.instructions)),
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "service_tier": "default",
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": Raw(to_json({"format": shown})),
            "tool_choice": {"type": "function", "name": choice.name} if isinstance(choice, ToolNamed) else choice,
            "tools": Raw(to_json([{"parameters": None, "strict": None, **tool} for tool in tools])),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    def _chat(self) -> ChatBody:
        has_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        config = self.text.format if self.text else None
        return ChatBody.model_construct(
            **{name: getattr(self, name) for name in _SAME},
            messages=messages_of(self.input, self.instructions),
            tools=[tool.for_chat() for tool in self.tools] if self.tools else None,
            max_completion_tokens=self.max_output_tokens,
            response_format=config.for_chat() if config else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
        )

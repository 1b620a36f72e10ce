"""Request body of POST /v1/responses, its conversion to a chat, and the stored responses that it refers to.

Reference: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from msgspec import Raw
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from core.types.errors import RequestError, UnknownResponse
from frontend.chat.chat import Chat
from frontend.http.event_stream import JSON, to_json
from frontend.http.request_contexts import GenerationBody, ParsedBody
from frontend.openai.constraints import ResponseFormat
from frontend.openai.fields import EMPTY, UNSUPPORTED, Ignored, Integer, Only, OpenAIObject, Unsupported
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
from frontend.responses.items import REFERENCE, Id, InputItem, Items, messages_of, shown
from frontend.text.completion_request import MAX_REQUEST_BYTES, CompletionRequest

_MAX_PAIRS = 16  # of metadata
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_AS_IN_A_CHAT: Any = Field(default=None, description="Extension; see /v1/chat/completions.")
_FORMATS = ("text", "json_object", "json_schema")
_MAX_TOLD = 64  # characters of a client's value in an error message
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


def _format_type(value: str) -> str:
    if value not in _FORMATS:
        context = {"value": value[:_MAX_TOLD], "formats": ", ".join(_FORMATS)}
        raise PydanticCustomError(UNSUPPORTED, "'{value}' is not supported; supported: {formats}", context)
    return value


class TextFormat(OpenAIObject):
    type: Annotated[str, AfterValidator(_format_type)]
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
    metadata: Annotated[dict[_Key, _Value], Field(max_length=_MAX_PAIRS)] | None = None
    """Returned with the response. At most 16 pairs; keys of 64, values of 512 characters."""
    user: str | None = None
    """Id of the end user. Users of a tenant share its capacity fairly."""
    seed: Integer | None = _AS_IN_A_CHAT
    top_k: Integer | None = _AS_IN_A_CHAT
    min_p: float | None = _AS_IN_A_CHAT
    presence_penalty: float | None = _AS_IN_A_CHAT
    frequency_penalty: float | None = _AS_IN_A_CHAT
    repetition_penalty: float | None = _AS_IN_A_CHAT
    cache_salt: str | None = _AS_IN_A_CHAT
    priority: Integer | None = _AS_IN_A_CHAT
    chat_template_kwargs: dict[str, Any] | None = _AS_IN_A_CHAT
    thinking_token_budget: Integer | None = _AS_IN_A_CHAT
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
            raise RequestError.at("input", "must not be empty")
        for number, item in enumerate(self.input):
            item.check(f"input[{number}]")
        for number, tool in enumerate(self.tools or ()):
            if not tool.skipped and tool.name is None:
                raise RequestError.at(f"tools[{number}].name", "required")

    def echoed_fields(self) -> JSON:
        """Return the request fields that a response repeats; large ones are encoded already.

        An omitted temperature or top_p is None, because its default is the model's.
        """
        tools = [tool.model_dump(by_alias=True, exclude_unset=True) for tool in self.tools or () if not tool.skipped]
        config = self.text.format if self.text else None
        format = config.model_dump(by_alias=True, exclude_none=True) if config else {"type": "text"}
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
            "text": Raw(to_json({"format": format})),
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


MAX_REFERRED = 64  # responses referenced by the items of one body
PREVIOUS = "previous_response_id"
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_i?[0-9]{1,6}")  # item id, which contains that of its response


class StoredTurn(msgspec.Struct):
    """Stored form of a response."""

    response: Raw
    input: list[Raw]  # items, including those of all previous turns

    @classmethod
    def of(cls, value: bytes) -> StoredTurn:
        """Decode a stored value. Raises UnknownResponse."""
        try:
            return msgspec.json.decode(value, type=cls)
        except msgspec.MsgspecError:
            raise _other_form() from None

    @property
    def items(self) -> list[Raw]:
        """Items of the response's input, then of its output."""
        return [*self.input, *msgspec.json.decode(self.response, type=_Output).output]


def id_of(item: Raw) -> str:
    return msgspec.json.decode(item, type=_Named).id


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Parsed body, with all values that need a pass over the whole body."""

    body: ResponsesBody
    # Input in stored form: history included, items that the model does not see excluded.
    items: Sequence[Raw]
    echoed_fields: JSON
    needed: Mapping[str, str]  # ids of referenced responses, and the field that names each
    parsed: ParsedBody[ResponsesBody] | None = None  # None while referenced responses are missing

    @classmethod
    def of(cls, request: Request, id: str, body: ResponsesBody) -> Turn:
        """Build the turn of a body. id: the new response's. Raises RequestError."""
        body.check_items()
        own = id.partition("_")[2]
        items = [Raw(to_json(item.to_store(f"{own}_i{number}"))) for number, item in enumerate(body.input)]
        needed = dict.fromkeys(_referred(body.input), "input")
        if len(needed) > MAX_REFERRED:
            problem = f"items refer to {len(needed)} responses; at most {MAX_REFERRED} are accepted"
            raise RequestError.at("input", problem)
        if body.previous_response_id is not None:
            needed[body.previous_response_id] = PREVIOUS
        turn = cls(body=body, items=items, echoed_fields=body.echoed_fields(), needed=needed)
        return turn if needed else turn._with_request(request, body)

    def completed(self, stored: Mapping[str, bytes], request: Request) -> Turn:
        """Add the referenced responses. stored: their values, by id. Raises RequestError."""
        try:
            turns = {id: StoredTurn.of(value) for id, value in stored.items()}
            known = {id_of(item): item for id in set(_referred(self.body.input)) for item in turns[id].items}
            previous = self.body.previous_response_id
            history = turns[previous].items if previous is not None else []
            items = [self._resolved(number, item, known) for number, item in enumerate(self.items)]
            whole = [*history, *items]
            if sum(memoryview(item).nbytes for item in whole) > MAX_REQUEST_BYTES:  # the limit of a body
                problem = f"exceeds {MAX_REQUEST_BYTES} bytes, including its history and referenced items"
                raise RequestError.at("input", problem)
            read = _ITEMS.validate_json(to_json(whole))
        except (msgspec.MsgspecError, ValidationError):
            raise _other_form() from None
        return replace(self, items=whole)._with_request(request, self.body.model_copy(update={"input": read}))

    def _with_request(self, request: Request, body: ResponsesBody) -> Turn:
        """Return this turn with its completion requests. body: with all items resolved. Raises RequestError."""
        items = [self.items[number] for number in shown(body.input)]
        return replace(self, items=items, parsed=ParsedBody.of(request, body))

    def _resolved(self, number: int, item: Raw, known: Mapping[str, Raw]) -> Raw:
        given = self.body.input[number]
        if given.kind != REFERENCE:
            return item
        if (found := known.get(given.id or "")) is None:
            raise _no_item(number, given)
        return found


class _Output(msgspec.Struct):
    output: list[Raw]


class _Named(msgspec.Struct):
    id: str


_ITEMS = TypeAdapter(list[InputItem])


def _referred(items: Sequence[InputItem]) -> Iterator[str]:
    """Yield the ids of the responses whose items are referenced. Raises UnknownResponse."""
    for number, item in enumerate(items):
        if item.kind == REFERENCE:
            if not (found := _ID.fullmatch(item.id or "")):
                raise _no_item(number, item)
            yield f"resp_{found[1]}"


def _no_item(number: int, item: InputItem) -> UnknownResponse:
    problem = f"item {(item.id or '')[:_MAX_TOLD]!r} not found; send the item itself"
    return UnknownResponse.at(f"input[{number}].id", problem)


def _other_form() -> UnknownResponse:
    return UnknownResponse("the stored response has an unknown format", param=PREVIOUS)

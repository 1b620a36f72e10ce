"""Request bodies of Anthropic's Messages API: supported, ignored and unsupported fields.

Reference: https://docs.claude.com/en/api/messages; extensions are named as in vLLM.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from core.types.request import Grammar, GrammarKind
from frontend.anthropic.messages import AnthropicMessages, AnthropicToolChoice, AnthropicTools, Texts, chat_messages
from frontend.chat.chat import Chat
from frontend.http.request_contexts import GenerationBody
from frontend.openai.constraints import forced_grammar
from frontend.openai.fields import Ignored, Integer, OpenAIObject, Unsupported
from frontend.openai.messages import ChatSettings, FunctionAsTool, ThinkingGiven, ToolGiven
from frontend.text.completion_request import MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS, CompletionRequest

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class JsonFormat(OpenAIObject):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenAIObject):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class AnthropicMetadata(OpenAIObject):
    user_id: Annotated[str, Field(max_length=MAX_USER_CHARS)] | None = None


class ConversationBody(GenerationBody):
    """Fields common to both endpoints."""

    messages: AnthropicMessages
    """Messages of role `user`, `assistant` or `system`; consecutive messages of one role are merged. If the last one is
    of role `assistant`, the answer continues it."""
    model: str | None = None
    """Default: the model of the router's own deployment."""
    system: Texts | None = None
    """A string, or a list of blocks of type `text`, which are joined by newlines."""
    tools: AnthropicTools | None = None
    """The client's tools: `name`, `description`, `input_schema`, `strict`. Anthropic's built-in tools are skipped, and
    listed in `x-ignored-fields`."""
    tool_choice: AnthropicToolChoice | None = None
    """`auto` (default), `none`, `any`, or `tool` with its `name`. With `disable_parallel_tool_use`, the answer ends
    after its first call."""
    thinking: ThinkingGiven | None = None
    """`enabled` and `adaptive` turn thinking on, `disabled` turns it off, by the template's own variable; listed in
    `x-ignored-fields` where it has none. `budget_tokens`, from 0 on: maximum number of thinking tokens; the server then
    writes the end of thinking. `display: omitted` leaves the thinking text out."""
    output_config: OutputConfig | None = None
    """`format`: a JSON schema, to which the answer conforms unless it ends by `max_tokens`. `effort`: see
    `reasoning_effort` of /v1/chat/completions."""
    output_format: JsonFormat | None = None
    """The older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: variables for the chat template, for example `enable_thinking`."""
    cache_control: Ignored = None
    speed: Ignored = None

    def chat(self) -> Chat:
        """Build the chat. Raises RequestError."""
        messages, choice = chat_messages(self.system, self.messages), self.tool_choice
        settings = ChatSettings(
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=bool(messages) and messages[-1].role == "assistant",
            reasoning_effort=self.output_config.effort if self.output_config else None,
            thinking=self.thinking,
            tools=[ToolGiven(function=function) for function in self._functions],
        )
        chat = settings.chat(
            messages,
            has_tools=choice is None or choice.type != "none",
            is_parallel=self.is_parallel,
            forced=choice.forced() if choice else None,
        )
        return replace(chat, effort_field="output_config.effort")

    @property
    def _functions(self) -> list[FunctionAsTool]:
        return [tool.function() for tool in self.tools or () if not tool.skipped]

    @property
    def is_parallel(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class CountTokensBody(ConversationBody):
    """POST /v1/messages/count_tokens"""

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        return [CompletionRequest(id=request_id, peer=peer, prompt=self.chat(), model=self.model or "")]


class MessagesBody(ConversationBody):
    """POST /v1/messages"""

    max_tokens: Integer
    """Maximum number of tokens of the answer, including thinking. Clamped to the rest of the context."""
    stream: bool | None = None
    stop_sequences: Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    """The text ends before the first match."""
    temperature: float | None = None
    """0 means greedy decoding. Default, as of `top_p` and `top_k`: the model's; see /v1/chat/completions."""
    top_p: float | None = None
    top_k: Integer | None = None
    """0 turns it off."""
    metadata: AnthropicMetadata | None = None
    """`user_id`: id of the end user. Users of a tenant share its capacity fairly."""
    seed: Integer | None = None
    """Extension. Default: random."""
    cache_salt: str | None = None
    """Extension: share cached prefixes only with requests of the same tenant and salt."""
    priority: Integer | None = None
    """Extension: smaller runs first, among the requests of one `user_id`. Default 0. Clamped to the range of the API
    key."""
    service_tier: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None
    container: Unsupported = None
    mcp_servers: Unsupported = None

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return the one request. Raises RequestError."""
        chat, format, format_field = self.chat(), self.output_format, "output_format"
        if self.output_config and self.output_config.format:
            format, format_field = self.output_config.format, "output_config.format"
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "cache_salt", "priority")
        fields = {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = tuple(self.stop_sequences)
        if self.metadata and self.metadata.user_id:
            fields["user"] = self.metadata.user_id
        if self.thinking:
            fields |= self.thinking.budget_fields
        if chat.forced is not None:
            fields["grammar"] = forced_grammar(chat.forced, self._functions, is_parallel=self.is_parallel)
            fields["grammar_field"] = "tools"
        elif format is not None:
            fields["grammar"] = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(format.schema_))
            fields["grammar_field"] = f"{format_field}.schema"
        return [CompletionRequest(id=request_id, peer=peer, prompt=chat, clamps_max_tokens=True, **fields)]

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

"""The bodies of Anthropic's Messages API: what is taken, what is taken and ignored, and what is refused.

Reference: https://docs.claude.com/en/api/messages; the extensions have vLLM's names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from core.types.constraints import Grammar, GrammarKind
from frontend.anthropic.messages import AnthropicMessages, AnthropicToolChoice, AnthropicTools, Texts, chat_messages
from frontend.chat.chat import Chat
from frontend.http.open_requests import AskingBody
from frontend.openai.fields import Ignored, OpenAIObject, Unsupported
from frontend.openai.messages import ChatSettings
from frontend.openai.tool_choice import forced_grammar
from frontend.text.completion_request import MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS, CompletionRequest


class AnthropicThinking(OpenAIObject):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(OpenAIObject):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenAIObject):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class AnthropicMetadata(OpenAIObject):
    user_id: Annotated[str, Field(max_length=MAX_USER_CHARS)] | None = None


class ConversationBody(AskingBody):
    """What both endpoints share."""

    messages: AnthropicMessages
    """Of `user`, `assistant` and `system`; what one of them says in a row is one message to the model. Where the last
    is of the `assistant`, the answer goes on with it."""
    model: str | None = None
    """Left out: the one that is served."""
    system: Texts | None = None
    """A string, or a list of blocks of type `text`, each of which becomes a line of its own."""
    tools: AnthropicTools | None = None
    """Of the client's own: `name`, `description`, `input_schema`, `strict`. Types of Anthropic's own are refused."""
    tool_choice: AnthropicToolChoice | None = None
    """`auto`, the default, `none`, `any` or `tool` with its `name`; `disable_parallel_tool_use`: an answer ends after
    its first call."""
    thinking: AnthropicThinking | None = None
    """`enabled`: for a model that thinks; `disabled`: for a template that knows how, and a model that does not think;
    `adaptive`: as its template has it. `budget_tokens`: when it has thought for so many, the end of its thinking is
    written for it; any number from 0 on. `display: omitted` leaves out what was thought."""
    output_config: OutputConfig | None = None
    """`format`, a JSON schema: the answer keeps to it, or ends by `max_tokens`. `effort`: for a template that knows
    `reasoning_effort`."""
    output_format: JsonFormat | None = None
    """The older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: variables of the template, for example `enable_thinking`."""
    cache_control: Ignored = None
    speed: Ignored = None

    def chat(self) -> Chat:
        """Raises RequestError."""
        messages, choice = chat_messages(self.system, self.messages), self.tool_choice
        settings = ChatSettings(
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=bool(messages) and messages[-1].role == "assistant",
            reasoning_effort=self._effort,
            tools=[tool.given() for tool in self.tools or ()],
        )
        chat = settings.chat(
            messages,
            has_tools=choice is None or choice.type != "none",
            is_parallel=self.is_parallel,
            forced=choice.forced() if choice else None,
        )
        is_off = self.thinking is not None and self.thinking.type == "disabled"
        thinks = True if self.thinking is not None and self.thinking.type == "enabled" else None
        return replace(chat, thinks=thinks, effort_field="thinking" if is_off else "output_config.effort")

    @property
    def _effort(self) -> Literal["none", "low", "medium", "high", "xhigh", "max"] | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        return self.output_config.effort if self.output_config else None

    @property
    def is_parallel(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    @property
    def format(self) -> tuple[str, JsonFormat] | None:
        """What the answer keeps to, and by which name it was said."""
        if self.output_config and self.output_config.format:
            return "output_config.format", self.output_config.format
        return ("output_format", self.output_format) if self.output_format else None


class CountTokensBody(ConversationBody):
    """POST /v1/messages/count_tokens"""

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        return [CompletionRequest(id=request_id, peer=peer, prompt=self.chat(), model=self.model or "")]


class MessagesBody(ConversationBody):
    """POST /v1/messages"""

    max_tokens: int
    """Of the answer, with what is thought before it."""
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(fail_fast=True, max_length=MAX_STOPS),
        ]
        | None
    ) = None
    """The text ends before the first of them."""
    temperature: float | None = None
    """Default 1; 0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """0: off."""
    metadata: AnthropicMetadata | None = None
    """`user_id`: whose share it takes of what its tenant has."""
    seed: int | None = None
    """Extension. Left out: drawn at random."""
    cache_salt: str | None = None
    """Extension: cached prefixes are shared with requests of the same tenant and salt only."""
    priority: int | None = None
    """Extension: smaller goes first, among the requests of one `user_id`. Default 0; the nearest that the API key
    may."""
    service_tier: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None
    container: Unsupported = None
    mcp_servers: Unsupported = None

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """The one request. Raises RequestError."""
        chat, format = self.chat(), self.format
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "cache_salt", "priority")
        fields = {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = tuple(self.stop_sequences)
        if self.metadata and self.metadata.user_id:
            fields["user"] = self.metadata.user_id
        if self.thinking and self.thinking.type != "disabled" and self.thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
            fields["thinking_field"] = "thinking.budget_tokens"
        if chat.forced is not None:
            tools = [tool.given() for tool in self.tools or ()]
            fields["grammar"] = forced_grammar(chat.forced, tools, is_parallel=self.is_parallel)
            fields["grammar_field"] = "tools"
        elif format is not None:
            fields["grammar"] = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(format[1].schema_))
            fields["grammar_field"] = f"{format[0]}.schema"
        return [CompletionRequest(id=request_id, peer=peer, prompt=chat, **fields)]

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

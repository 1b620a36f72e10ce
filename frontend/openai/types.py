"""The bodies of the OpenAI API: what is taken, what is taken and ignored, and what is refused.

What would change the answer in a way that we cannot is refused by name: a client should learn that its grammar was not
used. Reference: https://platform.openai.com/docs/api-reference; the extensions have vLLM's names.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from core.types.errors import RequestError, UnsupportedField
from core.types.token_rules import MAX_BIAS
from frontend.http.open_requests import AskingBody
from frontend.openai.constraints import ResponseFormat, StructuredOutputs, grammar_of
from frontend.openai.fields import EMPTY, Ignored, Only, OpenAIObject, Unsupported
from frontend.openai.messages import ChatSettings, Messages, ToolChoice
from frontend.openai.tool_choice import forced_grammar
from frontend.text.completion_request import MAX_CHOICES, MAX_LOGPROBS, CompletionRequest

MAX_PROMPTS_TIMES_N = 1024  # choices of one HTTP request
DEFAULT_TEXT_TOKENS = 16  # of /v1/completions, by OpenAI's reference; a chat goes on for as long as the context lasts

Prompt = str | tuple[int, ...]
Biases = tuple[tuple[int, float], ...]  # (token id, what is added to its logit)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


_PromptsGiven = str | list[str] | list[int] | list[list[int]]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or many, as text or as token ids."""
    prompts = [value] if isinstance(value, str) or (_is_ids(value) and value) else value
    if isinstance(prompts, list) and prompts and all(isinstance(p, str) or _is_ids(p) for p in prompts):
        return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists; and not empty")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _biases(value: Any) -> Biases:
    if not isinstance(value, dict) or not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError('must be an object whose keys are token ids, such as {"42": -5}')
    if not all(type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS for bias in value.values()):
        raise ValueError(f"must have numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return tuple(sorted((int(key), float(bias)) for key, bias in value.items()))


def _strings(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


class StreamOptions(OpenAIObject):
    include_usage: bool | None = None


class _Sampled(AskingBody):
    """What both endpoints share."""

    model: str | None = None
    """Left out: the one that is served."""
    max_tokens: int | None = None
    """Left out: 16 of a text, and in a chat what the context has room for."""
    temperature: float | None = None
    """Default 1; 0 is greedy."""
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """Left out: drawn at random, once per request. Choice i of n has a seed of its own, made from this one."""
    stop: Annotated[list[str], BeforeValidator(_strings)] | None = None
    """A string or a list; the text ends before the first of them."""
    n: int | None = None
    """Choices; they share the prompt's KV. Of several prompts, 64 choices run at a time. Where several tenants have API
    keys, one of them has a part of `decode.max_running` (`router.tenant_share`)."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """With `stream` alone. `include_usage`: one more chunk before `[DONE]`, with the usage of all choices."""
    top_k: int | None = None
    """Extension. 0 and -1: off."""
    min_p: float | None = None
    """Extension."""
    repetition_penalty: float | None = None
    """Extension, of prompt and answer, as in transformers. Default 1."""
    min_tokens: int | None = None
    """Extension: no stop token before so many."""
    stop_token_ids: list[int] | None = None
    """Extension."""
    logit_bias: Annotated[Biases, PlainValidator(_biases, json_schema_input_type=dict[str, float])] | None = None
    """By token id: what is added to its logit. Logprobs are told as they are without it, and without the next two."""
    allowed_token_ids: list[int] | None = None
    """Extension: no other is chosen. An answer ends by itself only where an end-of-sequence token is among them."""
    bad_words: list[str] | None = None
    """Extension: no answer contains any of these as the tokenizer writes it, at the beginning or behind a space."""
    ignore_eos: bool | None = None
    """Extension: the model's end-of-sequence tokens do not end the answer."""
    include_stop_str_in_output: bool | None = None
    """Extension: the text keeps the stop string that ended it."""
    skip_special_tokens: bool | None = None
    """Extension. Default true."""
    cache_salt: str | None = None
    """Extension: cached prefixes are shared with requests of the same tenant and salt only."""
    priority: int | None = None
    """Extension: smaller goes first, among the requests of one `user`. Default 0; the nearest that the API key may.
    2^31 - 1 goes when nobody else waits."""
    return_token_ids: bool | None = None
    """Extension: `prompt_token_ids` and `token_ids` beside the text."""
    truncate_prompt_tokens: int | None = None
    """Extension: the prompt's last so many tokens are kept; -1: as many as leave the answer its room."""
    prompt_logprobs: int | None = None
    """Extension: of each of the prompt's tokens its log-probability and rank, and so many of the likeliest. Times the
    prompt's tokens at most 262,144, each token itself counted, too; not with `stream`."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, `json_schema` or `structural_tag`: the answer keeps to it, or ends by `length`. A `strict`
    schema that can not be enforced whole is refused; of others, what cannot be is passed over."""
    structured_outputs: StructuredOutputs | None = None
    """Extension: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar` (Lark or GBNF) and
    `structural_tag` (JSON)."""
    thinking_token_budget: int | None = None
    """Extension: when an answer has thought for so many tokens, the end of its thinking is written for it. 0: it does
    not think. For a model that thinks."""
    thinking_budget: int | None = None
    """The same, by Qwen's name."""
    user: str | None = None
    """Whose share it takes of what its tenant has."""
    # Of the API, and without effect on the answer.
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    # Of the API or of other servers, and not supported: they would change the answer.
    logprob_token_ids: Unsupported = None
    logits_processors: Unsupported = None
    custom_logit_processor: Unsupported = None
    stop_regex: Unsupported = None
    guided_json: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.json"))] = None
    guided_regex: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.regex"))] = None
    guided_choice: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.choice"))] = None
    guided_grammar: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.grammar"))] = None
    json_schema: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.json"))] = None
    regex: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.regex"))] = None
    ebnf: Annotated[Any, AfterValidator(Only(EMPTY, "structured_outputs.grammar"))] = None
    lora_path: Unsupported = None
    typical_p: Annotated[float | None, AfterValidator(Only((1.0,)))] = None
    length_penalty: Annotated[float | None, AfterValidator(Only((1.0,)))] = None
    use_beam_search: Annotated[bool | None, AfterValidator(Only((False,)))] = None
    add_special_tokens: bool | None = None
    """Extension. Default true of a text, and false of a chat, whose template writes them."""

    def _shared(self) -> dict[str, Any]:
        """The fields of CompletionRequest that the client set; those it left out keep their defaults. Raises
        RequestError."""
        reject_fields_of_others(self)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedField("prompt_logprobs: not with stream: true", param="prompt_logprobs")
        same = ("model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n", "top_k", "min_p",
                "repetition_penalty", "min_tokens", "logit_bias", "ignore_eos", "skip_special_tokens", "priority",
                "user", "cache_salt", "truncate_prompt_tokens", "add_special_tokens", "prompt_logprobs")  # fmt: skip
        fields = {name: getattr(self, name) for name in same}
        fields["include_stop"] = self.include_stop_str_in_output
        fields["stop"] = None if self.stop is None else tuple(self.stop)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            fields[name] = None if (given := getattr(self, name)) is None else tuple(given)
        fields |= self._thinking() | grammar_of(self.response_format, self.structured_outputs)
        return {name: value for name, value in fields.items() if value is not None}

    def _thinking(self) -> dict[str, Any]:
        """Raises RequestError."""
        budgets = {name: getattr(self, name) for name in ("thinking_token_budget", "thinking_budget")}
        given = {name: budget for name, budget in budgets.items() if budget is not None}
        if len(set(given.values())) > 1:
            text = "thinking_budget: is another name of thinking_token_budget, and says something else"
            raise RequestError(text, param="thinking_budget")
        return next(({"thinking_token_budget": given[name], "thinking_field": name} for name in given), {})


class TextBody(_Sampled):
    """POST /v1/completions"""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts, json_schema_input_type=_PromptsGiven)]
    """A string, a list of strings, token ids, or a list of such lists: one choice of n for each."""
    logprobs: int | None = None
    """So many of the likeliest tokens beside each chosen one."""
    echo: bool | None = None
    """The prompt before the answer; with `logprobs`, those of its tokens as well, as many as of `prompt_logprobs`. With
    `max_tokens: 0`, and without `stream`, it is all that is answered."""
    suffix: Annotated[str | None, AfterValidator(Only(("",)))] = None
    best_of: int | None = None
    """So many choices are computed, and counted; the `n` with the likeliest tokens on average are answered. More than
    `n` not with `stream`."""

    @property
    def is_prompt_all(self) -> bool:
        """There is no answer behind the prompt that is repeated."""
        return bool(self.echo) and self.max_tokens == 0

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """One request per prompt. Raises RequestError."""
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise RequestError("best_of: more than n is not with stream: true", param="best_of")
        num_choices = self.n or 1 if self.best_of is None else self.best_of
        if len(self.prompt) * min(max(1, num_choices), MAX_CHOICES) > MAX_PROMPTS_TIMES_N:
            raise RequestError(f"prompt: prompts times n is at most {MAX_PROMPTS_TIMES_N}", param="prompt")
        max_tokens = DEFAULT_TEXT_TOKENS if self.max_tokens is None else self.max_tokens
        shared = {**self._shared(), "max_tokens": max_tokens, "logprobs": self.logprobs, "best_of": self.best_of}
        if self.is_prompt_all:
            if self.stream:
                raise UnsupportedField("max_tokens: 0 is not with stream: true", param="max_tokens")
            shared["max_tokens"] = 1  # which is computed, and not said
        if self.echo and self.logprobs is not None:
            shared["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
            if self.prompt_logprobs is None or self.prompt_logprobs < self.logprobs:
                shared["prompt_logprobs_field"] = "logprobs"
        return [CompletionRequest(id=request_id, peer=peer, prompt=prompt, **shared) for prompt in self.prompt]


class ChatBody(_Sampled, ChatSettings):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; it wins."""
    logprobs: bool | None = None
    """True: of each chosen token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """More than 0 needs `logprobs: true`."""
    tool_choice: ToolChoice = None
    """`auto`, the default: the model may call tools; `none`: it is shown none; `required`: the answer is calls; or a
    function's name: it is a call of that."""
    parallel_tool_calls: bool | None = None
    """Default true; false: an answer ends after its first call."""
    chat_template: Unsupported = None
    documents: Unsupported = None
    input_ids: Unsupported = None
    thinking: Unsupported = None
    reasoning: Annotated[Any, AfterValidator(Only(EMPTY, "reasoning_effort"))] = None
    include_reasoning: Annotated[bool | None, AfterValidator(Only((True,)))] = None
    functions: Annotated[Any, AfterValidator(Only(EMPTY, "tools"))] = None
    function_call: Annotated[Any, AfterValidator(Only(("none", "auto"), "tool_choice"))] = None
    modalities: Annotated[Any, AfterValidator(Only((["text"],)))] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Annotated[Any, AfterValidator(Only(()))] = None  # empty ones ask for it, too
    verbosity: Annotated[Any, AfterValidator(Only(("medium",)))] = None

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """The one request. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: set logprobs to true as well", param="top_logprobs")
        is_parallel, forced = self.parallel_tool_calls is not False, self._forced()
        chat = self.chat(self.messages, has_tools=self.tool_choice != "none", is_parallel=is_parallel, forced=forced)
        max_tokens, field = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None:
            max_tokens, field = self.max_completion_tokens, "max_completion_tokens"
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        fields = {**self._shared(), "max_tokens": max_tokens, "max_tokens_field": field, "logprobs": logprobs}
        if forced is not None:
            if self.structured_outputs:  # of all of an answer; a response_format is of its text, of which there is none
                text = "tool_choice: an answer that is bound to be a call keeps to no structured_outputs beside that"
                raise RequestError(text, param="tool_choice")
            fields["grammar"] = forced_grammar(forced, self.tools or (), is_parallel=is_parallel)
            fields["grammar_field"] = "tools"
        return [CompletionRequest(id=request_id, peer=peer, prompt=chat, **fields)]

    def _forced(self) -> str | None:
        """The tool that the answer is bound to call, "" for any; None: it is bound to nothing."""
        if self.tool_choice is None or self.tool_choice in ("none", "auto"):
            return None
        return "" if isinstance(self.tool_choice, str) else self.tool_choice.name


def reject_fields_of_others(body: OpenAIObject) -> None:
    """Raises UnsupportedField for a field that another endpoint takes: here it would change nothing."""
    for name, value in (body.model_extra or {}).items():
        if name in {*TextBody.model_fields, *ChatBody.model_fields} and value not in (None, False, [], {}):
            raise UnsupportedField(f"{name}: this endpoint does not take it", param=name)

"""Request bodies of the OpenAI API: supported, ignored and unsupported fields.

An unsupported field that would change the answer is rejected by name, so that a client learns, for example, that its
grammar was not applied. Reference: https://platform.openai.com/docs/api-reference; extensions are named as in vLLM.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from core.types.errors import RequestError, UnsupportedField
from core.types.request import MAX_BIAS
from frontend.http.request_contexts import GenerationBody
from frontend.openai.constraints import ResponseFormat, StructuredOutputs, forced_grammar, grammar_of, tool_not_found
from frontend.openai.fields import EMPTY, Ignored, Integer, Only, OpenAIObject, Unsupported, whole
from frontend.openai.messages import (
    ChatSettings,
    FunctionAsTool,
    Messages,
    ThinkingGiven,
    ToolChoice,
    ToolNamed,
    ToolsAllowed,
)
from frontend.text.completion_request import MAX_CHOICES, MAX_LOGPROBS, CompletionRequest

MAX_PROMPTS_TIMES_N = 1024  # choices of one HTTP request
DEFAULT_TEXT_TOKENS = 16  # of /v1/completions, as in OpenAI's reference; a chat's default is the rest of the context

Prompt = str | tuple[int, ...]
Biases = tuple[tuple[int, float], ...]  # (token id, bias added to its logit)
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(whole)]
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


_PromptsGiven = str | list[str] | list[int] | list[list[int]]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Parse one prompt or many, as text or as token ids. Raises ValueError."""
    prompts = [value] if isinstance(value, str) or (_is_ids(value) and value) else value
    if isinstance(prompts, list) and prompts and all(isinstance(p, str) or _is_ids(p) for p in prompts):
        return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)
    raise ValueError("must be a non-empty string, list of strings, list of token ids, or list of lists of token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _biases(value: Any) -> Biases:
    if not isinstance(value, dict) or not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError('must be an object whose keys are token ids, such as {"42": -5}')
    if not all(type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS for bias in value.values()):
        raise ValueError(f"must have values from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return tuple(sorted((int(key), float(bias)) for key, bias in value.items()))


def _strings(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


class StreamOptions(OpenAIObject):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Sampled(GenerationBody):
    """Fields common to both endpoints."""

    model: str | None = None
    """Default: the model of the router's own deployment."""
    max_tokens: Integer | None = None
    """Default: 16 for a text; for a chat, the model's `max_tokens` in `/v1/models`, else the rest of the context."""
    temperature: float | None = None
    """0 means greedy decoding. Default, as of `top_p`, `top_k`, `min_p` and the penalties: the model's, as in
    `default_sampling_params` of `/v1/models`."""
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Integer | None = None
    """Default: random, once per request. Choice i of n uses a seed derived from this one."""
    stop: Annotated[list[str], BeforeValidator(_strings)] | None = None
    """A string or a list of strings. The text ends before the first match."""
    n: Integer | None = None
    """Number of choices; they share the prompt's KV cache. With several prompts, 64 choices run at a time. If several
    tenants have API keys, `router.tenant_share` limits one tenant to a part of `decode.max_running`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Only with `stream`. `include_usage` adds a chunk before `[DONE]` with the usage of all choices; with
    `continuous_usage_stats`, an extension, each chunk also has the usage of its choice so far."""
    top_k: Integer | None = None
    """Extension. 0 and -1 turn it off."""
    min_p: float | None = None
    """Extension."""
    repetition_penalty: float | None = None
    """Extension. Applied to tokens of prompt and answer, as in transformers."""
    min_tokens: Integer | None = None
    """Extension: no stop token is sampled, and no stop string matches, before this many tokens."""
    stop_token_ids: list[Integer] | None = None
    """Extension: additional tokens that end the answer."""
    logit_bias: Annotated[Biases, PlainValidator(_biases, json_schema_input_type=dict[str, float])] | None = None
    """Map from token id to a bias added to its logit. Reported logprobs exclude it, as well as `allowed_token_ids` and
    `bad_words`."""
    allowed_token_ids: list[Integer] | None = None
    """Extension: only these tokens are sampled. Unless they include an end-of-sequence token, the answer ends by
    length or another stop condition."""
    bad_words: list[str] | None = None
    """Extension: words banned from the answer, in the tokenization at the beginning of a text and after a space."""
    ignore_eos: bool | None = None
    """Extension: end-of-sequence tokens of the model do not end the answer."""
    include_stop_str_in_output: bool | None = None
    """Extension: keep the matched stop string in the text."""
    skip_special_tokens: bool | None = None
    """Extension. Default true."""
    cache_salt: str | None = None
    """Extension: share cached prefixes only with requests of the same tenant and salt."""
    priority: Integer | None = None
    """Extension: smaller runs first, among the requests of one `user`. Default 0. Clamped to the range of the API key.
    2^31 - 1 runs only when no other request waits."""
    return_token_ids: bool | None = None
    """Extension: return `prompt_token_ids` and `token_ids` beside the text."""
    truncate_prompt_tokens: Integer | None = None
    """Extension: keep only the last tokens of the prompt, this many; -1: as many as leave room for the answer."""
    prompt_logprobs: Integer | None = None
    """Extension: return log-probability and rank of each prompt token, and this many of the most likely tokens. Limit:
    prompt tokens times (`prompt_logprobs` + 1) must not exceed 262,144. Not with `stream`."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, `json_schema` or `structural_tag`. The answer conforms to it unless it ends by `length`. A
    `strict` schema with parts that cannot be enforced is rejected; in other schemas, such parts are ignored."""
    structured_outputs: StructuredOutputs | None = None
    """Extension: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar` (Lark or GBNF) and
    `structural_tag` (JSON)."""
    thinking_token_budget: Integer | None = None
    """Extension: maximum number of thinking tokens; the server then writes the end of thinking. 0 disables thinking.
    Only for models that think."""
    thinking_budget: Integer | None = None
    """Alias of `thinking_token_budget`, named as in Qwen's API."""
    user: str | None = None
    """Id of the end user. Users of a tenant share its capacity fairly."""
    # Fields of OpenAI's API without effect on the answer.
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    # Fields of OpenAI or other servers that are rejected, because they would change the answer.
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
    """Extension. Default true for a text, and false for a chat, whose template adds them."""

    def _shared(self) -> dict[str, Any]:
        """Return the CompletionRequest fields that the client set. Raises RequestError."""
        reject_fields_of_others(self)
        if self.stream_options is not None and not self.stream:
            raise RequestError.at("stream_options", "requires stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedField.at("prompt_logprobs", "cannot be combined with stream: true")
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
        """Return the thinking budget and its field name. Raises RequestError."""
        budget, alias = self.thinking_token_budget, self.thinking_budget
        if None not in (budget, alias) and budget != alias:
            problem = "conflicts with thinking_token_budget, of which it is an alias"
            raise RequestError.at("thinking_budget", problem)
        if budget is not None:
            return {"thinking_token_budget": budget, "thinking_field": "thinking_token_budget"}
        if alias is not None:
            return {"thinking_token_budget": alias, "thinking_field": "thinking_budget"}
        thinking: ThinkingGiven | None = getattr(self, "thinking", None)
        return thinking.budget_fields if thinking else {}


class TextBody(_Sampled):
    """POST /v1/completions"""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts, json_schema_input_type=_PromptsGiven)]
    """A string, a list of strings, token ids, or a list of lists of token ids. Each prompt gets n choices."""
    logprobs: Integer | None = None
    """Return this many of the most likely tokens beside each sampled one."""
    echo: bool | None = None
    """Return the prompt before the answer, with `logprobs` also the log-probabilities of its tokens (limited as in
    `prompt_logprobs`). With `max_tokens: 0`, and without `stream`, nothing follows the prompt."""
    suffix: Annotated[str | None, AfterValidator(Only(("",)))] = None
    best_of: Integer | None = None
    """Run this many choices, which all count as usage, and return the `n` with the highest mean log-probability. With
    `stream`, must equal `n`."""

    @property
    def is_prompt_all(self) -> bool:
        """True if the response is the prompt alone, or empty without `echo`."""
        return self.max_tokens == 0

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return one request per prompt. Raises RequestError."""
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise RequestError.at("best_of", "cannot be combined with stream: true unless it equals n")
        num_choices = self.n or 1 if self.best_of is None else self.best_of
        num = len(self.prompt) * min(max(1, num_choices), MAX_CHOICES)
        if num > MAX_PROMPTS_TIMES_N:
            problem = f"prompts times n is {num}; at most {MAX_PROMPTS_TIMES_N} are accepted"
            raise RequestError.at("prompt", problem)
        max_tokens = DEFAULT_TEXT_TOKENS if self.max_tokens is None else self.max_tokens
        shared = {**self._shared(), "max_tokens": max_tokens, "logprobs": self.logprobs, "best_of": self.best_of}
        if self.is_prompt_all:
            if self.stream:
                raise UnsupportedField.at("max_tokens", "0 cannot be combined with stream: true")
            shared["max_tokens"] = 1  # the engine needs at least one token; it is not returned
        if self.echo and self.logprobs is not None:
            shared["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
            if self.prompt_logprobs is None or self.prompt_logprobs < self.logprobs:
                shared["prompt_logprobs_field"] = "logprobs"
        return [CompletionRequest(id=request_id, peer=peer, prompt=prompt, **shared) for prompt in self.prompt]


class ChatBody(_Sampled, ChatSettings):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Integer | None = None
    """The newer name of `max_tokens`; takes precedence over it."""
    logprobs: bool | None = None
    """Return the log-probability of each sampled token."""
    top_logprobs: TopLogprobs | None = None
    """Return this many of the most likely tokens as well. Requires `logprobs: true`."""
    tool_choice: ToolChoice = None
    """`auto` (default): the model may call tools. `none`: tools are hidden from the model. `required`: the answer
    consists of calls. A function's name: the answer is a call of that function. `allowed_tools`: the other tools are
    hidden from the model."""
    parallel_tool_calls: bool | None = None
    """Default true. If false, the answer ends after its first call."""
    chat_template: Unsupported = None
    documents: Unsupported = None
    input_ids: Unsupported = None
    include_reasoning: bool | None = None
    """Extension. If false, the answer's thinking is left out."""
    functions: Annotated[Any, AfterValidator(Only(EMPTY, "tools"))] = None
    function_call: Annotated[Any, AfterValidator(Only(("none", "auto"), "tool_choice"))] = None
    modalities: Annotated[Any, AfterValidator(Only((["text"],)))] = None
    audio: Unsupported = None
    prediction: Ignored = None
    moderation: Unsupported = None
    web_search_options: Annotated[Any, AfterValidator(Only(()))] = None  # an empty object requests it, too

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return the one request. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError.at("top_logprobs", "requires logprobs: true")
        is_parallel, forced = self.parallel_tool_calls is not False, self._forced()
        chat = self.chat(self.messages, has_tools=self.tool_choice != "none", is_parallel=is_parallel, forced=forced)
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        fields = {**self._shared(), "max_tokens": getattr(self, field), "max_tokens_field": field, "logprobs": logprobs}
        if forced is not None:
            # structured_outputs constrains the whole answer; response_format only its text, and a forced call has none.
            if self.structured_outputs:
                problem = "a required call cannot be combined with structured_outputs"
                raise RequestError.at("tool_choice", problem)
            fields["grammar"] = forced_grammar(forced, self.function_tools, is_parallel=is_parallel)
            fields["grammar_field"] = "tools"
        return [CompletionRequest(id=request_id, peer=peer, prompt=chat, **fields)]

    @property
    def hides_thinking(self) -> bool:
        return self.include_reasoning is False or bool(self.reasoning and self.reasoning.exclude)

    @property
    def function_tools(self) -> list[FunctionAsTool]:
        """The functions that the choice allows. Raises RequestError."""
        functions, choice = super().function_tools, self.tool_choice
        if not isinstance(choice, ToolsAllowed):
            return functions
        names = [function.name for function in functions]
        if missing := next((name for name in choice.names if name not in names), None):
            raise tool_not_found(missing)
        return [function for function in functions if function.name in choice.names]

    def _forced(self) -> str | None:
        """Return the name of the tool that must be called, "" for any, or None if no call is required."""
        match self.tool_choice:
            case "required" | ToolsAllowed(mode="required"):
                return ""
            case ToolNamed(name):
                return name
        return None


class TokenizeBody(GenerationBody, ChatSettings):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    """Text to tokenize. Set either this or `messages`."""
    messages: Messages | None = None
    """Chat to tokenize, as in /v1/chat/completions."""
    add_special_tokens: bool | None = None
    """Default true for a prompt, as in /v1/completions, and false for messages, whose template adds them."""
    return_token_strs: bool | None = None

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return the one request. Raises RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError.at("prompt", "set either prompt or messages")
        prompt = self.prompt or "" if self.messages is None else self.chat(self.messages)
        return [
            CompletionRequest(
                id=request_id,
                peer=peer,
                prompt=prompt,
                model=self.model or "",
                add_special_tokens=self.add_special_tokens,
            )
        ]


class DetokenizeBody(GenerationBody):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        return [CompletionRequest(id=request_id, peer=peer, prompt=tuple(self.tokens), model=self.model or "")]


def reject_fields_of_others(body: OpenAIObject) -> None:
    """Reject a field of the other endpoint, which would have no effect here. Raises UnsupportedField."""
    for name, value in (body.model_extra or {}).items():
        is_neutral = value in (None, False, [], {}, "") or (name, value) == ("best_of", 1)
        if name in {*TextBody.model_fields, *ChatBody.model_fields} and not is_neutral:
            raise UnsupportedField.at(name, "not supported by this endpoint")

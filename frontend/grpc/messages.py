"""Conversion between messages of cluster.v1.Inference and requests and events."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from core.rpc import inference_pb2 as pb
from core.types.errors import CapacityError, ClusterError, ContextLengthExceeded, RequestError, outcome_of
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import ANY_OBJECT, MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, Grammar, GrammarKind
from frontend.chat.call_shape import object_of
from frontend.chat.chat import Chat, opens_answer
from frontend.openai.constraints import forced_grammar
from frontend.openai.messages import FUNCTION_NAME, MAX_CALLS, MAX_TOOLS, FunctionAsTool
from frontend.text.completion_request import (
    MAX_ALL_CALLS,
    MAX_MESSAGES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOOLS_CHARS,
    CompletionRequest,
)
from frontend.text.events import Delta, Event, Finished, Summary
from frontend.text.tokenizer import Tokenizer

# Cached messages of one token, some 9 MB at most. Most output uses a few thousand distinct tokens.
_MAX_CACHED, _MAX_CACHED_CHARS = 8192, 64
_SAMPLING = pb.SamplingParams.DESCRIPTOR.fields_by_name
_MAX_REPEATED = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKENS,
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "bad_words": MAX_BAD_WORDS,
}
_OF_CHAT = ("messages", "tools", "tool_choice", "template_variables", "reasoning_effort", "continue_final_message")
_TOOL_NAME = re.compile(FUNCTION_NAME)
_RENAMED = {"user": "tenant", "tokens": "token_ids", **{name: f"chat.{name}" for name in _OF_CHAT}}


def request_of(
    message: pb.GenerateRequest, *, deadline_s: float | None, max_context: int, peer: str = ""
) -> CompletionRequest:
    """Convert a request. Raises RequestError if there is no input, or too much of it. Other checks are common to both
    endpoints and happen later."""
    _check_counts(message, max_context)
    sampling = message.sampling
    is_set = [name for name, field in _SAMPLING.items() if field.has_presence and sampling.HasField(name)]
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in is_set}
    for name in ("stop", "stop_token_ids", "bad_words"):
        fields[name] = tuple(getattr(sampling, name))
    fields["logit_bias"] = tuple(sorted(sampling.logit_bias.items()))
    fields["allowed_token_ids"] = tuple(sampling.allowed_token_ids) or None
    prompt = _prompt_of(message)
    return CompletionRequest(
        id=message.request_id or uuid.uuid4().hex,
        prompt=prompt,
        prompt_field="token_ids" if isinstance(prompt, tuple) else "prompt",
        model=message.model,
        user=message.tenant,
        peer=peer,
        cache_salt=message.cache_salt,
        priority=message.priority,
        deadline_s=deadline_s,
        **_grammar_of(message, prompt),
        **fields,
    )


def tokenize_request_of(message: pb.TokenizeRequest, *, peer: str) -> CompletionRequest:
    """Convert a request. Raises RequestError if there is no input, or too much of it."""
    _check_chat(message.chat)
    if message.WhichOneof("input") is None:
        raise RequestError("set one of prompt and chat", param="prompt")
    prompt = chat_of(message.chat) if message.WhichOneof("input") == "chat" else message.prompt
    has_special = message.add_special_tokens if message.HasField("add_special_tokens") else None
    return CompletionRequest(
        id=uuid.uuid4().hex, prompt=prompt, model=message.model, peer=peer, add_special_tokens=has_special
    )


def detokenize_request_of(message: pb.DetokenizeRequest, *, max_context: int, peer: str) -> CompletionRequest:
    """Convert a request. Raises RequestError if there are more tokens than the context holds."""
    _check_context("tokens", len(message.token_ids), max_context)
    return CompletionRequest(id=uuid.uuid4().hex, prompt=tuple(message.token_ids), model=message.model, peer=peer)


def response_of(event: Event, *, request_id: str, tokenizer: Tokenizer) -> pb.GenerateResponse:
    message = pb.GenerateResponse()
    match event:
        case Delta():
            _fill(message.delta, event, tokenizer)
            return message
        case Finished():
            finished = pb.Finished(choice=event.choice, finish_reason=event.word, stop=event.stop)
            return pb.GenerateResponse(finished=finished)
        case Summary():
            route = asdict(event.route)
            del route["cached_tokens"], route["drafts"]  # part of the usage
            trace = pb.Trace(ttft_ms=event.ttft_s * 1e3, itl_ms=event.itl_s * 1e3, **route)
            usage = pb.Usage(**asdict(event.usage))
            return pb.GenerateResponse(summary=pb.Summary(request_id=request_id, usage=usage, trace=trace))


@lru_cache(maxsize=_MAX_CACHED)
def _plain_delta(choice: int, token_id: int, text: str) -> bytes:
    return pb.GenerateResponse(delta=pb.Delta(choice=choice, text=text, token_ids=[token_id])).SerializeToString()


def response_bytes(event: Event, *, request_id: str, tokenizer: Tokenizer) -> bytes:
    """Serialize a response. Most carry only the text of one token, and tokens repeat, so those are cached."""
    if isinstance(event, Delta) and len(event.tokens) == 1 and len(event.text) <= _MAX_CACHED_CHARS:
        [token] = event.tokens
        if token.logprob is None and not event.thinking and not event.calls:
            return _plain_delta(event.choice, token.token_id, event.text)
    return response_of(event, request_id=request_id, tokenizer=tokenizer).SerializeToString()


def prompt_logprobs_of(
    prompt_ids: Sequence[int], logprobs: PromptLogprobs, tokenizer: Tokenizer
) -> pb.GenerateResponse:
    """Return the message with the log-probabilities of some of a prompt's tokens."""
    message = pb.PromptLogprobs()
    for token_id, logprob, rank, ids, values in zip(
        prompt_ids, *(column.tolist() for column in logprobs.columns), strict=True
    ):
        message.tokens.add(
            token_id=token_id,
            token=tokenizer.token_text(token_id),
            logprob=logprob,
            rank=rank,
            top=_top(zip(ids, values, strict=True), tokenizer),
        )
    return pb.GenerateResponse(prompt_logprobs=message)


def field_of(param: str) -> str:
    """Return the path in GenerateRequest of an error's `param`."""
    name = re.split(r"\W", param, maxsplit=1)[0]  # messages[0].role -> messages
    return (f"sampling.{name}" if name in _SAMPLING else _RENAMED.get(name, name)) + param[len(name) :]


def _check_counts(message: pb.GenerateRequest, max_context: int) -> None:
    """Check the lengths of repeated fields before their elements are converted."""
    _check_chat(message.chat)
    for name, limit in _MAX_REPEATED.items():
        _check_count(name, len(getattr(message.sampling, name)), limit)
    _check_context("token_ids", len(message.token_ids.ids), max_context)


def _check_chat(chat: pb.Chat) -> None:
    _check_count("messages", len(chat.messages), MAX_MESSAGES)
    num_calls = 0
    for number, message in enumerate(chat.messages):
        if message.tool_calls:
            _check_count(f"messages[{number}].tool_calls", len(message.tool_calls), MAX_CALLS)
            num_calls += len(message.tool_calls)
            _check_count("messages", num_calls, MAX_ALL_CALLS, of="calls in all")
    _check_count("tools", len(chat.tools), MAX_TOOLS)
    _check_count("tools", sum(len(tool.parameters) for tool in chat.tools), MAX_TOOLS_CHARS, of="characters in all")


def _check_context(param: str, number: int, limit: int) -> None:
    if number > limit:
        raise ContextLengthExceeded(f"this model's context holds {limit} tokens; the request has {number}", param=param)


def _check_count(param: str, number: int, limit: int, *, of: str = "") -> None:
    if number > limit:
        raise RequestError(f"{param}: has {number}; at most {limit}{' ' + of if of else ''} are accepted", param=param)


def _grammar_of(message: pb.GenerateRequest, prompt: str | Chat | tuple[int, ...]) -> dict[str, Any]:
    if isinstance(prompt, Chat) and (forced := forced_grammar_of(message.chat, prompt)) is not None:
        if message.HasField("grammar"):
            raise RequestError("tool_choice: a required call cannot be combined with grammar", param="tool_choice")
        return {"grammar": forced, "grammar_field": "tools"}
    if not message.HasField("grammar"):
        return {}
    kind, given = message.grammar.WhichOneof("kind"), message.grammar
    match kind:
        case "json_object":
            grammar = ANY_OBJECT
        case "choice":
            grammar = Grammar.of_choice(given.choice.texts, "grammar.choice")
        case "json_schema" | "lenient_json_schema" | "regex" | "structural_tag":
            grammar = Grammar(kind=GrammarKind(kind), text=getattr(given, kind))
        case "grammar":
            grammar = Grammar(kind=GrammarKind.LARK, text=given.grammar)
        case _:
            raise RequestError("grammar: set one of its fields", param="grammar")
    return {"grammar": grammar, "grammar_field": f"grammar.{kind}"}


def _prompt_of(message: pb.GenerateRequest) -> str | Chat | tuple[int, ...]:
    match message.WhichOneof("input"):
        case "prompt":
            return message.prompt
        case "chat":
            return chat_of(message.chat)
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise RequestError("set one of prompt, chat and token_ids", param="prompt")


def _fill(message: pb.Delta, delta: Delta, tokenizer: Tokenizer) -> None:
    """Fill a delta in place, without empty fields, because there is one per token."""
    if delta.choice:
        message.choice = delta.choice
    message.text = delta.text_with_rest
    if delta.thinking:
        message.reasoning = delta.thinking
    if delta.calls:
        message.tool_calls.extend(
            pb.ToolCallDelta(index=call.number, id=call.id, name=call.name, arguments=call.arguments)
            for call in delta.calls
            if call.broken is None
        )
    message.token_ids.extend([token.token_id for token in delta.tokens])
    for token in delta.tokens if delta.has_logprobs else ():
        assert token.logprob is not None
        message.logprobs.add(
            token_id=token.token_id,
            token=tokenizer.token_text(token.token_id),
            logprob=token.logprob.logprob,
            top=_top(token.logprob.top, tokenizer),
        )


def _top(logprobs: Iterable[tuple[int, float]], tokenizer: Tokenizer) -> list[pb.TopLogprob]:
    return [pb.TopLogprob(token_id=id, token=tokenizer.token_text(id), logprob=logprob) for id, logprob in logprobs]


def status_of(error: Exception) -> Status:
    """Return the status with ErrorInfo (the code as its reason), and BadRequest or RetryInfo where they apply. The
    message names the field of GenerateRequest. The text of an unexpected exception is withheld."""
    outcome = outcome_of(error)
    details: list[Message] = [ErrorInfo(reason=outcome.code.upper(), domain=pb.DESCRIPTOR.package)]
    message = str(error) if isinstance(error, ClusterError) else "internal error; see the router's log"
    if isinstance(error, RequestError) and error.param is not None:
        field, param = field_of(error.param), f"{error.param}:"
        if message.startswith(param):
            message = f"{field}:{message.removeprefix(param)}"
        violation = BadRequest.FieldViolation(field=field, description=message)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityError):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(RetryInfo(retry_delay=delay))
    packed = [AnyMessage() for _ in details]
    for any_message, detail in zip(packed, details, strict=True):
        any_message.Pack(detail)
    code = getattr(grpc.StatusCode, outcome.grpc).value[0]
    return Status(code=code, message=message, details=packed)


def chat_of(chat: pb.Chat) -> Chat:
    """Convert a chat. Raises RequestError."""
    add_generation_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    opens = opens_answer(add_generation_prompt, is_continued=chat.continue_final_message)
    tools = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(chat.tools))
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RequestError("tools: two tools have the same name", param="tools")
    return Chat(
        messages=tuple(map(_message, chat.messages)),
        variables=object_of(chat.template_variables, "template_variables"),
        reasoning_effort=chat.reasoning_effort or None,
        tools=() if chat.tool_choice.none else tools,
        is_parallel=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
        forced=_forced(chat),
        is_continued=chat.continue_final_message,
        opens_answer=opens,
    )


def forced_grammar_of(chat: pb.Chat, made: Chat) -> Grammar | None:
    """Return the grammar of an answer that must be calls, or None. made: `chat`, converted. Raises RequestError."""
    if made.forced is None:
        return None
    functions = [
        FunctionAsTool(**converted["function"], strict=tool.strict)
        for tool, converted in zip(chat.tools, made.tools, strict=True)
    ]
    return forced_grammar(made.forced, functions, is_parallel=made.is_parallel)


def _forced(chat: pb.Chat) -> str | None:
    kind = chat.tool_choice.WhichOneof("kind")
    if kind not in ("required", "name") or not getattr(chat.tool_choice, kind):
        return None
    if not chat.tools:
        raise RequestError("tool_choice: requires tools", param="tool_choice")
    return chat.tool_choice.name


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if value := getattr(message, name):
            converted[name] = value
    if message.tool_calls:
        converted["content"] = message.content or None
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return converted


def _tool(tool: pb.Tool, path: str) -> dict[str, Any]:
    if not _TOOL_NAME.fullmatch(tool.name):
        text = f"{path}.name: must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -"
        raise RequestError(text, param=f"{path}.name")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = object_of(tool.parameters, f"{path}.parameters")
    return {"type": "function", "function": function}

"""Conversion between messages of cluster.v1.Inference and requests and events."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
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
from frontend.chat.chat import Chat
from frontend.grpc.chat import chat_of, forced_grammar_of, tool_calls_of
from frontend.openai.messages import MAX_CALLS, MAX_TOOLS
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
_OF_CHAT = ("messages", "tools", "tool_choice", "template_variables", "reasoning_effort", "continue_final_message")
_RENAMED = {"user": "tenant", "tokens": "token_ids", **{name: f"chat.{name}" for name in _OF_CHAT}}


def request_of(
    message: pb.GenerateRequest, *, deadline_s: float | None, max_context: int, peer: str = ""
) -> CompletionRequest:
    """Convert a request. Raises RequestError if there is no input, or too much of it. Other checks are common to both
    endpoints and happen later."""
    _check_counts(message, max_context)
    fields: dict[str, Any] = {name: getattr(message.sampling, name) for name in _SAMPLING if _is_set(message, name)}
    for name in ("stop", "stop_token_ids", "bad_words"):
        fields[name] = tuple(getattr(message.sampling, name))
    fields["logit_bias"] = tuple(sorted(message.sampling.logit_bias.items()))
    fields["allowed_token_ids"] = tuple(message.sampling.allowed_token_ids) or None
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
            usage = pb.Usage(**asdict(event.usage))
            return pb.GenerateResponse(summary=pb.Summary(request_id=request_id, usage=usage, trace=_trace(event)))


class ResponseBytes:
    """Serializer of responses with a cache: most carry the text of one token and nothing else, and tokens repeat."""

    def __init__(self) -> None:
        self._of_plain = lru_cache(maxsize=_MAX_CACHED)(_plain_delta)

    def of(self, event: Event, *, request_id: str, tokenizer: Tokenizer) -> bytes:
        if isinstance(event, Delta) and len(event.tokens) == 1 and len(event.text) <= _MAX_CACHED_CHARS:
            [token] = event.tokens
            if token.logprob is None and not event.thinking and not event.calls:
                return self._of_plain(event.choice, token.token_id, event.text)
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
            top=[
                pb.TopLogprob(token_id=other, token=tokenizer.token_text(other), logprob=value)
                for other, value in zip(ids, values, strict=True)
            ],
        )
    return pb.GenerateResponse(prompt_logprobs=message)


def field_of(param: str) -> str:
    """Return the path in GenerateRequest of an error's `param`."""
    name = re.split(r"\W", param, maxsplit=1)[0]  # messages[0].role -> messages
    return (f"sampling.{name}" if name in _SAMPLING else _RENAMED.get(name, name)) + param[len(name) :]


def _check_counts(message: pb.GenerateRequest, max_context: int) -> None:
    """Check the lengths of repeated fields before their elements are converted."""
    _check_chat(message.chat)
    _check_count("stop", len(message.sampling.stop), MAX_STOPS)
    _check_count("stop_token_ids", len(message.sampling.stop_token_ids), MAX_STOP_TOKENS)
    _check_count("logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIAS)
    _check_count("allowed_token_ids", len(message.sampling.allowed_token_ids), MAX_ALLOWED_TOKENS)
    _check_count("bad_words", len(message.sampling.bad_words), MAX_BAD_WORDS)
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


def _check_context(param: str, number: int, max_context: int) -> None:
    if number > max_context:
        text = f"this model's context holds {max_context} tokens; the request has {number}"
        raise ContextLengthExceeded(text, param=param)


def _check_count(param: str, number: int, limit: int, *, of: str = "") -> None:
    if number > limit:
        raise RequestError(f"{param}: has {number}; at most {limit}{' ' + of if of else ''} are accepted", param=param)


def _is_set(message: pb.GenerateRequest, name: str) -> bool:
    return _SAMPLING[name].has_presence and message.sampling.HasField(name)


def _grammar_of(message: pb.GenerateRequest, prompt: str | Chat | tuple[int, ...]) -> dict[str, Any]:
    if isinstance(prompt, Chat) and (forced := forced_grammar_of(message.chat, prompt)) is not None:
        if message.HasField("grammar"):
            text = "tool_choice: a required call cannot be combined with grammar"
            raise RequestError(text, param="tool_choice")
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


def _plain_delta(choice: int, token_id: int, text: str) -> bytes:
    delta = pb.Delta(choice=choice, text=text, token_ids=[token_id])
    return pb.GenerateResponse(delta=delta).SerializeToString()


def _fill(message: pb.Delta, delta: Delta, tokenizer: Tokenizer) -> None:
    """Fill a delta in place, without empty fields, because there is one per token."""
    if delta.choice:
        message.choice = delta.choice
    message.text = delta.text_with_rest
    if delta.thinking:
        message.reasoning = delta.thinking
    if delta.calls:
        message.tool_calls.extend(tool_calls_of(delta))
    message.token_ids.extend([token.token_id for token in delta.tokens])
    for token in delta.tokens if delta.has_logprobs else ():
        assert token.logprob is not None
        message.logprobs.add(
            token_id=token.token_id,
            token=tokenizer.token_text(token.token_id),
            logprob=token.logprob.logprob,
            top=[
                pb.TopLogprob(token_id=token_id, token=tokenizer.token_text(token_id), logprob=logprob)
                for token_id, logprob in token.logprob.top
            ],
        )


def _trace(summary: Summary) -> pb.Trace:
    route = asdict(summary.route)
    del route["cached_tokens"], route["drafts"]  # part of the usage
    return pb.Trace(ttft_ms=summary.ttft_s * 1e3, itl_ms=summary.itl_s * 1e3, **route)


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

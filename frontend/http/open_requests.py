"""Opening of generation requests over HTTP: read, check and tokenize; common to all APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request

from frontend.access.request_context import RequestContext
from frontend.http.request_contexts import HttpRequestContexts, client_of, peer_of
from frontend.http.tracing import trace_of
from frontend.openai.fields import OpenAIObject, ignored_header
from frontend.text.completion import Completion
from frontend.text.completion_request import CompletionRequest, check_prompt_numbers, check_total
from frontend.text.models import Models
from frontend.text.prompt_encoder import num_chars

MAX_REPEATED = 2**23  # characters of prompts repeated in one response
ID_CHARS = 8  # characters that a token id counts as


class GenerationBody(OpenAIObject):
    """Body of a generation request."""

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return at least one request. Raises RequestError."""
        raise NotImplementedError


B = TypeVar("B", bound=GenerationBody)


@dataclass(frozen=True)
class ParsedBody(Generic[B]):
    """Parsed body with everything derived from visiting all of it."""

    body: B
    requests: Sequence[CompletionRequest]  # num_chars has been computed
    ignored: Mapping[str, str]  # headers that list ignored fields

    @classmethod
    def of(cls, request: Request, body: B) -> ParsedBody[B]:
        """Build the requests of a body. Raises RequestError."""
        requests = body.requests(request.state.request_id, peer=peer_of(request))
        for one in requests:
            num_chars(one.prompt)  # a chat caches it
        return cls(body, requests, ignored_header(body))


class Opener:
    """Opens completions. Every prompt of a body is checked and tokenized before any is dispatched."""

    def __init__(
        self, models: Models, request_contexts: HttpRequestContexts, *, clamps_max_tokens: bool = False
    ) -> None:
        """clamps_max_tokens: treat max_tokens as an upper bound, whatever the API."""
        self._clamps_max_tokens = clamps_max_tokens
        self._models = models
        self._request_contexts = request_contexts

    async def read(self, kind: type[B], request: Request) -> ParsedBody[B]:
        """Read the body. Raises what BodyReader.read raises."""
        return await self._request_contexts.read(kind, request, partial(ParsedBody.of, request))

    async def open(self, parsed: ParsedBody[B], request: Request, request_context: RequestContext) -> list[Completion]:
        """Return one completion for each request, nothing charged yet. Raises RequestError and other ClusterErrors."""
        opened = list[Completion]()
        with self._request_contexts.audited(request):
            served = self._models.find(parsed.requests[0].model)
            requests = [client_of(request).bound(self._clamped(one)) for one in parsed.requests]
            request_context.check(sum(served.prompts.least_tokens(one) for one in requests))
        total_chars = sum(num_chars(one.prompt) for one in requests)
        for one in requests:
            num_other_chars = total_chars - num_chars(one.prompt)
            opened.append(await served.open(one, num_other_chars=num_other_chars, trace=trace_of(request.scope)))
            num_answers = sum(completion.max_answer_tokens for completion in opened)
            check_total(num_answers, served.model, param=one.max_tokens_field)
            num_logprobs = sum(completion.n * completion.num_prompt_numbers for completion in opened)
            check_prompt_numbers(num_logprobs, param=one.prompt_logprobs_field)
            await asyncio.sleep(0)  # a body may have a thousand prompts: let other tasks run
        return opened

    def _clamped(self, one: CompletionRequest) -> CompletionRequest:
        return replace(one, clamps_max_tokens=True) if self._clamps_max_tokens else one

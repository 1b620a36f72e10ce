"""Completions: text in, text out, for both endpoints of the router.

open     check the request, render and tokenize its prompt    holds nothing yet; RequestError
enter    start a Generation                                   held until the block is left, however it is left
iterate  AnswerEvents                                         each event once; ClusterError
leave    end the Generation, count the request, log one line
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

from core.grammar.compiler import GrammarCompiler
from core.types.api_key import ApiKey
from core.types.errors import ClientTooSlow, ClusterError, DeadlineExceeded, RequestError, outcome_of
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import Grammar, Sampling, SequenceRequest, ThinkingBudget
from frontend.chat.chat import Chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.output_format import OutputFormat, thinking_budget
from frontend.structured_output.constrained_answer import bound_answer, without_look_around
from frontend.structured_output.grammar_check import GrammarCheck
from frontend.structured_output.special_tokens import SpecialTokens
from frontend.text.answer_events import AnswerEvents, TokenClock, UnreadLimit
from frontend.text.answer_reader import AnswerReader
from frontend.text.audit_log import RequestAuditLog
from frontend.text.best_of import best_of
from frontend.text.choice_text import ChoiceText
from frontend.text.completion_request import (
    CompletionRequest,
    ModelCard,
    check,
    check_prompt_numbers,
    num_prompt_numbers,
    sampling_of,
    truncated,
)
from frontend.text.events import Event, Summary, TokenUsage
from frontend.text.prompt_encoder import PromptEncoder, num_chars
from frontend.text.text_threads import TextThreads
from frontend.text.tokenizer import Tokenizer
from frontend.text.usage import Account
from router.generation import Generation, RequestRoute, TokenService
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Trace, Tracing
from router.telemetry.traffic import TrafficRecord

_LARGE = 8 * 1024  # characters of schemas, some ms of rewriting; larger ones go to another thread


class Completions:
    """Factory of the completions of one model. Bound to one event loop."""

    def __init__(
        self,
        *,
        token_service: TokenService,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        model: ModelCard,
        metrics: Metrics,
        max_request_s: float,
        max_unread_s: float = 60.0,
        audit_log: RequestAuditLog | None = None,
        traffic: TrafficRecord | None = None,
        output_format: OutputFormat | None = None,
        grammars: GrammarCompiler | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """max_request_s: upper bound of a request's duration, whatever deadline the client sets. max_unread_s: maximum
        time a client may leave a token unread. output_format: None: derived from the chat template. grammars: None:
        constrained answers are rejected. tracing: None: off."""
        self.model = model
        self.tracing = tracing
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.token_service = token_service
        self.max_request_s = max_request_s
        self.max_unread_s = max_unread_s
        self.threads = TextThreads()
        self.audit_log = audit_log or RequestAuditLog()
        self.traffic = traffic
        special = SpecialTokens(grammars.special_tokens if grammars else None)
        self.prompts = PromptEncoder(
            tokenizer,
            chat_template,
            model=model,
            output_format=replace(
                output_format
                or OutputFormat.of(
                    chat_template.sources, is_special=tokenizer.has_special, knows_tools=chat_template.knows_tools
                ),
                special=special,
            ),
            threads=self.threads,
        )
        self._grammars = GrammarCheck(grammars)

    async def open(
        self, request: CompletionRequest, *, num_other_chars: int = 0, trace: Trace | None = None
    ) -> Completion:
        """Check a request and tokenize its prompt; holds no resources. Raises RequestError and other ClusterErrors.

        num_other_chars: characters of other prompts in the same call. trace: None: not traced.
        """
        try:
            check(request, self.model)
            request, ignored = without_look_around(request)
            clock = TokenClock(self.metrics, num_choices=request.num_choices)
            given_ids = await self.prompts.encode(request, num_other_chars=num_other_chars)
            prompt_ids = truncated(given_ids, request, self.model)
            num_numbers = num_prompt_numbers(request, len(prompt_ids))
            check_prompt_numbers(num_numbers, param=request.prompt_logprobs_field)
            grammar, end = None, self.prompts.end_of(prompt_ids)
            if isinstance(request.prompt, Chat):
                ignored += self.prompts.unheeded(request.prompt, prompt_ids)
            thinking = thinking_budget(request, self.prompts.output_format, self.tokenizer, end)
            self._grammars.check_thinking(thinking, request.thinking_field)
            if request.grammar:
                grammar = await self._bound(request, request.grammar, end)
                await self._grammars.check(replace(request, grammar=grammar))
            sampling = sampling_of(
                request,
                self.model,
                num_prompt_tokens=len(prompt_ids),
                eos_token_ids=self.prompts.end_ids,
                bad_words=await self.prompts.bad_words_of(request) if request.bad_words else (),
            )
        except ClusterError as error:
            self.metrics.requests.labels(outcome_of(error).code).inc()
            self.audit_log.rejected(request, error)
            raise
        limit_s = self.max_request_s if request.deadline_s is None else min(request.deadline_s, self.max_request_s)
        return Completion(
            self,
            request,
            prompt_ids,
            sampling,
            is_cut=len(prompt_ids) < len(given_ids),
            grammar=grammar,
            thinking=thinking,
            ignored=ignored,
            clock=clock,
            limit_s=limit_s,
            trace=trace,
        )

    async def _bound(self, request: CompletionRequest, grammar: Grammar, prompt: str) -> Grammar | None:
        making = partial(bound_answer, request, self.prompts.output_format, prompt)
        num_other_chars = num_chars(request.prompt) if isinstance(request.prompt, Chat) else 0  # includes the tools
        if len(grammar.text) + num_other_chars < _LARGE:
            return making()
        return await self.threads.run(request.key_id, making)

    def close(self) -> None:
        self.threads.close()
        self._grammars.close()
        self.audit_log.close()

    def unreadable(self, request_id: str, error: ClusterError, *, key: ApiKey | None, peer: str) -> None:
        """Count and record a request that an endpoint rejected before it could be parsed."""
        self.metrics.requests.labels(outcome_of(error).code).inc()
        self.audit_log.unreadable(request_id, error, key=key, peer=peer)


class Completion:
    """Request that has been checked and tokenized."""

    def __init__(
        self,
        service: Completions,
        request: CompletionRequest,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        is_cut: bool,
        grammar: Grammar | None,
        thinking: ThinkingBudget | None,
        ignored: Sequence[str],
        clock: TokenClock,
        limit_s: float,
        trace: Trace | None,
    ) -> None:
        """is_cut: the prompt was truncated. ignored: fields of the client that have no effect with this model."""
        self.service = service
        self.request = request
        self.n = request.n  # choices answered
        self.num_choices = request.num_choices  # choices run
        self.prompt_ids = prompt_ids
        self.ignored = ignored
        self.max_answer_tokens = request.num_choices * sampling.max_tokens
        self._prompts = service.prompts
        self._is_cut = is_cut
        self._sampling = sampling
        self._grammar = grammar  # constrains the whole answer
        self._thinking = thinking  # limits the thinking before it
        self._token_service = service.token_service
        self._trace = trace
        self._account = Account(
            request,
            model=service.model.id,
            clock=clock,
            metrics=service.metrics,
            audit_log=service.audit_log,
            traffic=service.traffic,
            trace=trace,
        )
        self._clock = clock
        self._limit_s = limit_s
        self.max_unread_s = service.max_unread_s
        self._unread = UnreadLimit(service.max_unread_s, request_id=request.id)
        self._choices = [
            ChoiceText(
                request, choice, service.tokenizer, reader=self._reader(service), shown=service.prompts.shown_ids
            )
            for choice in range(request.num_choices)
        ]
        self._route = RequestRoute()
        self._generation: Generation | None = None

    def _reader(self, service: Completions) -> AnswerReader | None:
        if not isinstance(self.request.prompt, Chat):
            return None
        end = service.prompts.end_of(self.prompt_ids)
        return AnswerReader.of(self.request.prompt, service.prompts.output_format, end, grammar=self.request.grammar)

    @asynccontextmanager
    async def run(
        self,
        turn: AbstractAsyncContextManager[None] | None = None,
    ) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """Run it, once. Leaving the block ends it on all replicas.

        turn: context entered before the start; it limits how many completions of one response run at a time.
        Yields the events, to be consumed in the task that entered. The block raises ClusterError: DeadlineExceeded past
        the deadline, and ClientTooSlow if events are not consumed in time, wherever the block is waiting.
        """
        self._account.arrived(self.prompt_ids)
        try:
            async with (
                self._until_deadline(),
                turn or nullcontext(),
                self._unread,
                self._token_service.start(self._sequence()) as generation,
            ):
                self._route, self._generation = generation.route, generation
                self._account.started(generation.life)
                events = AnswerEvents(
                    generation,
                    self._choices,
                    clock=self._clock,
                    unread=self._unread,
                    summary=self._summary,
                    request_id=self.request.id,
                )
                has_logprobs = self.request.logprobs is not None
                yield (
                    best_of(events, num_best=self.n, shows_logprobs=has_logprobs) if self.request.is_ranked else events
                )
        except RequestError as error:
            self._over(error)
            raise self.request.in_client_terms(error) from None
        except BaseException as error:
            self._over(error)
            raise
        self._over(None)

    @property
    def model_name(self) -> str:
        """The model's name in the request, which the answer repeats; the first served name if there is none."""
        return self.request.model or self.service.model.id

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens after the first, if requested; available from the first event on."""
        return self._generation.prompt_logprobs if self._generation else None

    async def prompt_text(self) -> str:
        """Return the prompt's text as the client gave it, or decoded with special tokens if it was ids or cut."""
        return await self._prompts.text_of(self.request, self.prompt_ids, is_cut=self._is_cut)

    @property
    def num_prompt_numbers(self) -> int:
        """Number of log-probabilities returned for its prompt."""
        return num_prompt_numbers(self.request, len(self.prompt_ids))

    def shorten_answers(self, max_tokens: int) -> None:
        """Limit the length of each answer. Call before `run`."""
        self._sampling = replace(self._sampling, max_tokens=min(max_tokens, self._sampling.max_tokens))
        self.max_answer_tokens = self.num_choices * self._sampling.max_tokens

    def reject(self, error: ClusterError) -> None:
        """Record that the request is rejected by its key's limits and will not run."""
        self._account.rejected(error)

    @property
    def most_tokens(self) -> int:
        """Upper bound of the tokens it may use, prompt and answers."""
        return len(self.prompt_ids) + self.num_choices * self._sampling.max_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens it has used; 0 if no replica was assigned."""
        return self._usage.prompt_tokens + self._usage.completion_tokens if self._route.attempts else 0

    @property
    def _is_finished(self) -> bool:
        return all(choice.finished is not None for choice in self._choices)

    @property
    def _usage(self) -> TokenUsage:
        drafts, num_tokens = self._route.drafts, sum(choice.num_tokens for choice in self._choices)
        return TokenUsage(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=num_tokens,
            reasoning_tokens=sum(choice.num_thinking for choice in self._choices),
            cached_tokens=self._route.cached_tokens + self._route.fetched_tokens,
            accepted_prediction_tokens=min(drafts.accepted, num_tokens),  # a stop string may have cut off some
            rejected_prediction_tokens=drafts.drafted - drafts.accepted,
        )

    def _summary(self) -> Summary:
        usage, route = self._usage, replace(self._route)
        if not self.request.reports_cached_tokens:  # draft counts reveal cached text, too
            usage = replace(usage, cached_tokens=0, accepted_prediction_tokens=0, rejected_prediction_tokens=0)
            # Replica names reveal cache hits: a full hit skips prefill, and routing prefers cached prefixes.
            route = RequestRoute(attempts=route.attempts, migrations=route.migrations)
        return Summary(usage=usage, route=route, ttft_s=self._clock.ttft_s, itl_s=self._clock.itl_s)

    def _sequence(self) -> SequenceRequest:
        return SequenceRequest(
            # Clients may reuse ids; inside the cluster an id identifies one request.
            id=f"{self.request.id}-{secrets.token_hex(4)}",
            token_ids=self.prompt_ids,
            num_prompt_tokens=len(self.prompt_ids),
            sampling=self._sampling,
            grammar=self._grammar,
            thinking=self._thinking,
            num_prompt_logprobs=self.request.prompt_logprobs,
            choices=tuple(range(self.num_choices)),
            salt=self.request.salt,
            tenant=self.request.tenant,
            user=self.request.user,
            priority=self.request.priority,
            deadline_s=self._limit_s - self._clock.elapsed_s,
            traceparent=self._trace.traceparent if self._trace else "",
        )

    @asynccontextmanager
    async def _until_deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._limit_s - self._clock.elapsed_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"request {self.request.id}: not finished within {self._limit_s:g} s") from None

    def _over(self, error: BaseException | None) -> None:
        """Record the outcome."""
        outcome = "completed" if self._is_finished else "cancelled"
        if self._unread.is_passed:  # checked first: a closed generator leaves the block without ClientTooSlow
            outcome = outcome_of(ClientTooSlow()).code
        elif isinstance(error, Exception):
            outcome = outcome_of(error).code
        self._account.over(
            outcome,
            self._usage,
            self._route,
            num_outputs=(choice.num_tokens for choice in self._choices),
            max_tokens=self._sampling.max_tokens,
        )

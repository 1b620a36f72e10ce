"""Completions of the served models: text in, text out, for both endpoints of the router.

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
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

from core.grammar.compiler import GrammarCompiler
from core.types.api_key import ApiKey
from core.types.errors import (
    ClientTooSlow,
    ClusterError,
    DeadlineExceeded,
    ModelUnavailable,
    RequestError,
    UnknownModel,
    outcome_of,
)
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import OFFLINE, Grammar, Sampling, SequenceRequest, ThinkingBudget
from frontend.chat.chat import Chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.output_format import OutputFormat, thinking_budget
from frontend.structured_output.constrained_answer import GrammarCheck, bound_answer, with_weakened_schema
from frontend.structured_output.lark import SpecialTokens
from frontend.text.answer_events import AnswerEvents, ChoiceText, TokenClock, UnreadLimit, best_of
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import (
    CompletionRequest,
    ModelCard,
    check,
    check_prompt_numbers,
    not_served,
    num_prompt_numbers,
    sampling_of,
    truncated,
)
from frontend.text.events import Event, Summary, TokenUsage
from frontend.text.prompt_encoder import PromptEncoder, num_chars
from frontend.text.text_threads import TextThreads
from frontend.text.tokenizer import Tokenizer
from frontend.text.usage import Account, RequestAuditLog
from router.generation import Generation, RequestRoute, TokenService
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Trace, Tracing
from router.telemetry.traffic import TrafficRecord

_LARGE = 8 * 1024  # characters of schemas, some ms of rewriting; larger ones go to another thread


@dataclass(eq=False, kw_only=True)
class Completions:
    """Factory of the completions of one model. Bound to one event loop."""

    token_service: TokenService
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model: ModelCard
    metrics: Metrics
    max_request_s: float  # upper bound of a request's duration, whatever deadline the client sets
    max_unread_s: float = 60.0  # maximum time a client may leave a token unread
    audit_log: RequestAuditLog = field(default_factory=RequestAuditLog)
    traffic: TrafficRecord | None = None
    tool_parser: InitVar[str] = "auto"  # as in the spec, like the next one
    reasoning_parser: InitVar[str] = "auto"
    grammars: InitVar[GrammarCompiler | None] = None  # None: constrained answers are rejected
    tracing: Tracing | None = None  # None: off

    def __post_init__(self, tool_parser: str, reasoning_parser: str, grammars: GrammarCompiler | None) -> None:
        self.threads = TextThreads()
        tokenizer, template = self.tokenizer, self.chat_template
        special = SpecialTokens(grammars.special_tokens if grammars else None)
        output_format = OutputFormat.of(
            template.sources,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            is_special=tokenizer.has_special,
            knows_tools=template.knows_tools,
        )
        output_format = replace(output_format, special=special)
        self.prompts = PromptEncoder(tokenizer, template, self.model, output_format, self.threads)
        self._grammars = GrammarCheck(grammars)

    async def open(
        self, request: CompletionRequest, *, num_other_chars: int = 0, trace: Trace | None = None
    ) -> Completion:
        """Check a request and tokenize its prompt; holds no resources. Raises RequestError and other ClusterErrors.

        num_other_chars: characters of other prompts in the same call. trace: None: not traced.
        """
        try:
            check(request, self.model)
            request, ignored = with_weakened_schema(request)
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
            self.reject(request, error)
            raise
        limit_s = self.max_request_s if request.deadline_s is None else min(request.deadline_s, self.max_request_s)
        return Completion(
            service=self,
            request=request,
            prompt_ids=prompt_ids,
            sampling=sampling,
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
        is_large = len(grammar.text) + num_other_chars >= _LARGE
        return await self.threads.run(request.key_id, making) if is_large else making()

    def close(self) -> None:
        self.threads.close()
        self._grammars.close()
        self.audit_log.close()

    def reject(self, request: CompletionRequest, error: ClusterError) -> None:
        """Count and record a request that is rejected."""
        self.metrics.requests.labels(outcome_of(error).code).inc()
        self.audit_log.rejected(request, error)

    def unreadable(self, request_id: str, error: ClusterError, *, key: ApiKey | None, peer: str) -> None:
        """Count and record a request that an endpoint rejected before it could be parsed."""
        self.metrics.requests.labels(outcome_of(error).code).inc()
        self.audit_log.unreadable(request_id, error, key=key, peer=peer)


@dataclass(eq=False, kw_only=True)
class Completion:
    """Request that has been checked and tokenized."""

    service: Completions
    request: CompletionRequest
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    is_cut: bool  # the prompt was truncated
    grammar: Grammar | None  # constrains the whole answer
    thinking: ThinkingBudget | None  # limits the thinking before it
    ignored: Sequence[str]  # fields of the client that have no effect with this model
    clock: TokenClock
    limit_s: float
    trace: Trace | None

    def __post_init__(self) -> None:
        request, service = self.request, self.service
        self.n, self.num_choices = request.n, request.num_choices  # choices answered, and run
        self.max_unread_s = service.max_unread_s
        # Offline requests do not count as traffic: no client waits for them.
        traffic = None if request.priority >= OFFLINE else service.traffic
        name, metrics, audit_log = service.model.id, service.metrics, service.audit_log
        self._account = Account(request, name, self.clock, metrics, audit_log, traffic, self.trace)
        self._unread = UnreadLimit(service.max_unread_s, request_id=request.id)
        self._choices = [
            ChoiceText(request, choice, service.tokenizer, reader=self._reader(), shown=service.prompts.shown_ids)
            for choice in range(request.num_choices)
        ]
        self._route = RequestRoute()
        self._generation: Generation | None = None

    def _reader(self) -> AnswerReader | None:
        if not isinstance(self.request.prompt, Chat):
            return None
        prompts = self.service.prompts
        end = prompts.end_of(self.prompt_ids)
        return AnswerReader.of(self.request.prompt, prompts.output_format, end, grammar=self.request.grammar)

    @asynccontextmanager
    async def run(
        self, turn: AbstractAsyncContextManager[None] | None = None
    ) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """Run the completion, once. Leaving the block ends it on all replicas.

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
                self.service.token_service.start(self._sequence()) as generation,
            ):
                self._route, self._generation = generation.route, generation
                self._account.started(generation.life)
                request, choices = self.request, self._choices
                events = AnswerEvents(generation, choices, self.clock, self._unread, self._summary, request.id)
                has_logprobs = request.logprobs is not None
                yield best_of(events, num_best=self.n, shows_logprobs=has_logprobs) if request.is_ranked else events
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
        """Return the prompt's text as the client gave it. Ids or a cut prompt are decoded, with special tokens."""
        return await self.service.prompts.text_of(self.request, self.prompt_ids, is_cut=self.is_cut)

    @property
    def num_prompt_numbers(self) -> int:
        return num_prompt_numbers(self.request, len(self.prompt_ids))

    def shorten_answers(self, max_tokens: int) -> None:
        """Limit the length of each answer. Call before `run`."""
        self.sampling = replace(self.sampling, max_tokens=min(max_tokens, self.sampling.max_tokens))

    @property
    def max_answer_tokens(self) -> int:
        return self.num_choices * self.sampling.max_tokens

    @property
    def most_tokens(self) -> int:
        """Upper bound of the tokens of prompt and answers."""
        return len(self.prompt_ids) + self.max_answer_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens used so far; 0 if no replica was assigned."""
        return self._usage.prompt_tokens + self._usage.completion_tokens if self._route.attempts else 0

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
        return Summary(usage=usage, route=route, ttft_s=self.clock.ttft_s, itl_s=self.clock.itl_s)

    def _sequence(self) -> SequenceRequest:
        return SequenceRequest(
            # Clients may reuse ids; inside the cluster an id identifies one request.
            id=f"{self.request.id}-{secrets.token_hex(4)}",
            token_ids=self.prompt_ids,
            num_prompt_tokens=len(self.prompt_ids),
            sampling=self.sampling,
            grammar=self.grammar,
            thinking=self.thinking,
            num_prompt_logprobs=self.request.prompt_logprobs,
            choices=tuple(range(self.num_choices)),
            salt=self.request.salt,
            tenant=self.request.tenant,
            user=self.request.user,
            priority=self.request.priority,
            deadline_s=self.limit_s - self.clock.elapsed_s,
            traceparent=self.trace.traceparent if self.trace else "",
        )

    @asynccontextmanager
    async def _until_deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limit_s - self.clock.elapsed_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"request {self.request.id}: not finished within {self.limit_s:g} s") from None

    def _over(self, error: BaseException | None) -> None:
        is_finished = all(choice.finished is not None for choice in self._choices)
        outcome = "completed" if is_finished else "cancelled"
        if self._unread.is_passed:  # checked first: a closed generator leaves the block without ClientTooSlow
            outcome = outcome_of(ClientTooSlow()).code
        elif isinstance(error, Exception):
            outcome = outcome_of(error).code
        self._account.over(
            outcome,
            self._usage,
            self._route,
            num_outputs=(choice.num_tokens for choice in self._choices),
            max_tokens=self.sampling.max_tokens,
        )


class Models:
    """Registry of served models by name. A name belongs to the first model that has it. Bound to the router's event
    loop."""

    def __init__(self, default: Completions) -> None:
        """default: model of the router's own deployment, used for requests that name none."""
        self.default = default
        self._served = dict.fromkeys(default.model.names, default)
        self._unavailable: dict[str, str] = {}  # reason, by name of a model that should be served but is not

    @classmethod
    def of(cls, served: Completions | Models) -> Models:
        return served if isinstance(served, Models) else cls(served)

    def add(self, served: Completions) -> bool:
        """Add a model. Return False if one of its names is taken."""
        names = served.model.names
        if not self._served.keys().isdisjoint(names):
            return False
        self.forget_unavailable(names)
        self._served |= dict.fromkeys(names, served)
        return True

    def remove(self, served: Completions) -> None:
        """Remove a model; running requests continue."""
        self._served = {name: one for name, one in self._served.items() if one is not served}

    def report_unavailable(self, names: Sequence[str], why: str) -> None:
        """Mark a model as known but not servable at present."""
        self._unavailable |= {name: why for name in names if name not in self._served}

    def forget_unavailable(self, names: Sequence[str]) -> None:
        for name in names:
            self._unavailable.pop(name, None)

    def find(self, name: str) -> Completions:
        """Return the model, the default one for an empty name. Raises UnknownModel and ModelUnavailable."""
        if not name:
            return self.default
        if (served := self._served.get(name)) is not None:
            return served
        if name in self._unavailable:
            raise ModelUnavailable(f"model {name!r} is unavailable at this router: {self._unavailable[name]}")
        raise UnknownModel(not_served(name, self.names), param="model")

    def card(self, name: str) -> ModelCard:
        """Return a model's card. Raises UnknownModel and ModelUnavailable."""
        if not name:
            raise UnknownModel(not_served(name, self.names), param="model")
        return self.find(name).model

    @property
    def cards(self) -> Sequence[ModelCard]:
        """Cards of all models, the default one first, then by their first names."""
        cards = {served.model.id: served.model for served in self._served.values()}
        return [self.default.model, *(cards[name] for name in sorted(cards) if name != self.default.model.id)]

    @property
    def names(self) -> Sequence[str]:
        return [name for card in self.cards for name in card.names]

    @property
    def max_context(self) -> int:
        """Largest limit of prompt and answer of any model, in tokens."""
        return max(card.max_model_len for card in self.cards)

"""A token service without a cluster: it says what a script says, and remembers how each request ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import DraftTally, SampledToken, SequenceRequest, TokenLogprob, finish_reason
from core.types.timeline import Timeline
from router.generation import Arrived, InlineSink, RequestRoute

Script = Callable[[SequenceRequest, int], Sequence[int]]


def echo(request: SequenceRequest, choice: int) -> Sequence[int]:
    """Says the prompt again, for ever."""
    return request.token_ids


@dataclass(kw_only=True)
class FakeTokenService:
    """Repeats each choice's script until the request's own rules end it. The choices take turns."""

    script: Script = echo
    max_context: int = 256
    together: int = 1  # so many tokens of all choices come at once
    logprobs: Sequence[float] = ()  # of each token of a choice; -0.5 of those that come after
    reject: Exception | None = None  # on entering
    hang_after: int | None = None  # tokens of all choices, then silence until `go_on`
    fail_after: tuple[int, Exception] | None = None  # tokens of all choices, then this error
    end_after: int | None = None  # tokens of all choices, then a premature end
    started: list[SequenceRequest] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    num_tokens: int = 0  # given out, of all requests
    ended: list[tuple[str, type[BaseException] | None]] = field(default_factory=list)
    is_hanging: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # none is under way; set when the last one ends

    def start(self, request: SequenceRequest) -> FakeGeneration:
        return FakeGeneration(self, request)


class FakeGeneration:
    def __init__(self, fake: FakeTokenService, request: SequenceRequest) -> None:
        self._fake = fake
        self._request = request
        self._owner: asyncio.Task[object] | None = None
        self._sink: InlineSink | None = None
        self._open = set(request.choices)
        self._stopped: set[int] = set()
        self.life = Timeline()
        self.route = RequestRoute(
            drafts=DraftTally(steps=4, drafts=3, drafted=9, accepted=2),
            prefill_replica="prefill-0", decode_replica="decode-0", cached_tokens=3, attempts=1
        )  # fmt: skip

    async def __aenter__(self) -> FakeGeneration:
        if self._fake.reject is not None:
            raise self._fake.reject
        self._owner = asyncio.current_task()
        self._fake.started.append(self._request)
        self._fake.has_ended.clear()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert asyncio.current_task() is self._owner, "left in another task than it was entered in"
        self._fake.ended.append((self._request.id, kind))
        if len(self._fake.ended) == len(self._fake.started):
            self._fake.has_ended.set()

    def set_sink(self, sink: InlineSink) -> None:
        self._sink = sink

    async def __aiter__(self) -> AsyncIterator[Arrived]:
        async for arrived in self._together():
            if not self._sink:
                yield arrived
                continue
            [(choice, tokens), *others] = arrived.items()
            if not self._sink(choice, tokens) or others:
                yield dict(others)

    async def _together(self) -> AsyncIterator[Arrived]:
        arrived: dict[int, list[SampledToken]] = {}
        async with aclosing(self._tokens()) as tokens:
            async for choice, token in tokens:
                arrived.setdefault(choice, []).append(token)
                if sum(map(len, arrived.values())) == self._fake.together:
                    yield arrived
                    arrived = {}
        if arrived:
            yield arrived

    async def _tokens(self) -> AsyncGenerator[tuple[int, SampledToken], None]:
        fake, request = self._fake, self._request
        num_sent = position = 0
        while self._open:
            for choice in sorted(self._open):
                if num_sent == fake.hang_after:
                    fake.is_hanging.set()
                    await fake.go_on.wait()
                if num_sent == fake.end_after:
                    return
                if fake.fail_after is not None and num_sent == fake.fail_after[0]:
                    raise fake.fail_after[1]
                await asyncio.sleep(0)
                token = self._token(choice, position)
                num_sent += 1
                fake.num_tokens += 1
                if token.finish_reason is not None or choice in self._stopped:
                    self._open.discard(choice)
                yield choice, token
            position += 1
        self.route.blocks_shipped, self.route.wire_bytes = 2, 1000  # told a little after the last token
        assert num_sent <= len(request.choices) * request.sampling.max_tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Token i has log-probability -i, and is the second likeliest behind the one whose id is higher by one."""
        if (num_top := self._request.num_prompt_logprobs) is None:
            return None
        places = np.arange(1, len(self._request.token_ids), dtype=np.float32)
        others = np.array(self._request.token_ids[1:])[:, None] + 1 - np.arange(num_top)
        return PromptLogprobs(
            logprobs_P=-places,
            ranks_P=np.full(len(places), 2, np.int32),
            top_ids_PK=np.where(others < 0, others + 10_000, others).astype(np.int32),
            top_logprobs_PK=(-places[:, None] + 0.5 - 0.5 * np.arange(num_top)).astype(np.float32),
        )

    async def stop(self, choice: int) -> None:
        """One more token follows: it was on the wire already."""
        assert choice in self._request.choices
        self._fake.stopped.append((self._request.id, choice))
        self._stopped.add(choice)

    def _token(self, choice: int, position: int) -> SampledToken:
        request, sampling = self._request, self._request.sampling
        script = self._fake.script(request, choice)
        token_id = script[position % len(script)]
        reason = finish_reason(
            token_id,
            num_generated=position + 1,
            num_tokens=request.num_prompt_tokens + position + 1,
            sampling=sampling,
            max_context=self._fake.max_context,
        )
        logprob = None
        if sampling.num_logprobs is not None:
            top = tuple((token_id + i, -0.5 - i) for i in range(sampling.num_logprobs))
            told = self._fake.logprobs[choice] if choice < len(self._fake.logprobs) else -0.5
            logprob = TokenLogprob(logprob=told, top=top)
        return SampledToken(token_id=token_id, logprob=logprob, finish_reason=reason)

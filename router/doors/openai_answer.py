"""Events to one answer of the OpenAI API, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.doors.event_stream import DONE, data
from router.doors.openai_calls import WholeChoice
from router.doors.openai_forms import JSON, Form
from router.text.completion import Completion
from router.text.events import Delta, Event, Finished, Summary, TokenUsage
from router.text.unread import UnreadLimit

_MAX_QUEUED = 64  # events; a slow client holds the completions up, not our memory

NumberedEvents = AsyncIterator[tuple[int, Event]]


@dataclass(frozen=True, kw_only=True)
class OpenAIAnswer:
    """What answers one HTTP request: a completion per prompt, each with its own form. Choices count through all."""

    id: str
    model: str
    completions: Sequence[Completion]
    forms: Sequence[Form]
    include_usage: bool  # in the stream; a whole answer always has it
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> JSON:
        """Raises ClusterError."""
        usage = TokenUsage()
        choices = [_Choice(form) for form, one in zip(self.forms, self.completions, strict=True) for _ in range(one.n)]
        async with _run_all(self.completions) as events:
            async for number, event in events:
                match event:
                    case Delta(choice=choice):
                        choices[self._index(number, choice)].add(event, keep=self.return_token_ids)
                    case Finished(choice=choice):
                        choices[self._index(number, choice)].finished = event
                    case Summary():
                        usage += event.usage
        answer = self._head(self.forms[0].whole)
        answer["choices"] = [{"index": index, **self._written(choice)} for index, choice in enumerate(choices)]
        answer["usage"] = _usage(usage)
        if self.return_token_ids:
            self._add_prompt_ids(answer, answer["choices"])
        return answer

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, the last of them [DONE]. Raises ClusterError."""
        usage = TokenUsage()
        opened: set[int] = set()
        async with _run_all(self.completions) as events:
            async for number, event in events:
                if isinstance(event, Summary):
                    usage += event.usage
                    continue
                form, index = self.forms[number], self._index(number, event.choice)
                if index not in opened:
                    opened.add(index)
                    if opening := self._opening(number, index):
                        yield data(opening)
                if isinstance(event, Finished):
                    yield data(self._chunk(form, {"index": index, **form.piece(""), "logprobs": None, **_end(event)}))
                elif event.text or event.says_more or event.has_logprobs or self.return_token_ids:
                    yield data(self._chunk(form, {"index": index, **self._piece(form, event)}))
        if self.include_usage:
            yield data({**self._head(self.forms[0].chunk), "choices": [], "usage": _usage(usage)})
        yield DONE

    def _index(self, number: int, choice: int) -> int:
        return number * self.completions[0].n + choice

    def _head(self, kind: str) -> JSON:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, form: Form, choice: JSON) -> JSON:
        chunk = {**self._head(form.chunk), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _opening(self, number: int, index: int) -> JSON | None:
        form = self.forms[number]
        opening = form.opening()
        if opening is None and not self.return_token_ids:
            return None
        choice = {"index": index, **(opening or form.piece("")), "logprobs": None, "finish_reason": None}
        chunk = self._chunk(form, choice)
        if self.return_token_ids:
            self._add_prompt_ids(chunk, [choice])
        return chunk

    def _piece(self, form: Form, delta: Delta) -> JSON:
        piece = form.said(delta)
        piece["logprobs"] = form.logprobs([delta]) if delta.has_logprobs else None
        piece["finish_reason"] = None
        if self.return_token_ids:
            piece["token_ids"] = [token.token_id for token in delta.tokens]
        return piece

    def _written(self, choice: _Choice) -> JSON:
        assert choice.finished is not None
        written = choice.form.message(choice.whole)
        has_logprobs = bool(choice.deltas) and choice.deltas[0].has_logprobs
        written["logprobs"] = choice.form.logprobs(choice.deltas) if has_logprobs else None
        if self.return_token_ids:
            written["token_ids"] = [token.token_id for delta in choice.deltas for token in delta.tokens]
        return written | _end(choice.finished)

    def _add_prompt_ids(self, answer: JSON, choices: Sequence[JSON]) -> None:
        """An extension: the prompt as the model saw it."""
        for choice in choices:
            completion = self.completions[choice["index"] // self.completions[0].n]
            owner = answer if self.forms[0].is_prompt_shared else choice
            owner["prompt_token_ids"] = list(completion.prompt_ids)


@dataclass
class _Choice:
    form: Form
    whole: WholeChoice = field(default_factory=WholeChoice)
    deltas: list[Delta] = field(default_factory=list)  # where more is wanted of them than their text
    finished: Finished | None = None

    def add(self, delta: Delta, *, keep: bool) -> None:
        self.whole.add(delta)
        if keep or delta.has_logprobs:
            self.deltas.append(delta)


def _end(finished: Finished) -> JSON:
    """stop_reason is an extension: the stop string that ended the choice."""
    return {"finish_reason": finished.word, "stop_reason": finished.stop}


def _usage(usage: TokenUsage) -> JSON:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@asynccontextmanager
async def _run_all(completions: Sequence[Completion]) -> AsyncIterator[NumberedEvents]:
    """Hold all of them for as long as the block lasts. Gives their events, each with its completion's number.

    The first that fails ends the rest, and its error is raised.
    """
    if len(completions) == 1:  # the usual case needs neither a task nor a queue
        async with completions[0].run() as events:
            yield _number(events)
        return
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(_MAX_QUEUED)
    tasks = [asyncio.ensure_future(_pump(number, one, queue)) for number, one in enumerate(completions)]
    try:
        async with UnreadLimit(completions[0].max_unread_s, request_id=completions[0].request.id) as unread:
            yield unread.watched(_drain(queue, len(tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _number(events: AsyncIterator[Event]) -> NumberedEvents:
    async for event in events:
        yield 0, event


async def _pump(number: int, completion: Completion, queue: asyncio.Queue[tuple[int, Event | Exception]]) -> None:
    try:
        async with completion.run() as events:
            async for event in events:
                await queue.put((number, event))
    except Exception as error:  # carried to the one who reads the queue, and raised there
        await queue.put((number, error))


async def _drain(queue: asyncio.Queue[tuple[int, Event | Exception]], num_running: int) -> NumberedEvents:
    while num_running:
        number, event = await queue.get()
        if isinstance(event, Exception):
            raise event
        num_running -= isinstance(event, Summary)
        yield number, event

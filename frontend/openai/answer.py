"""Responses of the OpenAI API, whole or streamed in chunks, from the events of completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from core.types.request import FinishReason
from frontend.http.event_stream import DONE, JSON, data, to_json
from frontend.openai.forms import Form, PromptScores, WholeChoice, ending, prompt_scores
from frontend.openai.types import ChatBody, TextBody
from frontend.text.answer_events import UnreadLimit
from frontend.text.completion import Completion
from frontend.text.events import Delta, Event, Finished, Summary, TokenUsage

_MAX_RUNNING = 64  # choices of one response that run at a time
_MAX_QUEUED = 64  # batches of events; backpressure from a slow client
NumberedEvents = AsyncIterator[tuple[int, list[Event]]]  # completion number, and events that arrived together
_Queue = asyncio.Queue[tuple[int, list[Event] | Exception]]
_TEXT, _IDS = "\x00", "\x01"  # placeholders in the chunk template; request ids contain visible characters only


class ChoiceChunks:
    """Writer of the chunks of one choice. Chunks with text alone are filled into a template that is encoded once."""

    def __init__(
        self,
        index: int,
        form: Form,
        *,
        head: Mapping[str, Any],
        is_usage_null: bool,
        prompt_ids: Sequence[int] | None,
        num_prompt_tokens: int | None = None,
        echoed: JSON | None = None,
    ) -> None:
        """head: fields common to all chunks. is_usage_null: include `"usage": null` in each. prompt_ids: returned with
        the first chunk, if the client requested token ids. num_prompt_tokens: include the choice's usage so far in each
        chunk; None: do not. echoed: logprobs of a repeated prompt."""
        self._index = index
        self._form = form
        self._head = head
        self._more: JSON = {"usage": None} if is_usage_null else {}
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._prompt_ids = prompt_ids
        self._has_ids = prompt_ids is not None
        self._echoed = echoed
        self._before, behind = self._chunk(form.piece(_TEXT), **self._ids(_IDS)).split(to_json(_TEXT))
        self._between, _, self._behind = behind.partition(to_json(_IDS)) if self._has_ids else (b"", b"", behind)

    def opening(self) -> bytes:
        """Return the chunk before any generated text; empty if there is none."""
        opening, form, ids = self._form.opening(), self._form, JSON()
        if self._prompt_ids is not None:
            opening, ids = opening or form.piece(""), {"prompt_token_ids": list(self._prompt_ids)}
        if not opening:
            return b""
        if form.is_prompt_shared:
            return self._chunk(opening, of_chunk=ids)
        return self._chunk(opening, logprobs=self._echoed, **ids)

    def chunk(self, event: Delta | Finished) -> bytes:
        """Return the chunk of an event; empty if it has nothing to send."""
        if isinstance(event, Finished):
            return self._chunk(self._form.piece(""), **ending(event))
        if self._num_prompt_tokens is not None:
            self._num_tokens += len(event.tokens)
        elif event.text and not event.has_logprobs and not event.has_more_than_text:
            if not self._has_ids:
                return b"%b%b%b" % (self._before, to_json(event.text), self._behind)
            listed = to_json([token.token_id for token in event.tokens])
            return b"%b%b%b%b%b" % (self._before, to_json(event.text), self._between, listed, self._behind)
        if not event.text and not event.has_logprobs and not self._has_ids and not event.has_more_than_text:
            return b""
        logprobs = self._form.logprobs([event]) if event.has_logprobs else None
        ids = self._ids([token.token_id for token in event.tokens])
        first, *others = self._form.said(event)
        return self._chunk(first, logprobs=logprobs, **ids) + b"".join(map(self._chunk, others))

    def _ids(self, token_ids: object) -> JSON:
        return {"token_ids": token_ids} if self._has_ids else {}

    def _chunk(self, piece: JSON, *, of_chunk: JSON | None = None, **more: Any) -> bytes:
        choice = {"index": self._index, **piece, "logprobs": None, "finish_reason": None, **more}
        return data({**self._head, "choices": [choice], **self._usage(), **(of_chunk or {})})

    def _usage(self) -> JSON:
        if (num_prompt := self._num_prompt_tokens) is None:
            return self._more
        num, total = self._num_tokens, num_prompt + self._num_tokens
        return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": total}}


@dataclass(frozen=True)
class OpenAIAnswer:
    """Response to one HTTP request: one completion and one form per prompt. Choices are numbered across all prompts."""

    id: str
    body: TextBody | ChatBody
    completions: Sequence[Completion]
    forms: Sequence[Form]
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> JSON:
        """Return the whole response. Raises ClusterError."""
        usage = TokenUsage()
        choices = [_Choice() for one in self.completions for _ in range(one.n)]
        async with _run_all(self.completions) as arrivals:
            async for number, events in arrivals:
                for event in events:
                    match event:
                        case Delta(choice=choice):
                            choices[self._index(number, choice)].add(event, keep=self.body.return_token_ids)
                        case Finished(choice=choice):
                            choices[self._index(number, choice)].finished = event
                        case Summary():
                            usage += event.usage
        form = self.forms[0]
        if not form.has_answer:
            usage = replace(usage, completion_tokens=0)
            choices = [_Choice(finished=Finished(0, FinishReason.LENGTH)) for _ in choices]
        scores = [await self._scores(number) for number in range(len(self.completions))]
        written = [self._whole_choice(index, choice, scores) for index, choice in enumerate(choices)]
        answer = {**self._head(form.whole), "choices": written, "usage": _usage(usage)}
        if form.is_prompt_shared and scores[0].listed is not None:
            answer["prompt_logprobs"] = scores[0].listed
        if form.is_prompt_shared and self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.completions[0].prompt_ids)
        return answer

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, ending with [DONE]. Raises ClusterError."""
        usage = TokenUsage()
        chunks: dict[int, ChoiceChunks] = {}
        scores: dict[int, PromptScores] = {}
        async with _run_all(self.completions) as arrivals:
            async for number, events in arrivals:
                written: list[bytes] = []
                for event in events:
                    if isinstance(event, Summary):
                        usage += event.usage
                        continue
                    index = self._index(number, event.choice)
                    if (choice := chunks.get(index)) is None:
                        if number not in scores:
                            scores[number] = await self._scores(number)
                        choice = chunks[index] = self._chunks_of(number, index, scores[number])
                        written.append(choice.opening())
                    written.append(choice.chunk(event))
                if any(written):
                    yield b"".join(written)
        if self._includes_usage:
            yield data({**self._head(self.forms[0].chunk), "choices": [], "usage": _usage(usage)})
        yield DONE

    def _index(self, number: int, choice: int) -> int:
        return number * self.completions[0].n + choice

    def _head(self, kind: str) -> JSON:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.completions[0].model_name}

    @property
    def _includes_usage(self) -> bool:
        """True if the stream ends with the usage; a whole response always has it."""
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    async def _scores(self, number: int) -> PromptScores:
        """Return the prompt's scores, once its completion has yielded events."""
        return await prompt_scores(self.completions[number], self.forms[number], num_listed=self.body.prompt_logprobs)

    def _chunks_of(self, number: int, index: int, scores: PromptScores) -> ChoiceChunks:
        form, prompt_ids, options = self.forms[number], self.completions[number].prompt_ids, self.body.stream_options
        has_running_usage = self._includes_usage and options and options.continuous_usage_stats
        return ChoiceChunks(
            index,
            form,
            head=self._head(form.chunk),
            is_usage_null=self._includes_usage,
            prompt_ids=prompt_ids if self.body.return_token_ids else None,
            num_prompt_tokens=len(prompt_ids) if has_running_usage else None,
            echoed=scores.echoed,
        )

    def _whole_choice(self, index: int, choice: _Choice, scores: Sequence[PromptScores]) -> JSON:
        assert choice.finished is not None
        number = index // self.completions[0].n
        form, of_prompt, returns_ids = self.forms[number], scores[number], self.body.return_token_ids
        written = {"index": index, **form.message(choice.whole)}
        has_logprobs = bool(choice.deltas) and choice.deltas[0].has_logprobs
        written["logprobs"] = of_prompt.before(form.logprobs(choice.deltas) if has_logprobs else None)
        if of_prompt.listed is not None and not form.is_prompt_shared:
            written["prompt_logprobs"] = of_prompt.listed
        if returns_ids:
            written["token_ids"] = [token.token_id for delta in choice.deltas for token in delta.tokens]
        written |= ending(choice.finished)
        if returns_ids and not form.is_prompt_shared:
            written["prompt_token_ids"] = list(self.completions[number].prompt_ids)
        return written


@dataclass
class _Choice:
    whole: WholeChoice = field(default_factory=WholeChoice)
    deltas: list[Delta] = field(default_factory=list)  # kept only if token ids or logprobs are returned
    finished: Finished | None = None

    def add(self, delta: Delta, *, keep: bool | None) -> None:
        delta.write(self.whole)
        if keep or delta.has_logprobs:
            self.deltas.append(delta)


def _usage(usage: TokenUsage) -> JSON:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@asynccontextmanager
async def _run_all(completions: Sequence[Completion]) -> AsyncIterator[NumberedEvents]:
    """Run all completions for the duration of the block, and yield their events with the completion's number.

    The first failure ends the others and is raised.
    """
    if len(completions) == 1:  # the common case needs neither tasks nor a queue
        async with completions[0].run() as arrivals:
            yield _number(arrivals)
        return
    queue: _Queue = asyncio.Queue(_MAX_QUEUED)
    turn = asyncio.Semaphore(max(1, _MAX_RUNNING // completions[0].num_choices))
    tasks = [asyncio.ensure_future(_pump(number, one, queue, turn)) for number, one in enumerate(completions)]
    try:
        async with UnreadLimit(completions[0].max_unread_s, request_id=completions[0].request.id) as unread:
            yield unread.watched(_drain(queue, len(tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _number(arrivals: AsyncIterator[list[Event]]) -> NumberedEvents:
    async for events in arrivals:
        yield 0, events


async def _pump(number: int, completion: Completion, queue: _Queue, turn: asyncio.Semaphore) -> None:
    try:
        async with completion.run(turn) as arrivals:
            async for events in arrivals:
                await queue.put((number, events))
    except Exception as error:  # raised by the reader of the queue
        await queue.put((number, error))


async def _drain(queue: _Queue, num_running: int) -> NumberedEvents:
    while num_running:
        number, events = await queue.get()
        if isinstance(events, Exception):
            raise events
        num_running -= isinstance(events[-1], Summary)
        yield number, events

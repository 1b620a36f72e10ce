"""Responses of Anthropic's Messages API, whole or streamed, from the events of a completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from core.types.request import FinishReason
from frontend.anthropic.content import StreamedContent, WholeContent
from frontend.http.event_stream import JSON, data
from frontend.text.completion import Completion
from frontend.text.events import Delta, Finished, Summary, TokenUsage


@dataclass(frozen=True, kw_only=True)
class AnthropicAnswer:
    """Response to one request."""

    id: str
    model: str
    completion: Completion  # with one choice
    hides_thinking: bool  # thinking blocks are sent empty

    async def whole(self) -> JSON:
        """Return the whole response. Raises ClusterError."""
        blocks = WholeContent(hides_thinking=self.hides_thinking)
        ending, usage = JSON(), TokenUsage()
        async with self.completion.run() as arrivals:
            async for events in arrivals:
                for event in events:
                    match event:
                        case Delta():
                            event.write(blocks)
                        case Finished():
                            ending = _ending(event)
                        case Summary():
                            usage = event.usage
        return {**self._head, "content": blocks.content(), **ending, "usage": _usage(usage)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, ending with message_stop. Raises ClusterError."""
        blocks = StreamedContent(hides_thinking=self.hides_thinking)
        opening, ending = self._opening(), JSON()
        async with self.completion.run() as arrivals:
            async for events in arrivals:
                for event in events:
                    match event:
                        case Delta() if not event.has_more_than_text:
                            if event.text:
                                blocks.text(event.text)
                        case Delta():
                            event.write(blocks)
                        case Finished():
                            ending = _ending(event)
                            blocks.close()
                        case Summary(usage=usage):
                            yield _closing(ending, usage)
                            return
                if written := opening + blocks.taken():
                    yield written
                    opening = b""

    @property
    def _head(self) -> JSON:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _opening(self) -> bytes:
        # The number of cached tokens is known at the end only; 0 is sent until then.
        usage = TokenUsage(prompt_tokens=len(self.completion.prompt_ids))
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return data({"type": "message_start", "message": message}, name="message_start")


def _closing(ending: JSON, usage: TokenUsage) -> bytes:
    last = data({"type": "message_delta", "delta": ending, "usage": _usage(usage)}, name="message_delta")
    return last + data({"type": "message_stop"}, name="message_stop")


def _ending(finished: Finished) -> JSON:
    reason = "end_turn"
    if finished.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif finished.num_calls:
        reason = "tool_use"
    elif finished.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(usage: TokenUsage) -> JSON:
    """Return Anthropic's usage. cache_creation is 0: caching is implicit here, and not billed."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }

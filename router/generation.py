"""What the text side of the router asks of the serving side, and what it gets back: one request under way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import DraftTally, SampledToken, SequenceRequest
from core.types.timeline import Timeline


@dataclass(kw_only=True)
class RequestRoute:
    """Which way a request went; filled in as it becomes known."""

    prefill_replica: str = ""  # empty: the decode replica computed the prompt itself
    decode_replica: str = ""  # empty: the first token was the last
    cached_tokens: int = 0  # prompt tokens whose KV the replica that computed the prompt held already
    fetched_tokens: int = 0  # prompt tokens after these whose KV it fetched from another one
    blocks_shipped: int = 0
    wire_bytes: int = 0
    attempts: int = 0
    drafts: DraftTally = field(default_factory=DraftTally)  # by replicas that draft; of all choices
    migrations: int = 0  # attempts that went on where another one had brought tokens


Arrived = Mapping[int, Sequence[SampledToken]]  # by choice
InlineSink = Callable[[int, Sequence[SampledToken]], bool]  # of a choice; False asks for a wakeup of the consumer


class Generation(Protocol):
    """One request under way. Leaving the `async with` block ends it everywhere and frees what it holds."""

    route: RequestRoute
    life: Timeline  # where its time went; whoever was there before it writes in it, too

    async def __aenter__(self) -> Generation: ...
    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[Arrived]:
        """By choice, the tokens that have come since the last ones were taken: mostly one. Until every choice has
        finished; the last token of each has a finish_reason. Raises ClusterError."""
        ...

    def set_sink(self, sink: InlineSink) -> None:
        """Set, before the iteration, a sink that may get tokens inline while the consumer is suspended. Where it
        returns False the iteration yields an empty mapping; where it raises, the iteration raises that."""
        ...

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of the prompt's tokens after the first, where the request asks for it: there before any token comes."""
        ...

    async def stop(self, choice: int) -> None:
        """This choice needs no more tokens (a stop string was found); none will follow."""
        ...


class TokenService(Protocol):
    """Where the text side hands requests in, as tokens. The doors hand theirs to
    frontend.text.completion.Completions."""

    def start(self, request: SequenceRequest) -> Generation: ...

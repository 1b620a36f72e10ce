"""Interface between the frontend and the router's serving side: start a token request, iterate its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import DraftTally, SampledToken, SequenceRequest
from core.types.timeline import Timeline


@dataclass(kw_only=True)
class RequestRoute:
    """Replicas that served a request, with its transfer statistics; filled in while the request runs."""

    prefill_replica: str = ""  # empty: the decode replica computed the prompt itself
    decode_replica: str = ""  # empty: the first token was the last
    cached_tokens: int = 0  # prompt tokens already cached on the replica that computed the prompt
    fetched_tokens: int = 0  # prompt tokens after these, fetched from a peer replica
    blocks_shipped: int = 0
    wire_bytes: int = 0
    attempts: int = 0
    drafts: DraftTally = field(default_factory=DraftTally)  # sum over all choices
    migrations: int = 0  # attempts that continued from tokens of an earlier attempt


Arrived = Mapping[int, Sequence[SampledToken]]  # new tokens by choice


class Generation(Protocol):
    """Running request. Leaving the `async with` block ends it on every replica and frees its resources."""

    route: RequestRoute
    life: Timeline  # phases of the request; the frontend adds its own phases

    async def __aenter__(self) -> Generation: ...
    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[Arrived]:
        """Yield the new tokens by choice, usually one, until every choice has finished.

        The last token of each choice has a finish_reason. Raises ClusterError.
        """
        ...

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens after the first, set before any token arrives.

        None if the request did not ask for them.
        """
        ...

    async def stop(self, choice: int) -> None:
        """Stop generating for this choice, for example at a stop string. No more tokens follow."""
        ...


class TokenService(Protocol):
    """Entry point of the serving side, used by frontend.text.completion.Completions."""

    def start(self, request: SequenceRequest) -> Generation: ...

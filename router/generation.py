"""What the doors of the router hand in, and what they get back: one request under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.words.request import SampledToken, SequenceRequest


@dataclass(kw_only=True)
class RequestRoute:
    """Which way a request went; filled in as it becomes known."""

    prefill_replica: str = ""  # empty: the decode replica computed the prompt itself
    decode_replica: str = ""  # empty: the first token was the last
    cached_tokens: int = 0  # prompt tokens whose KV the replica that computed the prompt held already
    pulled_tokens: int = 0  # prompt tokens after these whose KV it fetched from another one
    blocks_shipped: int = 0
    wire_bytes: int = 0
    attempts: int = 0
    migrations: int = 0  # attempts that went on where another one had brought tokens


@dataclass(frozen=True)
class ChoiceToken:
    """One token of one of a request's choices. The last of a choice has a finish_reason."""

    choice: int
    token: SampledToken


class Generation(Protocol):
    """One request under way. Leaving the `async with` block ends it everywhere and frees what it holds."""

    route: RequestRoute

    async def __aenter__(self) -> Generation: ...
    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[ChoiceToken]:
        """The tokens of all choices as they come, until every choice has finished. Raises ClusterError."""
        ...

    async def stop(self, choice: int) -> None:
        """This choice needs no more tokens (a stop string was found); none will follow."""
        ...


class TokenService(Protocol):
    """Where the doors of the router hand their requests in, as tokens."""

    def start(self, request: SequenceRequest) -> Generation: ...

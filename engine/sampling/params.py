"""How the next token of a sequence is to be chosen: what a sampler is asked. No torch is needed to ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from core.types.request import Sampling, TokenLogprob
from engine.sampling.penalties import Penalties
from engine.sampling.token_masks import TokenRuleTensors

Chosen = tuple[int, TokenLogprob | None]
Logits = TypeVar("Logits", contravariant=True)

_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for some rows. It may still be on its way from a device."""

    token_ids: Any  # (R,) where it was chosen, for the step after; below 0 where there is no token
    wait: Callable[[], Seq[Chosen | None]]  # what comes of it, row by row; called once

    @classmethod
    def known(cls, chosen: Seq[Chosen | None]) -> Sampled:
        """Nothing has to be waited for."""
        return cls([one[0] if one else -1 for one in chosen], lambda: chosen)


class Sampler(Protocol[Logits]):
    """See engine.sampling.sampler."""

    def __call__(self, logits: Logits, rows: Seq[SamplingRow], positions: Seq[int] | None, /) -> Sampled:
        """One token for each row, of the logits at these positions; None: there is one for each, in order. The logits
        may be overwritten, by this and as soon as it has returned.

        None instead of a token: the row has no logits to choose by."""
        ...


class TokenMask(Protocol):
    """What a sequence may say next. It belongs to that sequence."""

    @property
    def failure(self) -> str:
        """Why it can say nothing any more; empty: it can."""
        ...

    def may_forbid(self, tokens: Seq[int], start: int, num_in_flight: int, /) -> bool:
        """Whether some token may not follow tokens[start:] and so many more, whichever those are. Where that is not so,
        it need not be asked."""
        ...

    def allowed(self, tokens: Seq[int], start: int, /) -> NDArray[np.int32]:
        """Which tokens may follow tokens[start:], which the sequence has generated so far: a bit for each of the
        vocabulary, 32 in a word, the lowest first. None is set once `failure` says why."""
        ...

    def only(self, tokens: Seq[int], start: int, /) -> int | None:
        """The one token that `allowed` would allow, where that is known at once; None: it may be another, or several.
        Whoever asks need not take it."""
        ...

    def fork(self) -> TokenMask:
        """The mask of another choice, with the same tokens so far."""
        ...


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """How to choose the next token of one sequence. It is kept as long as the sequence lives."""

    sampling: Sampling
    seed: int  # of this choice; see core.types.request.choice_seed
    tokens: Seq[int]  # all so far
    num_prompt_tokens: int
    mask: TokenMask | None = None  # None: all tokens are allowed
    ruled: TokenRuleTensors | None = (
        None  # what its token rules say; made here where another choice has not handed it on
    )
    # How many tokens before the one to be chosen are not among `tokens`. While a step is planned, those that the one
    # before it is choosing: 0 or 1. See also `behind`.
    num_in_flight: int = field(default=0, init=False)
    is_contradicted: bool = field(default=False, init=False)  # a sampler has found that what is asked leaves no token
    has_penalties: bool = field(init=False, repr=False)
    asks_more: bool = field(init=False, repr=False)  # than for the greatest logit, but for what its mask asks
    _reads_tokens: bool = field(init=False, repr=False)
    _filters: tuple[int, ...] | None = field(default=None, init=False, repr=False)
    _penalties: Penalties | None = field(default=None, init=False, repr=False)
    _early_stops: NDArray[np.int64] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.asks_more = not self.sampling.is_plain
        if self.ruled is None and self.sampling.token_rules is not None:
            self.ruled = TokenRuleTensors(self.sampling.token_rules)
        self.has_penalties = self.sampling.has_penalties
        self._reads_tokens = self.has_penalties or (self.ruled is not None and self.ruled.reads_tokens)

    @property
    def is_plain(self) -> bool:
        """The greatest logit is all that is asked for."""
        return not (self.asks_more or self.is_masked)

    @property
    def is_masked(self) -> bool:
        """Its mask may forbid some token."""
        return self._is_masked_behind(self.num_in_flight)

    @property
    def position(self) -> int:
        """Of the token to be chosen."""
        return len(self.tokens) + self.num_in_flight

    @property
    def may_read_tokens(self) -> bool:
        """Sooner or later, `reads_tokens`."""
        return self._reads_tokens or self.mask is not None

    @property
    def reads_tokens(self) -> bool:
        """It must know the next token to say what is asked of the one behind that."""
        return self._reads_tokens or self._is_masked_behind(1)

    def goes_one_by_one(self, num_drafted: int) -> bool:
        """What is asked of it, as far as behind so many tokens, must be told of one before it is asked of the next."""
        return self._reads_tokens or self.ruled is not None or self._is_masked_behind(num_drafted)

    def behind(self, num_drafted: int) -> SamplingRow:
        """How to choose so many tokens later, whatever they are: of one that does not go one by one. Who asks for the
        greatest logit alone, as most do, asks the same at every place."""
        if not self.asks_more and self.mask is None:
            return self
        row = copy(self)
        row.num_in_flight = num_drafted
        return row

    @property
    def num_generated(self) -> int:
        return self.position - self.num_prompt_tokens

    @property
    def filters(self) -> tuple[int, ...]:
        """Temperature, top-k, top-p and ln(min-p) as a kernel is told them: fractions as the bits of fp32."""
        if self._filters is None:
            asked = self.sampling
            fractions = asked.temperature, asked.top_p, math.log(asked.min_p) if asked.min_p > 0 else -math.inf
            temperature, top_p, least = np.array(fractions, np.float32).view(np.int32).tolist()
            self._filters = temperature, max(0, min(asked.top_k, _MOST)), top_p, least
        return self._filters

    @property
    def is_early(self) -> bool:
        """No stop token may be chosen yet."""
        least = self.sampling.min_tokens
        return least > 0 and least > self.num_generated

    def early_stops(self) -> NDArray[np.int64]:
        """The stop tokens, made once: a request may have many, and many choices. A model may name ids that it has
        not."""
        if self._early_stops is None:
            self._early_stops = np.array(self.sampling.stop_token_ids, np.int64)
        return self._early_stops

    def forbidden(self, ruled: TokenRuleTensors) -> list[int]:
        """What would end a bad word."""
        return ruled.forbidden(self.tokens, self.num_prompt_tokens)

    @property
    def may_be_known(self) -> bool:
        """Its next token, before there are logits."""
        return self.mask is not None and self.sampling.num_logprobs is None

    def known_token(self) -> int | None:
        """The token that would be chosen whatever the logits are; None: it depends on them, or they are to be told."""
        if self.mask is None or self.sampling.num_logprobs is not None:
            return None
        token_id = self.mask.only(self.tokens, self.num_prompt_tokens)
        return token_id if token_id is not None and self._permits(token_id) else None

    def _is_masked_behind(self, num_in_flight: int) -> bool:
        mask = self.mask
        return mask is not None and mask.may_forbid(self.tokens, self.num_prompt_tokens, num_in_flight)

    def _permits(self, token_id: int) -> bool:
        """Nothing else that is asked forbids it."""
        if self.is_early and token_id in self.sampling.stop_token_ids:
            return False
        ruled = self.ruled
        if ruled is None:
            return True
        is_allowed = not len(ruled.allowed) or bool((ruled.allowed == token_id).any())
        return is_allowed and token_id not in self.forbidden(ruled)

    def penalties(self) -> Penalties:
        """Those of the tokens so far."""
        if self._penalties is None:
            self._penalties = Penalties(self.sampling, self.tokens, self.num_prompt_tokens)
        self._penalties.note()
        return self._penalties

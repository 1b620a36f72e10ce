"""Parameters of the next token's choice, and the sampler interface. Free of torch."""

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
    """Tokens chosen for some rows, possibly still in flight from a device."""

    token_ids: Any  # (R,) on the sampling device, for the next step; negative if there is no token
    wait: Callable[[], Seq[Chosen | None]]  # waits for the device and returns one entry per row; called once

    @classmethod
    def known(cls, chosen: Seq[Chosen | None]) -> Sampled:
        """Return tokens that are on the host already."""
        return cls([one[0] if one else -1 for one in chosen], lambda: chosen)


class Sampler(Protocol[Logits]):
    """Sampler interface; see engine.sampling.sampler."""

    def __call__(self, logits: Logits, rows: Seq[SamplingRow], positions: Seq[int] | None, /) -> Sampled:
        """Choose one token for each row from the logits at these positions; positions None: one per row, in order.

        May overwrite the logits; the caller may do so as soon as the call has returned. A row without usable logits
        gets None instead of a token.
        """
        ...


class TokenMask(Protocol):
    """Grammar state of one sequence: the tokens allowed next."""

    @property
    def failure(self) -> str:
        """Reason why no token is allowed any more; empty while some are."""
        ...

    def may_forbid(self, tokens: Seq[int], start: int, num_in_flight: int, /) -> bool:
        """Return True if some token may be forbidden after tokens[start:] and any `num_in_flight` further tokens.

        If not, `allowed` need not be called.
        """
        ...

    def allowed(self, tokens: Seq[int], start: int, /) -> NDArray[np.int32]:
        """Return the tokens allowed after tokens[start:], which the sequence has generated so far.

        One bit per token of the vocabulary, 32 to a word, lowest bit first. All bits are 0 once `failure` is set.
        """
        ...

    def only(self, tokens: Seq[int], start: int, /) -> int | None:
        """Return the single token that `allowed` would allow, if known cheaply, else None.

        The caller need not use it.
        """
        ...

    def fork(self) -> TokenMask:
        """Return a copy for another choice with the same tokens so far."""
        ...


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """Sampling parameters and state of one sequence. Lives as long as the sequence."""

    sampling: Sampling
    seed: int  # per choice; see core.types.request.choice_seed
    tokens: Seq[int]  # prompt and generated tokens
    num_prompt_tokens: int
    mask: TokenMask | None = None  # None: all tokens are allowed
    ruled: TokenRuleTensors | None = None  # token rules, shared between choices; built here if None
    # Number of tokens before the one to be chosen that are not in `tokens` yet. While a step is planned, 0 or 1: the
    # previous step is choosing it. See also `behind`.
    num_in_flight: int = field(default=0, init=False)
    # Set by the sampler if the constraints allow no token.
    is_contradicted: bool = field(default=False, init=False)
    has_penalties: bool = field(init=False, repr=False)
    # True if the choice needs more than the greatest logit and the mask.
    has_options: bool = field(init=False, repr=False)
    _reads_tokens: bool = field(init=False, repr=False)
    _filters: tuple[int, ...] | None = field(default=None, init=False, repr=False)
    _penalties: Penalties | None = field(default=None, init=False, repr=False)
    _early_stops: NDArray[np.int64] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.has_options = not self.sampling.is_plain
        if self.ruled is None and self.sampling.token_rules is not None:
            self.ruled = TokenRuleTensors(self.sampling.token_rules)
        self.has_penalties = self.sampling.has_penalties
        self._reads_tokens = self.has_penalties or (self.ruled is not None and self.ruled.reads_tokens)

    @property
    def is_plain(self) -> bool:
        """True if only the greatest logit is needed."""
        return not (self.has_options or self.is_masked)

    @property
    def is_masked(self) -> bool:
        """True if the mask may forbid some token."""
        return self._is_masked_behind(self.num_in_flight)

    @property
    def position(self) -> int:
        """Position of the token to be chosen."""
        return len(self.tokens) + self.num_in_flight

    @property
    def may_read_tokens(self) -> bool:
        """True if `reads_tokens` can ever be true."""
        return self._reads_tokens or self.mask is not None

    @property
    def reads_tokens(self) -> bool:
        """True if the parameters of the token after next depend on the next token."""
        return self._reads_tokens or self._is_masked_behind(1)

    def is_sequential(self, num_drafted: int) -> bool:
        """Return True if the choices within `num_drafted` tokens depend on each other and must be made in order."""
        return self._reads_tokens or self.ruled is not None or self._is_masked_behind(num_drafted)

    def behind(self, num_drafted: int) -> SamplingRow:
        """Return the row that chooses the token `num_drafted` positions later, whatever the tokens in between are.

        Do not call if `is_sequential(num_drafted)`. A plain greedy row, the usual case, is the same at every position.
        """
        if not self.has_options and self.mask is None:
            return self
        row = copy(self)
        row.num_in_flight = num_drafted
        return row

    @property
    def num_generated(self) -> int:
        return self.position - self.num_prompt_tokens

    @property
    def filters(self) -> tuple[int, ...]:
        """Temperature, top-k, top-p and ln(min-p) in kernel format: fractions as the bits of fp32."""
        if self._filters is None:
            params = self.sampling
            fractions = params.temperature, params.top_p, math.log(params.min_p) if params.min_p > 0 else -math.inf
            temperature, top_p, least = np.array(fractions, np.float32).view(np.int32).tolist()
            self._filters = temperature, max(0, min(params.top_k, _MOST)), top_p, least
        return self._filters

    @property
    def is_early(self) -> bool:
        """True while min_tokens forbids the stop tokens."""
        least = self.sampling.min_tokens
        return least > 0 and least > self.num_generated

    def early_stops(self) -> NDArray[np.int64]:
        """Return the stop tokens, cached because there may be many. May contain ids outside the vocabulary."""
        if self._early_stops is None:
            self._early_stops = np.array(self.sampling.stop_token_ids, np.int64)
        return self._early_stops

    def forbidden(self, ruled: TokenRuleTensors) -> list[int]:
        """Return the tokens that would complete a bad word."""
        return ruled.forbidden(self.tokens, self.num_prompt_tokens)

    @property
    def may_be_forced(self) -> bool:
        """True if the next token may be known before there are logits."""
        return self.mask is not None and self.sampling.num_logprobs is None

    def known_token(self) -> int | None:
        """Return the next token if the mask forces it; None if it depends on logits or if logprobs are requested."""
        if self.mask is None or self.sampling.num_logprobs is not None:
            return None
        token_id = self.mask.only(self.tokens, self.num_prompt_tokens)
        return token_id if token_id is not None and self._permits(token_id) else None

    def _is_masked_behind(self, num_in_flight: int) -> bool:
        mask = self.mask
        return mask is not None and mask.may_forbid(self.tokens, self.num_prompt_tokens, num_in_flight)

    def _permits(self, token_id: int) -> bool:
        """Return True if neither min_tokens nor the token rules forbid the token."""
        if self.is_early and token_id in self.sampling.stop_token_ids:
            return False
        ruled = self.ruled
        if ruled is None:
            return True
        is_allowed = not len(ruled.allowed) or bool((ruled.allowed == token_id).any())
        return is_allowed and token_id not in self.forbidden(ruled)

    def penalties(self) -> Penalties:
        """Return the penalties for the tokens so far."""
        if self._penalties is None:
            self._penalties = Penalties(self.sampling, self.tokens, self.num_prompt_tokens)
        self._penalties.note()
        return self._penalties

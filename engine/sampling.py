"""How the next token of a sequence is to be chosen: what a sampler is asked. No torch is needed to ask."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cluster.words.request import Sampling, TokenLogprob, choice_seed
from engine.sequence import Sequence

Chosen = tuple[int, TokenLogprob | None]
Logits = TypeVar("Logits", contravariant=True)


class Sampler(Protocol[Logits]):
    """See engine.sampler."""

    def __call__(self, logits: Logits, rows: Seq[SamplingRow], positions: Seq[int] | None, /) -> Seq[Chosen | None]:
        """One token for each row, of the logits at these positions; None: there is one for each, in order.

        None instead of a token: the row has no logits to choose by."""
        ...


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """How to choose the next token of one sequence."""

    sampling: Sampling
    seed: int  # of this choice; see cluster.words.request.choice_seed
    tokens: Seq[int]  # all so far; the one to be chosen has position len(tokens)
    num_prompt_tokens: int
    allowed: Seq[int] | None = None  # tokens; None: all

    @classmethod
    def of(cls, sequence: Sequence, choice: int | None = None) -> SamplingRow:
        """The row of a sequence; or of another choice of its request, which has the same tokens so far."""
        request, mask = sequence.request, sequence.mask
        sampling, num_prompt_tokens = request.sampling, request.num_prompt_tokens
        return cls(
            sampling=sampling,
            seed=sequence.seed if choice is None else choice_seed(sampling.seed, choice),
            tokens=sequence.tokens,
            num_prompt_tokens=num_prompt_tokens,
            allowed=mask.allowed(sequence.tokens[num_prompt_tokens:]) if mask else None,
        )

    @property
    def output(self) -> Seq[int]:
        return self.tokens[self.num_prompt_tokens :]

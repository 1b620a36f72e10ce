"""Requests as workers receive them: token ids and numbers, independent of any tokenizer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from core.types.constraints import Grammar
from core.types.thinking_budget import ThinkingBudget
from core.types.token_rules import TokenRules

# Lowest priority: such a request runs only when no other one waits.
OFFLINE = 2**31 - 1


class FinishReason(StrEnum):
    """Reason for the end of a sequence."""

    STOP = "stop"  # a stop token, an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context


class Role(StrEnum):
    """Role of a replica."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. Every field is resolved: None never stands for an unknown default.

    The choice is a function of (logits, token history, seed, position) only, never of the batch or the replica.
    """

    max_tokens: int = 16  # counted from the client's prompt, also after a migration
    min_tokens: int = 0  # stop tokens are masked before this many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output, as in transformers
    presence_penalty: float = 0.0  # output only, as in the OpenAI API
    frequency_penalty: float = 0.0
    seed: int = 0  # choice i of n draws from choice_seed(seed, i)
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless the client ignores them
    num_logprobs: int | None = None  # None: off; 0: the chosen token only; k: also the k likeliest
    token_rules: TokenRules | None = None  # None rather than empty rules

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """True if sampling is a bare argmax of the logits."""
        has_rules = self.has_penalties or self.min_tokens or self.token_rules is not None
        return self.is_greedy and not has_rules and self.num_logprobs is None


@dataclass(frozen=True, kw_only=True)
class SequenceRequest:
    """Client request as it reaches a worker: one sequence per entry of `choices`."""

    id: str
    token_ids: tuple[int, ...]  # the prompt and, after a migration, the tokens generated so far
    num_prompt_tokens: int  # how many of token_ids the client sent
    sampling: Sampling = field(default_factory=Sampling)
    choices: tuple[int, ...] = (0,)  # which of the client's n choices run here
    stream: int = 0  # key of choice 0 of `choices` in the token frames; choice j has stream + j
    salt: str = ""  # salt of its prefix hashes: 32 hex digits, or empty
    adapter: str = ""
    grammar: Grammar | None = None  # of every choice
    thinking: ThinkingBudget | None = None  # of every choice; None: unlimited
    # For the prompt's own tokens, like Sampling.num_logprobs. The replica then computes the whole prompt and reads no
    # cached prefix: log-probabilities are not cached.
    num_prompt_logprobs: int | None = None
    tenant: str = ""  # key of fair sharing of the router's queue and a replica's blocks
    user: str = ""  # key of fair sharing within a tenant's queue; not sent to workers
    priority: int = 0  # smaller first
    deadline_s: float | None = None  # remaining when the message was sent
    traceparent: str = field(default="", compare=False)  # W3C; sent as call metadata; empty: not traced

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural-log probabilities under the unmodified distribution (before rules, penalties, temperature …)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(slots=True, kw_only=True)
class DraftTally:
    """Draft statistics of a choice."""

    steps: int = 0  # decode steps
    drafts: int = 0  # steps with a draft
    unguessed: int = 0  # steps for which no proposer had a draft; in the remaining ones a draft was not worth its cost
    drafted: int = 0  # tokens
    accepted: int = 0  # tokens
    floors: float = 0.0  # sum over the steps of the acceptance probability at which a drafted token breaks even

    def add(self, other: DraftTally) -> None:
        self.steps += other.steps
        self.drafts += other.drafts
        self.unguessed += other.unguessed
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.floors += other.floors


# Allocated for each token of each row: keyword arguments would double the cost.
@dataclass(slots=True)
class SampledToken:
    """Sampled token of one choice, as it leaves a worker."""

    token_id: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    drafts: DraftTally | None = None  # statistics since the choice's last token that carried one

    @property
    def is_plain(self) -> bool:
        """True if the token has no data besides its id."""
        return self.logprob is None and self.finish_reason is None and self.drafts is None


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice `choice` of a request. Choice 0 keeps the request's own seed."""
    if choice == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_seed() -> int:
    """Return a seed for a request without one. Drawn once, so that a retry or a migration repeats its tokens."""
    return secrets.randbits(63)


def finish_reason(
    token_id: int, *, num_generated: int, num_tokens: int, sampling: Sampling, max_context: int
) -> FinishReason | None:
    """Return why a sequence ends with `token_id`, its num_generated-th token (counting it); None if it continues.

    num_tokens counts the whole sequence, this token included. Prefill, decode and router share this rule, so that none
    of them waits for a token that another will not send.
    """
    if num_generated > sampling.min_tokens and token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_generated >= sampling.max_tokens or num_tokens >= max_context:
        return FinishReason.LENGTH
    return None

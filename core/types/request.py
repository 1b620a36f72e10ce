"""A request as the workers see it: token ids and numbers, nothing that needs a tokenizer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from core.types.constraints import Grammar
from core.types.thinking_budget import ThinkingBudget
from core.types.token_rules import TokenRules

OFFLINE = 2**31 - 1  # the last of all priorities: such a request goes when nobody of any other waits


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context


class Role(StrEnum):
    """What a replica does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose the next token. Every field is resolved: no None stands for a default that others must guess.

    The choice is a function of (logits, token history, seed, position) only, never of the batch or the replica.
    """

    max_tokens: int = 16  # counted from the client's prompt, also after a migration
    min_tokens: int = 0  # no stop token is chosen before this many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output, as in transformers
    presence_penalty: float = 0.0  # output only, as in the OpenAI API
    frequency_penalty: float = 0.0
    seed: int = 0  # choice i of n draws from choice_seed(seed, i)
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless the client ignores them
    num_logprobs: int | None = None  # None: none; 0: of the chosen token only; k: and of the k likeliest
    token_rules: TokenRules | None = None  # None: none, never such as say nothing

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """The greatest logit is all that is asked for."""
        has_rules = self.has_penalties or self.min_tokens or self.token_rules is not None
        return self.is_greedy and not has_rules and self.num_logprobs is None


@dataclass(frozen=True, kw_only=True)
class SequenceRequest:
    """One client request as it reaches a worker. It stands for one sequence per entry of `choices`."""

    id: str
    token_ids: tuple[int, ...]  # the prompt and, after a migration, the tokens generated so far
    num_prompt_tokens: int  # how many of token_ids the client sent
    sampling: Sampling = field(default_factory=Sampling)
    choices: tuple[int, ...] = (0,)  # which of the client's n choices run here
    stream: int = 0  # key of choice 0 of `choices` in the token frames; choice j has stream + j
    salt: str = ""  # what keys its prefix hashes: 32 hex digits, or nothing
    adapter: str = ""
    grammar: Grammar | None = None  # what every choice must keep to
    thinking: ThinkingBudget | None = None  # for how long each may think; None: as long as it will
    # Of the prompt's own tokens, as Sampling.num_logprobs. Whoever computes the prompt then computes all of it, and
    # takes nothing from a cache: log-probabilities are not kept there.
    num_prompt_logprobs: int | None = None
    tenant: str = ""  # whom the router's queue and a replica's blocks are shared out to
    user: str = ""  # among whom the queue shares out what a tenant has; workers are not told
    priority: int = 0  # smaller first
    deadline_s: float | None = None  # remaining, when the message was sent
    traceparent: str = field(default="", compare=False)  # of W3C; in a call's metadata, not in its message; "": none

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
    """What was drafted for a choice, by a replica that drafts at all."""

    steps: int = 0  # in which it decoded
    drafts: int = 0  # of these, with a draft
    unguessed: int = 0  # and without, for nobody had a guess; in the others a guess was not worth it
    drafted: int = 0  # tokens
    accepted: int = 0  # of these
    floors: float = 0.0  # added up over the steps: the chance that a drafted token needed to be worth it

    def add(self, other: DraftTally) -> None:
        self.steps += other.steps
        self.drafts += other.drafts
        self.unguessed += other.unguessed
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.floors += other.floors


BRANCHES = "branches"  # of drafts, among the methods by which drafted tokens are counted: they stand beside those


@dataclass(slots=True)  # made for each token of each row: arguments by name would take twice as long
class SampledToken:
    """One token of one choice, as it leaves a worker."""

    token_id: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    drafts: DraftTally | None = None  # with some: of its choice, since the last one that had it

    @property
    def is_plain(self) -> bool:
        """It is its id, and nothing else."""
        return self.logprob is None and self.finish_reason is None and self.drafts is None


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request; choice 0 keeps the request's own."""
    if choice == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_seed() -> int:
    """A seed for a request that came without one, drawn once so that a retry or a migration repeats its tokens."""
    return secrets.randbits(63)


def finish_reason(
    token_id: int, *, num_generated: int, num_tokens: int, sampling: Sampling, max_context: int
) -> FinishReason | None:
    """Why a sequence ends with `token_id`, its num_generated-th token (counting it), or None if it goes on.

    num_tokens counts the whole sequence, this token included. Prefill, decode and router share this rule, so that none
    of them waits for a token that another will not send.
    """
    if num_generated > sampling.min_tokens and token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_generated >= sampling.max_tokens or num_tokens >= max_context:
        return FinishReason.LENGTH
    return None

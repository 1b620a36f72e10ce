"""Requests as workers receive them: token ids, sampling, token rules, thinking budget and grammar; no tokenizer."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import chain

from core.types.validation import check

# Lowest priority: such a request runs only when no other one waits.
OFFLINE = 2**31 - 1

MAX_SCHEMA_BYTES = 64 * 1024
# Limit of a regular expression, and of a grammar without its schemas: the cost of a mask grows with their length.
MAX_GRAMMAR_BYTES = 8 * 1024
_MAX_INTEGER, _MAX_DIGITS = 2**53 - 1, 17  # digits include a sign
SCHEMA_RULE = re.compile(r"^(\w+: %json )(.+)$", re.MULTILINE)  # group 2: the schema
MAX_LOGIT_BIAS = 1024  # tokens, as in vLLM; OpenAI takes 300
MAX_BIAS = 100.0  # as in the OpenAI API
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024  # of all bad words, in all their tokenizations
_MAX_MARKER = 256  # characters, and also tokens


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
    """Return why a sequence ends with `token_id`, its num_generated-th generated token; None if it continues.

    num_tokens counts the whole sequence, this token included. Prefill, decode and router share this rule, so that none
    of them waits for a token that another will not send.
    """
    if num_generated > sampling.min_tokens and token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_generated >= sampling.max_tokens or num_tokens >= max_context:
        return FinishReason.LENGTH
    return None


class GrammarKind(StrEnum):
    """Syntax of a grammar."""

    JSON_SCHEMA = "json_schema"
    LENIENT_JSON_SCHEMA = "lenient_json_schema"  # ignores keywords that cannot be enforced
    REGEX = "regex"  # Rust syntax; matches the whole answer
    LARK = "lark"  # llguidance's dialect; the answer matches `start`
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's JSON form; the router converts it to LARK


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Grammar of every choice of a request, as text. `core.grammar` compiles it."""

    kind: GrammarKind
    text: str

    @classmethod
    def of_choice(cls, texts: Sequence[str], param: str) -> Grammar:
        """Make a grammar whose answers are `texts`. Raises RequestError if they are empty or too long together."""
        check(bool(texts), param, "must not be empty")
        fits = len(texts) + sum(map(len, texts[:MAX_GRAMMAR_BYTES])) <= MAX_GRAMMAR_BYTES
        check(fits, param, f"must have at most {MAX_GRAMMAR_BYTES} bytes together")
        return cls(kind=GrammarKind.LARK, text="start: " + " | ".join(map(in_quotes, texts)))

    def check(self, param: str) -> None:
        """Check the grammar's size and its schemas' integers. Raises RequestError."""
        check(bool(self.text), param, "must not be empty")
        is_small = self.kind is GrammarKind.REGEX
        _check_size(self.text, param, MAX_GRAMMAR_BYTES if is_small else MAX_SCHEMA_BYTES)
        schemas = [self.text] if self.kind is GrammarKind.JSON_SCHEMA else []
        if self.kind is GrammarKind.LARK:
            _check_size(SCHEMA_RULE.sub(_without_schema, self.text), param, MAX_GRAMMAR_BYTES)
            schemas = [rule[2] for rule in SCHEMA_RULE.finditer(self.text) if not _is_lenient(rule[2])]
        for schema in schemas:
            _check_integers(schema, param)


ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')


def in_quotes(text: str) -> str:
    """Quote `text` as a Lark literal. Lark accepts JSON's escapes and no raw control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _check_size(text: str, param: str, most: int) -> None:
    check(len(text.encode(errors="surrogatepass")) <= most, param, f"must have at most {most} bytes")


def _check_integers(schema: str, param: str) -> None:
    """Reject integers that fp64 cannot represent: masks treat numbers as fp64 and would allow another one."""

    def check_one(digits: str) -> int:
        is_exact = len(digits) <= _MAX_DIGITS and abs(int(digits)) <= _MAX_INTEGER
        check(is_exact, param, f"integers must be from {-_MAX_INTEGER} to {_MAX_INTEGER}; write larger ones as text")
        return 0

    try:
        json.loads(schema, parse_int=check_one)
    except (ValueError, RecursionError):
        return  # the compiler reports the syntax error


def _is_lenient(schema: str) -> bool:
    """True if the schema asks to ignore keywords that cannot be enforced."""
    try:
        return json.loads(schema)["x-guidance"]["lenient"] is True
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _without_schema(rule: re.Match[str]) -> str:
    """Return the rule without its schema, or unchanged if it holds more than a schema.

    Schemas count towards a limit of their own.
    """
    try:
        return rule[1] if isinstance(json.loads(rule[2]), dict) else rule[0]
    except (ValueError, RecursionError):
        return rule[0]


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Token rules of every choice of a request. They depend on a choice's generated tokens only."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit); each token once
    allowed_token_ids: tuple[int, ...] = ()  # all other tokens are masked; empty: no limit
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each is masked after the tokens before it

    @property
    def says_nothing(self) -> bool:
        return not (self.logit_bias or self.allowed_token_ids or self.bad_words)

    def check(self, vocab_size: int) -> None:
        """Check the bounds that a step relies on. Raises RequestError that names the field.

        Kept fast: a batch call checks it for each of up to a thousand prompts.
        """
        biased, biases = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        _check_ids(biased, "logit_bias", MAX_LOGIT_BIAS, vocab_size)
        check(len(set(biased)) == len(biased), "logit_bias", "must name a token once")
        is_bounded = (
            math.isfinite(sum(biases)) and -MAX_BIAS <= min(biases, default=0) and max(biases, default=0) <= MAX_BIAS
        )
        check(is_bounded, "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        _check_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKENS, vocab_size)
        check(all(self.bad_words), "bad_words", "must have at least one token each")
        _check_ids(tuple(chain.from_iterable(self.bad_words)), "bad_words", MAX_BAD_WORD_TOKENS, vocab_size)


def _check_ids(token_ids: Sequence[int], param: str, most: int, vocab_size: int) -> None:
    check(len(token_ids) <= most, param, f"must have at most {most} tokens, not {len(token_ids)}")
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        check(0 <= token_id < vocab_size, param, f"{token_id} is no token id; the vocabulary has {vocab_size}")


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """Thinking budget of every choice of a request.

    The forced tokens are a function of a choice's generated tokens: after `num_tokens` of thinking, `closing_ids`
    follow one after the other.
    """

    num_tokens: int  # between the markers; 0: the closing marker follows at once
    is_open: bool  # True: the prompt ends inside the thinking; False: the answer may start it with `opening`
    opening: str  # marker text, independent of its tokenization
    closing: str
    closing_ids: tuple[int, ...]  # tokens of `closing`

    def check(self, vocab_size: int) -> None:
        """Check the bounds that a step relies on. Raises RequestError that names the field."""
        check(self.num_tokens >= 0, "thinking", "must have a budget of 0 or more")
        for text in (self.opening, self.closing):
            check(0 < len(text) <= _MAX_MARKER, "thinking", f"a marker must have 1 to {_MAX_MARKER} characters")
        ids = self.closing_ids
        check(0 < len(ids) <= _MAX_MARKER, "thinking", f"the closing marker must have 1 to {_MAX_MARKER} tokens")
        check(
            0 <= min(ids) and max(ids) < vocab_size,
            "thinking",
            f"the closing marker must have token ids below {vocab_size}",
        )

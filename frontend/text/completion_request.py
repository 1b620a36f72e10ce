"""A request as both doors hand it in: text, chat or tokens, and how to go on from there. And the rules it must keep."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.types.constraints import Grammar
from core.types.errors import ContextLengthExceeded, RequestError, UnknownModel
from core.types.prompt_logprobs import MAX_PROMPT_NUMBERS
from core.types.request import Sampling, random_seed
from core.types.token_rules import TokenRules
from frontend.chat.chat import Chat
from frontend.text.bad_words import check_bad_words

MAX_REQUEST_BYTES = 10 * 1024 * 1024  # what either door reads of one request
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # it goes into logs and headers
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_SALT_CHARS = 1024
MAX_USER_CHARS = 256
MAX_MESSAGES = 4096  # and no more than the context has tokens
MAX_ROLE_CHARS = 64
MAX_ALL_CALLS = 4096  # in all messages
MAX_TOOLS_CHARS = 2**20  # of the schemas of all tools
GREEDY_BELOW = 1e-5  # a temperature so small is greedy; dividing by it would overflow
_SEED_BITS = (1 << 63) - 1

# field: (lowest, highest, whether the lowest itself is allowed). The wire is float32, so there is always a highest.
RANGES: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "top_k": (-1, 2**31 - 1, True),
    "repetition_penalty": (0.01, 100, True),  # logits are divided by it, in float32: by less they may overflow
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "n": (1, MAX_CHOICES, True),
    "best_of": (1, MAX_CHOICES, True),
    "thinking_token_budget": (0, 2**31 - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
    "max_tokens": (1, 2**31 - 1, True),
    "min_tokens": (0, 2**31 - 1, True),
    "seed": (-(2**63), 2**64 - 1, True),
    "priority": (-(2**31), 2**31 - 1, True),
    "truncate_prompt_tokens": (-1, 2**31 - 1, True),
}


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the doors say of the model that this cluster serves, and what bounds a request to it."""

    id: str  # what clients call it
    max_context: int  # tokens, prompt and answer together
    vocab_size: int  # rows of the embedding; a token id is below it
    dtype: str
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds; when this router took it up
    max_choices: int = MAX_CHOICES  # that one replica runs at once

    @property
    def max_answer_tokens(self) -> int:
        """Of all choices that one call asks for: as many as one replica could hold at once, whole contexts each."""
        return self.max_context * self.max_choices


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """What a client left out has its default here, or None where the router chooses, or the model's template."""

    id: str  # the client's, or one that the door chose; it need not be unique
    prompt: str | Chat | tuple[int, ...]
    model: str = ""  # empty: the one that is served
    truncate_prompt_tokens: int | None = None  # keep the last so many; -1: as many as leave the answer its room
    add_special_tokens: bool | None = None  # None: to a text, and not to a chat, whose template writes them
    max_tokens: int | None = None  # None: what the context has room for
    max_tokens_field: str = "max_tokens"  # what the client calls it
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 and -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[str, ...] = ()  # that no answer contains
    ignore_eos: bool = False
    include_stop: bool = False  # the text keeps the stop string, or the stop token, that ended it
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None  # choices of which the n best are answered; None: n
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k likeliest
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens
    prompt_logprobs_field: str = "prompt_logprobs"  # what the client calls it
    thinking_token_budget: int | None = None  # that each answer thinks for at most; None: as long as it will
    thinking_field: str = "thinking_token_budget"  # what the client calls it
    grammar: Grammar | None = None  # what every answer keeps to
    grammar_field: str = "grammar"  # what the client calls it
    user: str = ""  # whose share it takes of what its tenant has
    cache_salt: str = ""  # prefixes are shared only with requests of the same word
    priority: int = 0  # smaller first, among a user's
    peer: str = ""  # who has connected, for the trail
    deadline_s: float | None = None  # remaining; None: the router's own limit
    # What is not the client's to say: frontend.access.identity sets it.
    key_id: str = ""  # of its API key: for logs, and for its part of the threads that work on texts
    tenant: str = ""  # the queue is shared out fairly among tenants
    salt: str = ""  # what keys its prefix hashes
    max_answer: int | None = None  # tokens of one answer; None: no limit but the context
    is_cache_told: bool = True  # whether it hears how much of its prompt was cached

    @property
    def num_choices(self) -> int:
        """That run."""
        return self.n if self.best_of is None else self.best_of

    @property
    def choices_field(self) -> str:
        """What the client calls these."""
        return "n" if self.best_of is None else "best_of"

    def called(self, name: str) -> str:
        """What the client calls that field."""
        names = {"max_tokens": self.max_tokens_field, "thinking_token_budget": self.thinking_field}
        return names.get(name, name)

    def in_its_words(self, error: RequestError) -> RequestError:
        """A refusal by the core, which knows of choices no more than how many run."""
        field = self.choices_field
        return error if error.param != "n" else RequestError(f"{field}{str(error).removeprefix('n')}", param=field)

    @property
    def is_ranked(self) -> bool:
        """More run than are answered."""
        return self.num_choices > self.n


def check(request: CompletionRequest, model: ModelCard) -> None:
    """What can be known before the prompt is tokens. Raises UnknownModel or RequestError, which name the field."""
    if not REQUEST_ID.fullmatch(request.id):
        raise RequestError("request_id: must be 1 to 128 visible ASCII characters", param="request_id")
    if request.model not in ("", model.id):
        raise UnknownModel(not_served(request.model, [model.id]), param="model")
    for name, (lowest, highest, is_lowest_allowed) in RANGES.items():
        value = getattr(request, name)
        if value is None:
            continue
        if not lowest <= value <= highest or (value == lowest and not is_lowest_allowed):  # NaN fails as well
            rule = f"from {lowest} to {highest}" if is_lowest_allowed else f"above {lowest} and at most {highest}"
            called = request.called(name)
            raise RequestError(f"{called}: must be {rule}, not {value}", param=called)
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        most = f"{request.max_tokens_field}, {request.max_tokens}"
        raise RequestError(
            f"min_tokens: must not exceed {most}, but is {request.min_tokens}",
            param="min_tokens",
        )
    _check_choices(request, model)
    _check_stops(request)
    check_bad_words(request.bad_words)
    if request.allowed_token_ids == ():
        raise RequestError("allowed_token_ids: must not be empty; left out, all are allowed", param="allowed_token_ids")
    _check_grammar(request)
    if isinstance(request.prompt, Chat):
        _check_chat(request.prompt, model)
    check_token_ids(request.stop_token_ids, model, param="stop_token_ids")
    if not isinstance(request.prompt, str | Chat):
        check_token_ids(request.prompt, model, param="prompt")


def not_served(name: str, models: Sequence[str]) -> str:
    """What a client is told that has asked for another model than these."""
    *others, last = map(repr, models)
    said = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"model {name[:128]!r} is not served here; {said}"


def check_total(num_tokens: int, model: ModelCard, *, param: str = "max_tokens") -> None:
    """num_tokens: that all choices of a call may have. Raises RequestError."""
    if num_tokens > model.max_answer_tokens:
        raise RequestError(
            f"{param}: times n and prompts at most {model.max_answer_tokens}, not {num_tokens}", param=param
        )


def num_prompt_numbers(request: CompletionRequest, num_tokens: int) -> int:
    """Log-probabilities that are told of a prompt of so many tokens."""
    return 0 if request.prompt_logprobs is None else num_tokens * (1 + request.prompt_logprobs)


def check_prompt_numbers(number: int, *, param: str) -> None:
    """Of all choices in which they are told. Raises RequestError."""
    if number > MAX_PROMPT_NUMBERS:
        raise RequestError(
            f"{param}: with one more for each token itself, times the prompt's tokens, n and prompts at most "
            f"{MAX_PROMPT_NUMBERS}, not {number}",
            param=param,
        )


def truncated(prompt_ids: tuple[int, ...], request: CompletionRequest, model: ModelCard) -> tuple[int, ...]:
    """The last of them, where the request asks for that."""
    num = request.truncate_prompt_tokens
    if num is None or not prompt_ids:
        return prompt_ids
    if num < 0:
        num = max(1, model.max_context - max(1, request.max_tokens or 1, request.min_tokens))
    if num == 0:
        raise RequestError("truncate_prompt_tokens: must be -1 or at least 1", param="truncate_prompt_tokens")
    return prompt_ids[-num:]


def sampling_of(
    request: CompletionRequest,
    model: ModelCard,
    *,
    num_prompt_tokens: int,
    eos_token_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """The resolved sampling of a checked request. Raises ContextLengthExceeded, or RequestError for an empty prompt.

    bad_words: those of the request, as tokens.
    """
    if num_prompt_tokens == 0:
        raise RequestError("prompt: must not be empty", param="prompt")
    room = model.max_context - num_prompt_tokens
    if room < max(1, request.min_tokens, request.max_tokens or 0):
        asked = f" and {request.max_tokens} for the answer" if request.max_tokens else ""
        fix = f"ask for {room} at most" if room > 0 else "shorten the prompt"
        raise ContextLengthExceeded(
            f"this model's context holds {model.max_context} tokens, prompt and answer together; "
            f"the request needs {num_prompt_tokens} for the prompt{asked}; {fix}",
            param="messages" if isinstance(request.prompt, Chat) else "prompt",
        )
    ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos_token_ids)
    if request.grammar and not ends:
        text = f"{request.grammar_field}: this model has no end-of-sequence token with which an answer could end"
        raise RequestError(text, param=request.grammar_field)
    seed = random_seed() if request.seed is None else request.seed & _SEED_BITS
    return Sampling(
        max_tokens=request.max_tokens or min(room, request.max_answer or room),
        min_tokens=request.min_tokens,
        temperature=0.0 if request.temperature < GREEDY_BELOW else request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=seed,
        stop_token_ids=tuple(sorted(ends)),
        num_logprobs=0 if request.is_ranked and request.logprobs is None else request.logprobs,
        token_rules=_token_rules(request, model, bad_words),
    )


def _check_choices(request: CompletionRequest, model: ModelCard) -> None:
    num, called = request.num_choices, request.choices_field
    if num < request.n:
        raise RequestError(f"best_of: must not be less than n, {request.n}, but is {num}", param="best_of")
    if num > model.max_choices:
        text = f"{called}: a replica runs at most {model.max_choices} choices at once, not {num}"
        raise RequestError(text, param=called)
    check_total(num * (request.max_tokens or 1), model, param=request.max_tokens_field)


def _check_chat(chat: Chat, model: ModelCard) -> None:
    limit = min(MAX_MESSAGES, model.max_context)  # each is a token at least
    if len(chat.messages) > limit:
        raise RequestError(f"messages: at most {limit} are taken, not {len(chat.messages)}", param="messages")
    if chat.num_calls > MAX_ALL_CALLS:
        raise RequestError(f"messages: at most {MAX_ALL_CALLS} calls are taken, not {chat.num_calls}", param="messages")
    for number, message in enumerate(chat.messages):
        if len(message.get("role", "")) > MAX_ROLE_CHARS:
            param = f"messages[{number}].role"
            raise RequestError(f"{param}: at most {MAX_ROLE_CHARS} characters are taken", param=param)


def _check_grammar(request: CompletionRequest) -> None:
    """An answer ends where its grammar lets it end, and nowhere else."""
    if request.grammar is None:
        return
    for name, value in (("ignore_eos", request.ignore_eos), ("min_tokens", request.min_tokens)):
        if value:
            text = f"{name}: cannot be together with {request.grammar_field}, which says where the answer ends"
            raise RequestError(text, param=name)


def _token_rules(
    request: CompletionRequest, model: ModelCard, bad_words: tuple[tuple[int, ...], ...]
) -> TokenRules | None:
    """Raises RequestError."""
    rules = TokenRules(
        logit_bias=request.logit_bias, allowed_token_ids=request.allowed_token_ids or (), bad_words=bad_words
    )
    if rules.says_nothing:
        return None
    rules.check(model.vocab_size)
    return rules


def _check_stops(request: CompletionRequest) -> None:
    if len(request.stop) > MAX_STOPS:
        raise RequestError(f"stop: at most {MAX_STOPS} strings are taken, not {len(request.stop)}", param="stop")
    for stop in request.stop:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop: a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}", param="stop"
            )
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(f"stop_token_ids: at most {MAX_STOP_TOKENS} are taken", param="stop_token_ids")


def check_token_ids(token_ids: tuple[int, ...], model: ModelCard, *, param: str) -> None:
    """Raises RequestError."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise RequestError(f"{param}: {wrong} is no token id; the vocabulary has {model.vocab_size}", param=param)

"""Answers that were finished here, for who asks the like of it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

from core.types.request import SequenceRequest
from engine.spec_decode.token_index import TokenIndex

MAX_TOKENS = 1 << 17  # of all scopes; a token takes about 200 bytes
MAX_SCOPE_TOKENS = 1 << 16
_MOST_NEW = 64  # answers that nobody has taken
_END = (1 << 31) - 1  # between two answers: no model has this token


class Scope(NamedTuple):
    """Whose answers they are. Nobody drafts from another's: how quick an answer comes would tell what others were
    told."""

    tenant: str
    salt: str
    adapter: str

    @classmethod
    def of(cls, request: SequenceRequest) -> Scope:
        return cls(request.tenant, request.salt, request.adapter)


class Answer(NamedTuple):
    """One that was finished, as other replicas may be told of it."""

    scope: Scope
    tokens: tuple[int, ...]


class Corpus:
    """Owned by the step thread. A scope's answers are in two halves: when the newer one is full, the older one goes,
    so that forgetting costs nothing. Beyond all bounds, who has not asked for longest is forgotten first."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_scope_tokens: int = MAX_SCOPE_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._max_half = max_scope_tokens // 2
        self._halves: OrderedDict[Scope, list[TokenIndex]] = OrderedDict()  # newest half last, latest scope last
        self._new: list[Answer] = []
        self.num_tokens = 0

    def add(self, answer: Answer, *, is_ours: bool = True) -> None:
        """is_ours: it was finished here."""
        tokens = answer.tokens[-self._max_half :]
        halves = self._halves.setdefault(answer.scope, [])
        self._halves.move_to_end(answer.scope)
        if not halves or len(halves[-1].tokens) + len(tokens) >= self._max_half:
            halves.append(TokenIndex([]))
            if len(halves) > 2:
                self.num_tokens -= len(halves.pop(0).tokens)
        halves[-1].tokens += (*tokens, _END)
        halves[-1].note()
        self.num_tokens += len(tokens) + 1
        while self.num_tokens > self._max_tokens and len(self._halves) > 1:
            _, gone = self._halves.popitem(last=False)
            self.num_tokens -= sum(len(half.tokens) for half in gone)
        if is_ours:
            self._new = [*self._new, answer][-_MOST_NEW:]

    def forget(self) -> None:
        """Every answer."""
        self._halves.clear()
        self._new, self.num_tokens = [], 0

    def take_new(self) -> list[Answer]:
        """What was finished here since the last call, as far as it is still known: for whoever tells other replicas."""
        new, self._new = self._new, []
        return new

    def continuations(self, scope: Scope, tokens: Seq[int], max_tokens: int) -> list[tuple[int, list[int]]]:
        """What followed the last of these tokens in answers, and how many of them were the same."""
        halves = self._halves.get(scope)
        if halves is None:
            return []
        self._halves.move_to_end(scope)
        found = []
        for half in reversed(halves):
            for match in half.matches(tokens):
                followed = half.tokens[match.next : match.next + max_tokens]
                if _END in followed:
                    followed = followed[: followed.index(_END)]
                if followed:
                    found.append((match.num_tokens, followed))
        return found

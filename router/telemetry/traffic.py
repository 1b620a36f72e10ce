"""The last requests of one router: their hashes, lengths and times, and never a word of them.

Always kept, in bounded memory. The ids of a prompt are chained hashes keyed by a secret of the deployment, of 64 tokens
each: who has them without the key can neither read a prompt out of them nor try whether a guess is right.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from time import monotonic

from core.trace.traffic import KEPT_S, TOKENS_PER_HASH, ReplicaReport, SeenRequest, TrafficReport

_MAX_REQUESTS = 50_000
_MAX_IDS = 2_000_000  # of all requests, eight bytes each
_ID_BYTES = 8


class TrafficRecord:
    """Lives on the router's event loop."""

    def __init__(self, key: bytes, *, router: str = "", now: Callable[[], float] = monotonic) -> None:
        self._key = key
        self._router = router
        self._now = now
        self._requests: OrderedDict[int, SeenRequest] = OrderedDict()  # by number, as they arrived
        self._next_number = 0
        self._num_ids = 0
        self._untold: dict[int, None] = {}  # numbers that nobody was told of
        self._changed: dict[int, None] = {}  # told of, but not of their first token, or that they are over
        self._unanswered: dict[int, Callable[[], float]] = {}  # until their first token
        self._num_lost = 0

    @property
    def num_requests(self) -> int:
        """That are remembered."""
        return len(self._requests)

    def arrived(self, token_ids: Sequence[int], *, salt: str, num_choices: int, ttft_s: Callable[[], float]) -> range:
        """A request with this prompt, one for each of its choices; its numbers, for `over`. ttft_s: 0 until there is a
        token."""
        ids = prefix_ids(self._key, salt, token_ids)
        numbers = range(self._next_number, self._next_number + num_choices)
        self._next_number += num_choices
        now = self._now()
        for number in numbers:
            self._requests[number] = SeenRequest(arrival_s=now, num_tokens=len(token_ids), ids=ids)
            self._untold[number] = None
            self._unanswered[number] = ttft_s
            self._num_ids += len(ids)
        self._forget(now)
        return numbers

    def over(self, numbers: range, num_outputs: Iterable[int], *, ttft_s: float, itl_s: float) -> None:
        """As many tokens of each choice. ttft_s: 0 where none came."""
        for number, num_output in zip(numbers, num_outputs, strict=True):
            self._unanswered.pop(number, None)
            if seen := self._requests.get(number):
                seen.num_output = num_output
                seen.ttft_s, seen.itl_s = ttft_s or None, itl_s or None
                self._note_change(number)

    def report(
        self, replicas: tuple[ReplicaReport, ...] = (), *, num_waiting: int = 0, all_of_it: bool = False
    ) -> TrafficReport:
        """What is new since the last call; or everything that is remembered. replicas, num_waiting: as the router
        knows them."""
        now = self._now()
        self._forget(now)
        self._note_first_tokens()
        told = self._requests if all_of_it else self._untold
        report = TrafficReport(
            router=self._router,
            arrived={number: _ago(self._requests[number], now) for number in told},
            changed={} if all_of_it else {number: _ago(self._requests[number], now) for number in self._changed},
            num_lost=self._num_lost,
            num_waiting=num_waiting,
            replicas=replicas,
        )
        self._untold, self._changed, self._num_lost = {}, {}, 0
        return report

    def _note_first_tokens(self) -> None:
        for number, ttft_s in list(self._unanswered.items()):
            if first := ttft_s():
                self._requests[number].ttft_s = first
                del self._unanswered[number]
                self._note_change(number)

    def _note_change(self, number: int) -> None:
        if number not in self._untold:
            self._changed[number] = None

    def _forget(self, now: float) -> None:
        """What is old, and what there is no room for."""
        requests = self._requests
        while requests:
            number, first = next(iter(requests.items()))
            is_full = len(requests) > _MAX_REQUESTS or self._num_ids > _MAX_IDS
            if not is_full and now - first.arrival_s <= KEPT_S:
                return
            del requests[number]
            self._num_ids -= len(first.ids or ())
            self._num_lost += self._untold.pop(number, 0) is None
            self._changed.pop(number, None)
            self._unanswered.pop(number, None)


def prefix_ids(key: bytes, salt: str, token_ids: Sequence[int]) -> Sequence[int]:
    """One id for every 64 tokens, and for what is left behind them: equal ids are equal prefixes, of one salt.

    Each hash is keyed, for the one before it is told, too.
    """
    packed = array("i", token_ids).tobytes()
    parent = blake2b(salt.encode(), key=key, digest_size=_ID_BYTES, person=b"traffic root").digest()
    chain = bytearray()
    for start in range(0, len(packed), 4 * TOKENS_PER_HASH):
        part = packed[start : start + 4 * TOKENS_PER_HASH]
        parent = blake2b(parent + part, key=key, digest_size=_ID_BYTES).digest()
        chain += parent
    return array("Q", bytes(chain))


def _ago(seen: SeenRequest, now: float) -> SeenRequest:
    return replace(seen, arrival_s=now - seen.arrival_s)

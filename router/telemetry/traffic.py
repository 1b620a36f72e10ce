"""Record of one router's last requests (prefix hashes, lengths and times; no text), and KV traffic between replicas.

Always on, in bounded memory. The ids of a prompt are chained hashes, one per 64 tokens, keyed with a secret of the
deployment. Without the key, a prompt can neither be read from them nor be confirmed by guessing.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from time import monotonic

from core.trace.traffic import (
    KEPT_S,
    TOKENS_PER_HASH,
    ReplicaReport,
    SeenRequest,
    ShownDecision,
    TrafficAnswer,
    TrafficReport,
)
from core.types.errors import ClusterError
from router.routing.candidates import ReplicaLoad
from router.serving.replicas import Replica

logger = logging.getLogger(__name__)

_REPORT_S = 5.0
_MAX_REQUESTS = 50_000
_MAX_IDS = 2_000_000  # total over all requests, eight bytes each
_ID_BYTES = 8
_LATELY_S = 5.0
_MAX_TRANSFERS = 8192


class TrafficRecord:
    """Record of recent requests. Lives on the router's event loop."""

    def __init__(self, key: bytes, *, router: str = "", now: Callable[[], float] = monotonic) -> None:
        self._key = key
        self._router = router
        self._now = now
        self._requests: OrderedDict[int, SeenRequest] = OrderedDict()  # by number, in order of arrival
        self._next_number = 0
        self._num_ids = 0
        self._unreported: dict[int, None] = {}  # requests that are in no report yet
        self._changed: dict[int, None] = {}  # reported requests that since got a first token or ended
        self._unanswered: dict[int, Callable[[], float]] = {}  # requests without a first token

    @property
    def num_requests(self) -> int:
        """Number of recorded requests."""
        return len(self._requests)

    def arrived(self, token_ids: Sequence[int], *, salt: str, num_choices: int, ttft_s: Callable[[], float]) -> range:
        """Record a request's prompt, once per choice. Return the entries' numbers, for `over`.

        ttft_s: returns the time to first token, 0 before there is one.
        """
        ids = prefix_ids(self._key, salt, token_ids)
        numbers = range(self._next_number, self._next_number + num_choices)
        self._next_number += num_choices
        now = self._now()
        for number in numbers:
            self._requests[number] = SeenRequest(arrival_s=now, num_tokens=len(token_ids), ids=ids)
            self._unreported[number] = None
            self._unanswered[number] = ttft_s
            self._num_ids += len(ids)
        self._forget(now)
        return numbers

    def over(self, numbers: range, num_outputs: Iterable[int], *, ttft_s: float, itl_s: float) -> None:
        """Record the end of a request. num_outputs: number of tokens of each choice. ttft_s: 0 without a token."""
        for number, num_output in zip(numbers, num_outputs, strict=True):
            self._unanswered.pop(number, None)
            if seen := self._requests.get(number):
                seen.num_output = num_output
                seen.ttft_s, seen.itl_s = ttft_s or None, itl_s or None
                self._note_change(number)

    def report(
        self, replicas: tuple[ReplicaReport, ...] = (), *, num_waiting: int = 0, is_full: bool = False
    ) -> TrafficReport:
        """Return the changes since the last call, or everything if is_full.

        replicas, num_waiting: current state of the router, passed through to the report.
        """
        now = self._now()
        self._forget(now)
        self._note_first_tokens()
        numbers = self._requests if is_full else self._unreported
        report = TrafficReport(
            router=self._router,
            arrived={number: _ago(self._requests[number], now) for number in numbers},
            changed={} if is_full else {number: _ago(self._requests[number], now) for number in self._changed},
            num_waiting=num_waiting,
            replicas=replicas,
        )
        self._unreported, self._changed = {}, {}
        return report

    def _note_first_tokens(self) -> None:
        for number, ttft_s in list(self._unanswered.items()):
            if first := ttft_s():
                self._requests[number].ttft_s = first
                del self._unanswered[number]
                self._note_change(number)

    def _note_change(self, number: int) -> None:
        if number not in self._unreported:
            self._changed[number] = None

    def _forget(self, now: float) -> None:
        """Drop old entries, and the oldest ones while the record is too large."""
        requests = self._requests
        while requests:
            number, first = next(iter(requests.items()))
            is_full = len(requests) > _MAX_REQUESTS or self._num_ids > _MAX_IDS
            if not is_full and now - first.arrival_s <= KEPT_S:
                return
            del requests[number]
            self._num_ids -= len(first.ids or ())
            self._unreported.pop(number, None)
            self._changed.pop(number, None)
            self._unanswered.pop(number, None)


def prefix_ids(key: bytes, salt: str, token_ids: Sequence[int]) -> Sequence[int]:
    """Return one id per 64 tokens, the last one possibly of fewer. Equal ids mean equal prefixes with the same salt.

    Every hash in the chain is keyed, because its predecessor is public.
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


class TrafficReporter:
    """Periodic reporter of the record to the controller, which replies with its autoscaler's decisions.

    Lives on its router's event loop. While the controller is away, the record keeps what fits.
    """

    def __init__(
        self,
        record: TrafficRecord,
        replicas: Iterable[Replica],
        *,
        num_waiting: Callable[[], int],
        answered: Callable[[Sequence[ShownDecision]], None],
    ) -> None:
        """num_waiting: returns the number of queued requests. answered: called with the autoscaler's last decisions,
        newest first."""
        self._record = record
        self._replicas = replicas
        self._num_waiting = num_waiting
        self._answered = answered

    async def report_forever(self, send: Callable[[TrafficReport], Awaitable[TrafficAnswer]]) -> None:
        """Send a report every _REPORT_S seconds.

        send: delivers a report; raises ClusterError. A restarted controller (its reply has another `life`) has lost its
        state, so the next report is complete.
        """
        life, is_synced = "", False
        while True:
            await asyncio.sleep(_REPORT_S)
            report = self._report(is_full=not is_synced)
            try:
                answer = await send(report)
            except ClusterError as error:
                if is_synced:
                    logger.warning("traffic report failed: %s", error)
                life, is_synced = "", False
            else:
                life, is_synced = answer.life, answer.life == life or not life
                self._answered(answer.scaling)

    def _report(self, *, is_full: bool) -> TrafficReport:
        loads = [replica.load() for replica in self._replicas if replica.is_usable]
        replicas = tuple(map(_report_of, loads))
        return self._record.report(replicas, num_waiting=self._num_waiting(), is_full=is_full)


def _report_of(load: ReplicaLoad) -> ReplicaReport:
    """Take each field from the load or, if it has none, from the member's record."""
    measured = {field.name for field in fields(ReplicaLoad)}
    names = [field.name for field in fields(ReplicaReport)]
    return ReplicaReport(**{name: getattr(load if name in measured else load.member, name) for name in names})


@dataclass(frozen=True, slots=True)
class Flow:
    """KV traffic of one kind from one replica to another."""

    kind: str  # "handoff", "pull" or "move"
    source: str
    target: str
    bytes_per_s: float


class Flows:
    """Log of recent KV transfers. Lives on the event loop."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[float, str, str, str, int]] = deque(maxlen=_MAX_TRANSFERS)

    def add(self, kind: str, source: str, target: str, num_bytes: int) -> None:
        self._transfers.append((monotonic(), kind, source, target, num_bytes))

    def lately(self) -> list[Flow]:
        """Return the flows of the last _LATELY_S seconds, largest first."""
        since = monotonic() - _LATELY_S
        while self._transfers and self._transfers[0][0] < since:
            self._transfers.popleft()
        sums: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for _, kind, source, target, num_bytes in self._transfers:
            sums[kind, source, target] += num_bytes
        flows = [Flow(*between, num_bytes / _LATELY_S) for between, num_bytes in sums.items()]
        return sorted(flows, key=lambda flow: -flow.bytes_per_s)

"""Membership: each replica holds a lease in Redis, and routers read the list of replicas.

    <name>:members            set of replica ids
    <name>:member:<replica>   signature and record (JSON); expires 3 s after its last renewal

Redis only tells a router where to connect. The router detects a dead replica by its own stream to it, so an outage of
Redis removes no replica. Write access to Redis is not enough to add one: routers accept only records that are signed by
a process of this deployment.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from core.identity.deployment_secrets import signed, verified
from core.index.redis_client import LeasedRecords
from core.model.kv_memory import AnnouncedPool
from core.types.json_records import known_fields
from core.types.request import Role
from core.types.wire_version import WIRE_VERSION

logger = logging.getLogger(__name__)

LEASE_S = 3.0
RENEW_S = 1.0

_MAX_RECORD_BYTES = 16 << 10
_MAX_REMEMBERED = 1024  # rejected names that were logged
# Routers of the oldest supported version send requests with grammars, token rules, thinking budgets or prompt logprobs
# only to members that announce these features.
_FEATURES = dict.fromkeys(
    ("keeps_grammars", "keeps_token_rules", "keeps_thinking_budgets", "tells_prompt_logprobs"), True
)


class RejectionReason(StrEnum):
    """Reason for ignoring a member record."""

    UNSIGNED = "unsigned"
    OTHER_VERSION = "other version"
    NONSENSE = "nonsense"


class OtherVersion(ValueError):
    """Member with an incompatible wire version."""


class _Unsigned(ValueError):
    pass


_REASONS: dict[type[ValueError], RejectionReason] = {
    OtherVersion: RejectionReason.OTHER_VERSION,
    _Unsigned: RejectionReason.UNSIGNED,
}


@dataclass(frozen=True, kw_only=True)
class Member(AnnouncedPool):
    """Record of a replica: everything that a router needs to use it."""

    replica: str
    role: Role
    address: str  # "host:port" of rank 0: its gRPC server
    frames_address: str  # "host:port" of rank 0: its token frames
    layout: str  # fingerprint of its KV layout
    max_tokens: int  # of one sequence, limited by context and pool
    max_running: int = 64  # sequences in one step
    max_batch_tokens: int = 2048  # in one step; longer prompts are computed in chunks
    # Fraction of a prefill replica's slots and blocks for local decodes.
    local_decode_share: float = 0.0
    answers_overflow: bool = False  # it also decodes while every decode replica is full
    metrics_address: str = ""  # "host:port" of its Prometheus metrics
    wire_version: int = WIRE_VERSION

    @property
    def max_local_decodes(self) -> int:
        """Maximum number of choices that a prefill replica decodes itself at a time; 0: none."""
        return int(self.local_decode_share * self.max_running)

    @property
    def max_local_decode_blocks(self) -> int:
        return int(self.local_decode_share * self.num_blocks)

    @property
    def max_decoded_tokens(self) -> int:
        """Maximum length of a sequence that this replica decodes, in tokens; 0: none."""
        if self.role is Role.DECODE:
            return self.max_tokens
        return min(self.max_tokens, self.max_local_decode_blocks * self.block_size)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | _FEATURES)

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Parse a record. Ignores unknown fields (of newer versions).

        Raises OtherVersion for another wire version, and ValueError with the reason for an invalid record.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        if (version := fields.get("wire_version")) != WIRE_VERSION:
            raise OtherVersion(
                f"its wire version is {version!r:.20}, this router's is {WIRE_VERSION}; update the older of the two"
            )
        known = known_fields(cls, fields)
        try:
            return cls(**{**known, "role": Role(known.get("role", ""))})
        except TypeError as error:
            raise ValueError(str(error)) from None


def signed_record(member: Member, key: bytes) -> bytes:
    """Return the signed record that routers accept. key: 32-byte signing key of the deployment."""
    return signed(member.to_json().encode(), key)


def living_members(redis: BlockingRedis, name: str) -> list[str]:
    """Return the replicas that hold a lease, without checking signatures. Raises redis.RedisError."""
    names = redis.smembers(_set_of(name))
    replicas = sorted(one.decode(errors="replace") if isinstance(one, bytes) else one for one in names)
    return [replica for replica in replicas if redis.exists(_record_of(name) + replica)]


class Membership:
    """Members of one deployment. Raises redis.RedisError if Redis is unreachable."""

    def __init__(
        self,
        redis: Redis,
        *,
        name: str,
        key: bytes,
        count_rejected: Callable[[RejectionReason], object] = lambda why: None,
    ) -> None:
        """key: 32-byte signing key of its records. count_rejected: called once per replica with an invalid record."""
        self._count_rejected = count_rejected
        self._key = key
        self._records = LeasedRecords(redis, names=_set_of(name), record=_record_of(name), lease_s=LEASE_S)
        self._rejected: OrderedDict[str, None] = OrderedDict()

    async def renew(self, member: Member) -> bool:
        """Join, or stay for another LEASE_S. Returns False if Redis had no lease: it may have lost all its data."""
        return await self._records.renew(member.replica, signed_record(member, self._key))

    async def leave(self, replica: str) -> None:
        """End the lease at once."""
        await self._records.end(replica)

    async def members(self) -> list[Member]:
        """Return the members with a valid lease and record. Removes expired names from the set."""
        records = await self._records.read()
        return [member for replica, record in records.items() if (member := self._read(replica, record))]

    def opened(self, records: Iterable[bytes]) -> list[Member]:
        """Return the members of the valid records. Ignores invalid ones; `members` logs those that are in Redis."""
        members = []
        for record in records:
            with suppress(ValueError):
                members.append(self._open(record))
        return members

    def _open(self, record: bytes) -> Member:
        """Parse a signed record. Raises ValueError."""
        if len(record) > _MAX_RECORD_BYTES or (text := verified(record, self._key)) is None:
            raise _Unsigned("it is not signed by this deployment")
        return Member.from_json(text)

    def _read(self, replica: str, record: bytes) -> Member | None:
        try:
            member = self._open(record)
            if member.replica != replica:
                raise _Unsigned(f"it belongs to {member.replica}")
        except ValueError as error:
            self._reject(replica, _REASONS.get(type(error), RejectionReason.NONSENSE), str(error))
            return None
        return member

    def _reject(self, replica: str, why: RejectionReason, reason: str) -> None:
        """Count and log a rejected record once, although it is read several times a second."""
        if replica in self._rejected:
            return
        self._count_rejected(why)
        self._rejected[replica] = None
        if len(self._rejected) > _MAX_REMEMBERED:
            self._rejected.popitem(last=False)
        logger.warning("member record of %.100r is ignored (%s): %s", replica, why, reason)


def _set_of(name: str) -> str:
    return f"{name}:members"


def _record_of(name: str) -> str:
    return f"{name}:member:"

"""Who serves: each replica holds a lease in Redis, and routers read who is there.

    <name>:members            set of replica ids
    <name>:member:<replica>   its seal, and the record as JSON; expires 3 s after its last renewal

Redis tells a router whom to connect to. Whether that replica lives, the router knows from its own stream to it; so when
Redis is away, nobody leaves and nobody flaps. Who can write to Redis makes no member: a record counts if a process of
this deployment has signed it.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from core.identity.signing import signed, verified
from core.types.json_records import known_fields
from core.types.request import Role, SequenceRequest
from core.types.wire_version import WIRE_VERSION

logger = logging.getLogger(__name__)

LEASE_S = 3.0
RENEW_S = 1.0

_UNSAID_VERSION = 3  # of members that do not say theirs
_MAX_RECORD_BYTES = 16 << 10
_MAX_REMEMBERED = 1024  # names with bad records, of which we have said so


class RejectionReason(StrEnum):
    """Why nobody connects to a member."""

    UNSIGNED = "unsigned"
    OTHER_VERSION = "other version"
    NONSENSE = "nonsense"


class OtherVersion(ValueError):
    """This member speaks another version of the wire: we do not understand each other."""


class _Unsigned(ValueError):
    pass


_REASONS: dict[type[ValueError], RejectionReason] = {
    OtherVersion: RejectionReason.OTHER_VERSION,
    _Unsigned: RejectionReason.UNSIGNED,
}


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a router must know to use a replica."""

    replica: str
    role: Role
    address: str  # "host:port" of rank 0: its gRPC server
    frames_address: str  # "host:port" of rank 0: its token frames
    layout: str  # fingerprint of its KV layout
    num_blocks: int
    block_size: int
    bytes_per_token: int  # of KV on the wire, all ranks
    max_tokens: int  # of one sequence: what its context and its pool allow
    max_running: int = 64  # sequences in one step
    max_batch_tokens: int = 2048  # in one step; longer prompts are computed in chunks
    keeps_grammars: bool = False  # its version knows the grammar of a request; older ones would pass it over
    keeps_token_rules: bool = False  # and the token rules of its sampling
    keeps_thinking_budgets: bool = False  # and for how long it may think
    tells_prompt_logprobs: bool = False  # and the log-probabilities of its prompt
    local_decode_share: float = (
        0.0  # of a prefill replica: of its places and blocks, for answers that it finishes itself
    )
    metrics_address: str = ""  # "host:port" of its Prometheus metrics; empty: an older version has none
    wire_version: int = WIRE_VERSION

    @property
    def max_local_decodes(self) -> int:
        """Choices that it answers itself at a time; 0: none."""
        return int(self.local_decode_share * self.max_running)

    @property
    def max_local_decode_blocks(self) -> int:
        return int(self.local_decode_share * self.num_blocks)

    def understands(self, request: SequenceRequest) -> bool:
        """Nothing of it that would change its tokens, or what is told of them, is passed over there."""
        needed = (
            (request.grammar is not None, self.keeps_grammars),
            (request.sampling.token_rules is not None, self.keeps_token_rules),
            (request.thinking is not None, self.keeps_thinking_budgets),
            (request.num_prompt_logprobs is not None, self.tells_prompt_logprobs),
        )
        return all(knows for is_asked, knows in needed if is_asked)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """What a newer version says beyond this is left out. Raises ValueError, and says what is missing, and
        OtherVersion where the rest could mean anything."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        if (version := fields.get("wire_version", _UNSAID_VERSION)) != WIRE_VERSION:
            raise OtherVersion(
                f"it speaks version {version!r:.20} on the wire, and this router {WIRE_VERSION}; update the older"
            )
        known = known_fields(cls, fields)
        try:
            return cls(**{**known, "role": Role(known.get("role", ""))})
        except TypeError as error:
            raise ValueError(str(error)) from None


def living_members(redis: BlockingRedis, name: str) -> list[str]:
    """The replicas that hold a lease under this deployment's name, whoever has signed it. Raises redis.RedisError."""
    replicas = sorted(_text(replica) for replica in redis.smembers(_set_of(name)))
    return [replica for replica in replicas if redis.exists(_record_of(name) + replica)]


class Membership:
    """The members of one deployment. Raises redis.RedisError when Redis is away."""

    def __init__(
        self,
        redis: Redis,
        *,
        name: str,
        key: bytes,
        count_rejected: Callable[[RejectionReason], object] = lambda why: None,
    ) -> None:
        """key: 32 bytes that the processes of this deployment have, and nobody else. count_refused: called once for
        each name under which there is a record that we pass over."""
        self._count_rejected = count_rejected
        self._redis = redis
        self._key = key
        self._set = _set_of(name)
        self._record = _record_of(name)
        self._rejected: OrderedDict[str, None] = OrderedDict()

    async def renew(self, member: Member) -> bool:
        """Enter or stay for another LEASE_S. False: Redis did not know us any more, nor, perhaps, anything else."""
        text = member.to_json().encode()
        record = signed(text, self._key)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.set(self._record + member.replica, record, px=int(LEASE_S * 1000), get=True)
            pipeline.sadd(self._set, member.replica)
            before, _ = await pipeline.execute()
        return before is not None

    async def leave(self, replica: str) -> None:
        """Be gone at once."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._record + replica)
            pipeline.srem(self._set, replica)
            await pipeline.execute()

    async def members(self) -> list[Member]:
        """Everyone whose lease lives. Forgets those whose lease has ended, and leaves out whom we do not believe."""
        replicas = sorted(_text(replica) for replica in await self._redis.smembers(self._set))
        if not replicas:
            return []
        records = await self._redis.mget([self._record + replica for replica in replicas])
        if expired := [replica for replica, record in zip(replicas, records, strict=True) if record is None]:
            await self._redis.srem(self._set, *expired)
        there = [(replica, record) for replica, record in zip(replicas, records, strict=True) if record is not None]
        return [member for replica, record in there if (member := self._read(replica, record))]

    def _read(self, replica: str, record: str | bytes) -> Member | None:
        record = record.encode() if isinstance(record, str) else record
        try:
            if len(record) > _MAX_RECORD_BYTES or (text := verified(record, self._key)) is None:
                raise _Unsigned("it is not signed by this deployment")
            member = Member.from_json(text)
            if member.replica != replica:
                raise _Unsigned(f"it is that of {member.replica}")
        except ValueError as error:
            self._reject(replica, _REASONS.get(type(error), RejectionReason.NONSENSE), str(error))
            return None
        return member

    def _reject(self, replica: str, why: RejectionReason, reason: str) -> None:
        """Say it once, although the record is read several times a second."""
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


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

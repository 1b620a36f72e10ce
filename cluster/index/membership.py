"""Who serves: each replica holds a lease in Redis, and routers read who is there.

    <name>:members            set of replica ids
    <name>:member:<replica>   the record, as JSON; expires 3 s after its last renewal

Redis tells a router whom to connect to. Whether that replica lives, the router knows from its own stream to it; so when
Redis is away, nobody leaves and nobody flaps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from redis.asyncio import Redis

from cluster.words.request import Role

LEASE_S = 3.0
RENEW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a router must know to use a replica."""

    replica: str
    role: Role
    address: str  # "host:port" of rank 0
    layout: str  # fingerprint of its KV layout
    num_blocks: int
    block_size: int
    bytes_per_token: int  # of KV on the wire, all ranks
    max_tokens: int  # of one sequence: what its context and its pool allow
    max_running: int = 64  # sequences in one step
    max_batch_tokens: int = 2048  # in one step; longer prompts are computed in chunks

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        fields = json.loads(text)
        return cls(**{**fields, "role": Role(fields["role"])})


class Membership:
    """The members of one deployment. Raises redis.RedisError when Redis is away."""

    def __init__(self, redis: Redis, *, name: str) -> None:
        self._redis = redis
        self._set = f"{name}:members"
        self._record = f"{name}:member:"

    async def renew(self, member: Member) -> bool:
        """Enter or stay for another LEASE_S. False: Redis did not know us any more, nor, perhaps, anything else."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.set(self._record + member.replica, member.to_json(), px=int(LEASE_S * 1000), get=True)
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
        """Everyone whose lease lives. Forgets those whose lease has ended."""
        replicas = sorted(_text(replica) for replica in await self._redis.smembers(self._set))
        if not replicas:
            return []
        records = await self._redis.mget([self._record + replica for replica in replicas])
        if expired := [replica for replica, record in zip(replicas, records, strict=True) if record is None]:
            await self._redis.srem(self._set, *expired)
        return [Member.from_json(record) for record in records if record is not None]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

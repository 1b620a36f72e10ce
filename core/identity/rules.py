"""Allowed callers of each RPC between the processes of a deployment. An RPC without a rule is rejected.

A key of the rendezvous store names the processes that may write it:

gang/...                             among the ranks of one replica
SENDER>RECEIVER#EPOCH/UNIQUE/...     of one link: the sending rank's name, the receiving rank's number
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from core.identity.process_name import ProcessName

GANG = "gang"


class CallerKind(StrEnum):
    """Relation of a caller to the process that it calls."""

    ROUTER = "a router"
    SAME_REPLICA = "a rank of the same replica"
    OTHER_REPLICA = "a rank of another replica"


@dataclass(frozen=True)
class RpcRule:
    """Rule of one RPC. `is_true(message, caller, callee)` checks the first message against the caller's certificate."""

    callers: frozenset[CallerKind]
    is_true: Callable[[Any, ProcessName, ProcessName], bool] = lambda message, caller, callee: True

    def rejection(self, caller: ProcessName | None, callee: ProcessName) -> str | None:
        """Return why `caller` may not call this RPC with any message; None: it may. caller: None if unidentified."""
        if (found := relation(caller, callee)) in self.callers:
            return None
        allowed = " or ".join(sorted(self.callers))
        return f"only {allowed} may call this; {_describe(caller, found)}"

    def verdict(self, message: Any | None, caller: ProcessName | None, callee: ProcessName) -> str | None:
        """Return why this call, with this first message, is rejected; None: it is allowed."""
        if rejection := self.rejection(caller, callee):
            return rejection
        assert caller, "unidentified callers are rejected above"
        if message is None:
            return "the call ended before its first message, which names its owner"
        if not self.is_true(message, caller, callee):
            return f"{caller} may not make this call for another process"
        return None


def relation(caller: ProcessName | None, callee: ProcessName) -> CallerKind | None:
    """Return the relation; None for unidentified callers and for those of another deployment."""
    if caller is None or caller.deployment != callee.deployment:
        return None
    if caller.is_router:
        return CallerKind.ROUTER
    if not caller.is_rank:
        return None
    return CallerKind.SAME_REPLICA if caller.replica == callee.replica else CallerKind.OTHER_REPLICA


def _describe(caller: ProcessName | None, found: CallerKind | None) -> str:
    if caller is None:
        return "the caller's certificate names no process"
    return f"{caller} is {found}" if found else f"{caller.uri} is not of this deployment"


def _as_router(message: Any, caller: ProcessName, callee: ProcessName) -> bool:
    """Check that the stream, request or choice belongs to the calling router."""
    return bool(message.router == caller.router)


def _as_sender(message: Any, caller: ProcessName, callee: ProcessName) -> bool:
    """Check that the sender and its rank number are the caller's."""
    return bool(message.hello.sender == str(caller) and str(message.hello.sender_rank) == caller.member)


def _as_leader(message: Any, caller: ProcessName, callee: ProcessName) -> bool:
    return caller.rank == 0


def _as_asking_leader(message: Any, caller: ProcessName, callee: ProcessName) -> bool:
    """Check that the caller is rank 0 of the replica that receives the prefix."""
    return caller.rank == 0 and bool(message.handoff.replica == caller.replica)


def _as_rank(message: Any, caller: ProcessName, callee: ProcessName) -> bool:
    return bool(message.rank == caller.rank)


def _as_party(message: Any, caller: ProcessName, callee: ProcessName) -> bool:
    """Check that the key belongs to the gang of caller and callee, or to a link that the caller opened."""
    if caller.replica == callee.replica:
        return is_of_gang(message.key)
    return is_of_link(message.key, sender=caller, receiver=callee.rank)


_ROUTER = frozenset({CallerKind.ROUTER})
_SAME = frozenset({CallerKind.SAME_REPLICA})
_OTHER = frozenset({CallerKind.OTHER_REPLICA})

FRAMES_RULE = RpcRule(_ROUTER, _as_router)  # of the token stream, which is not a gRPC call
RULES: Mapping[str, RpcRule] = {
    "/cluster.worker.v1.PrefillWorker/Prefill": RpcRule(_ROUTER),
    "/cluster.worker.v1.DecodeWorker/Generate": RpcRule(_ROUTER, _as_router),
    "/cluster.worker.v1.DecodeWorker/Stop": RpcRule(_ROUTER, _as_router),
    "/cluster.worker.v1.DecodeWorker/Migrate": RpcRule(_ROUTER, _as_router),
    "/cluster.worker.v1.PrefixFetch/Fetch": RpcRule(_OTHER, _as_asking_leader),
    "/cluster.transfer.v1.Rank/Connect": RpcRule(_OTHER, _as_sender),
    "/cluster.transfer.v1.Rank/Open": RpcRule(_SAME, _as_leader),
    "/cluster.transfer.v1.Rank/Close": RpcRule(_SAME, _as_leader),
    "/cluster.transfer.v1.Rank/Report": RpcRule(_SAME, _as_rank),
    "/cluster.transfer.v1.Rank/Tell": RpcRule(_SAME | _OTHER, _as_party),
    "/cluster.transfer.v1.Rank/Ask": RpcRule(_SAME | _OTHER, _as_party),
}


def key_of_link(sender: str, *, receiver: int, epoch: int, unique: str) -> str:
    """Return the prefix of all keys of one link; links that differ in any argument share no key.

    sender: str() of its ProcessName. unique: never used before for a link to this receiver.
    """
    return f"{_of_pair(sender, receiver)}{epoch}/{unique}"


def is_of_gang(key: str) -> bool:
    return key.startswith(f"{GANG}/")


def is_of_link(key: str, *, sender: ProcessName, receiver: int) -> bool:
    """Return whether the key belongs to a link from `sender` to this rank."""
    return key.startswith(_of_pair(str(sender), receiver))


def _of_pair(sender: str, receiver: int) -> str:
    return f"{sender}>{receiver}#"

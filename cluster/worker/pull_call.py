"""The call of a replica that lacks a prefix to one that is said to hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc import aio

from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.wire.call_errors import error_of
from cluster.wire.channel import open_channel
from cluster.wire.messages import handoff_to_proto
from cluster.words.errors import ClusterError
from cluster.words.papers import Identity
from cluster.worker.other_ranks import OtherRanks
from kvtransfer.protocol.pulls import Pull


async def ask_holder(pull: Pull[Any], others: OtherRanks, missed: Callable[[str], None], *, identity: Identity) -> None:
    """Open a pull on our other ranks, and keep the call to its holder as long as that ships. Runs on the event loop.

    `missed` is called with the reason, if nothing comes of it. Cancelling this ends the call.
    """
    holder, first_token = pull.holder, pull.opening.first_token
    request = pb.PullRequest(handoff=handoff_to_proto(pull.handoff), hashes=b"".join(pull.hashes))
    try:
        await others.open(pull.opening)
        peer = identity.rank(holder.replica, 0)
        async with open_channel(holder.address, peer=peer, identity=identity) as channel:
            async for event in rpc.PrefixHolderStub(channel).Pull(request, timeout=pull.timeout_s):
                if event.WhichOneof("event") == "granted" and event.granted.num_tokens <= first_token:
                    missed(f"{holder.replica} does not hold it any more")
    except aio.AioRpcError as error:
        missed(str(error_of(error, peer=holder.replica)))
    except ClusterError as error:  # one of our own ranks did not open it
        missed(str(error))

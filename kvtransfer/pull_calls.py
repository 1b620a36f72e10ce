"""The calls of a replica that lacks prefixes to those that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpc import aio

from cluster.channel import error_of, open_channel
from cluster.errors import ReplicaLost
from cluster.rpc import worker_pb2_grpc as rpc
from kvtransfer.pulls import Call, Pull

if TYPE_CHECKING:
    from cluster.rank_host import RankHost
    from kvtransfer.peers import Peers


class PullCalls:
    """The calls to holders. Lives on the event loop, but for `begin`."""

    def __init__(self, host: RankHost, peers: Peers) -> None:
        self._host = host
        self._peers = peers
        self._channels: dict[str, aio.Channel] = {}

    def begin(self, pull: Pull[Any], missed: Callable[[str], None]) -> Call:
        """From the step thread: ask the holder. `missed` is called on the event loop, with the reason."""
        return self._host.spawn(self._ask(pull, missed))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _ask(self, pull: Pull[Any], missed: Callable[[str], None]) -> None:
        try:
            await self._peers.open(pull.opening)
            stub = rpc.PrefixHolderStub(self._channel_to(pull.holder.address))
            async for event in stub.Pull(pull.request, timeout=pull.timeout_s):
                if event.WhichOneof("event") == "granted" and event.granted.num_tokens <= pull.opening.first_token:
                    missed(f"{pull.holder.replica} does not hold it any more")
        except aio.AioRpcError as error:
            await self._forget(pull.holder.address)
            missed(str(error_of(error, peer=pull.holder.replica)))
        except ReplicaLost as error:  # one of our own ranks did not open it
            missed(str(error))

    def _channel_to(self, address: str) -> aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def _forget(self, address: str) -> None:
        """Who has not answered once may never come back; what else it was asked fails too, as it would anyway."""
        if channel := self._channels.pop(address, None):
            await channel.close()

"""A deployment as the benchmarks ask it: through its gRPC door, with token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType

from grpc import aio

from cluster.channel import CLIENT_OPTIONS
from cluster.errors import DeployError
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc

_ANSWER_S = 300.0


class GrpcDoor:
    """Use it as an `async with` block."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def __aenter__(self) -> GrpcDoor:
        self._channel = aio.insecure_channel(self._endpoint, options=CLIENT_OPTIONS)
        self._stub = rpc.InferenceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def ask(self, token_ids: list[int], max_tokens: int) -> AsyncIterator[int]:
        """Greedy, as many tokens as were asked for. Yields how many each event brings. Raises DeployError."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=token_ids),
            sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        call = self._stub.Generate(request, timeout=_ANSWER_S)
        try:
            async for event in call:
                if event.HasField("delta"):
                    yield len(event.delta.token_ids)
        except aio.AioRpcError as error:
            raise DeployError(f"{self._endpoint}: {error.code().name}: {error.details()}") from None
        finally:
            call.cancel()

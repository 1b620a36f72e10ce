"""Limits of gRPC messages, rejected with the field's name before conversion."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from tests.support.fake_token_service import FakeTokenService
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_USER = pb.ChatMessage(role="user", content="a")
_CONTEXT = 256


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(completions: MakeCompletions) -> AsyncIterator[InferenceStub]:
    service = completions(FakeTokenService(), max_context=_CONTEXT)
    endpoint = await open_grpc_api(service, access=Access.anybody(), host="127.0.0.1", port=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
        yield InferenceStub(channel)
    await endpoint.close(grace_s=0)
    service.close()


async def rejected(stub: InferenceStub, message: Message) -> tuple[str, str]:
    """Return the named field and the message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        match message:
            case pb.GenerateRequest():
                async for _ in stub.Generate(message):
                    pass
            case pb.TokenizeRequest():
                await stub.Tokenize(message)
            case pb.DetokenizeRequest():
                await stub.Detokenize(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status, violations = rpc_status.from_call(caught.value), error_details_pb2.BadRequest()
    assert status is not None and any(packed.Unpack(violations) for packed in status.details)
    return violations.field_violations[0].field, caught.value.details() or ""


def assistant(num_calls: int) -> pb.ChatMessage:
    return pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * num_calls)


def with_choices(texts: list[str]) -> pb.GenerateRequest:
    message = pb.GenerateRequest(prompt="a")
    message.grammar.choice.texts.extend(texts)
    return message


MANY = {
    "calls": (pb.Chat(messages=[_USER, assistant(513)]), "messages[1].tool_calls", "at most 512"),
    "calls in all": (pb.Chat(messages=[_USER, *[assistant(512)] * 9]), "messages", "at most 4096 calls"),
    "messages": (pb.Chat(messages=[_USER] * 4097), "messages", "at most 4096"),
    "tools": (pb.Chat(messages=[_USER], tools=[pb.Tool(name="f")] * 513), "tools", "at most 512"),
    "schemas": (
        pb.Chat(messages=[_USER], tools=[pb.Tool(name=f"f{i}", parameters=" " * 2**17) for i in range(9)]),
        "tools",
        "at most 1048576 characters",
    ),
    "a schema": (
        pb.Chat(messages=[_USER], tools=[pb.Tool(name="f", parameters='"' + '\\"' * 2**17)]),
        "tools[0].parameters",
        "at most 262144 characters",
    ),
}


@pytest.mark.parametrize(("chat", "field", "says"), MANY.values(), ids=MANY)
async def test_chat_limits(stub: InferenceStub, chat: pb.Chat, field: str, says: str) -> None:
    for message in (pb.GenerateRequest(chat=chat), pb.TokenizeRequest(chat=chat)):
        named, said = await rejected(stub, message)
        assert named == f"chat.{field}" and says in said


@pytest.mark.parametrize("texts", [[""] * 100_000, ["x" * 8192], ["x" * 90] * 91], ids=["empty", "one", "some"])
async def test_choice_limits(stub: InferenceStub, texts: list[str]) -> None:
    named, said = await rejected(stub, with_choices(texts))
    assert named == "grammar.choice" and "at most 8192 bytes" in said


async def test_token_ids_are_limited_to_the_context(stub: InferenceStub) -> None:
    ids = [5] * (_CONTEXT + 1)
    named, said = await rejected(stub, pb.DetokenizeRequest(token_ids=ids))
    assert named == "token_ids" and "holds 256" in said
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids[:_CONTEXT]))).text
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    assert (await rejected(stub, message))[0] in ("token_ids", "prompt")

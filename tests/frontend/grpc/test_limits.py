"""Limits of gRPC messages, rejected with the field's name before conversion."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from tests.support.serving import Served, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

_USER = pb.ChatMessage(role="user", content="a")
_CONTEXT = 256


async def rejected(stub: InferenceStub, message: Message) -> tuple[str, str]:
    """Return the named field and the message."""
    method = {pb.TokenizeRequest: stub.Tokenize, pb.DetokenizeRequest: stub.Detokenize}.get(
        type(message), stub.Generate
    )
    refused = await refusal(method(message))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    return refused.fields[0], refused.text


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
async def test_chat_limits(endpoint: Served, chat: pb.Chat, field: str, says: str) -> None:
    for message in (pb.GenerateRequest(chat=chat), pb.TokenizeRequest(chat=chat)):
        named, said = await rejected(endpoint.stub, message)
        assert named == f"chat.{field}" and says in said


@pytest.mark.parametrize("texts", [[""] * 100_000, ["x" * 8192], ["x" * 90] * 91], ids=["empty", "one", "some"])
async def test_choice_limits(endpoint: Served, texts: list[str]) -> None:
    named, said = await rejected(endpoint.stub, with_choices(texts))
    assert named == "grammar.choice" and "at most 8192 bytes" in said


async def test_token_ids_are_limited_to_the_context(endpoint: Served) -> None:
    ids = [5] * (_CONTEXT + 1)
    named, said = await rejected(endpoint.stub, pb.DetokenizeRequest(token_ids=ids))
    assert named == "token_ids" and "holds 256" in said
    assert (await endpoint.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids[:_CONTEXT]))).text
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    assert (await rejected(endpoint.stub, message))[0] in ("token_ids", "prompt")

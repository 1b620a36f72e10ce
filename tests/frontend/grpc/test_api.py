"""gRPC API seen by a plain grpcio client, over a real port."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.types.errors import CapacityError, DeployError, LayoutMismatch, ReplicaLost
from core.types.request import TokenRules
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Served, serving
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


# ---- answers


async def test_chat(endpoint: Served, byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Paris. 你好 🎉<|im_end|>")
    endpoint.fake.script = lambda *_: ids
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    responses = await endpoint.generate(pb.GenerateRequest(model="tiny", chat=chat, request_id="mine"))
    assert text_of(responses) == "Paris. 你好 🎉"
    assert [token for response in responses for token in response.delta.token_ids] == ids
    *deltas, finished, summary = responses
    assert {response.WhichOneof("event") for response in deltas} == {"delta"}
    assert finished.finished == pb.Finished(choice=0, finish_reason="stop")
    assert summary.summary.request_id == "mine"
    usage = summary.summary.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(endpoint.fake.started[0].token_ids), len(ids))
    assert usage.cached_tokens == 3
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (2, 7)
    trace = summary.summary.trace
    assert (trace.prefill_replica, trace.decode_replica) == ("prefill-0", "decode-0")
    assert (trace.blocks_shipped, trace.wire_bytes, trace.attempts) == (2, 1000, 1)
    assert 0 < trace.ttft_ms < 5000 and 0 < trace.itl_ms < 5000


@pytest.mark.parametrize("as_ids", [False, True])
async def test_text_and_token_ids(endpoint: Served, byte_level: Tokenizer, as_ids: bool) -> None:
    sampling = pb.SamplingParams(max_tokens=4)
    message = pb.GenerateRequest(prompt="ab", sampling=sampling)
    if as_ids:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=byte_level.encode("ab")), sampling=sampling)
    assert text_of(await endpoint.generate(message)) == "abab"


async def test_best_of_is_sent_when_all_choices_have_ended(endpoint: Served, byte_level: Tokenizer) -> None:
    """All choices that ran count as usage, as over HTTP."""
    said = ["aa<|im_end|>", "bbb<|im_end|>", "c<|im_end|>", "ddddddddd<|im_end|>"]
    endpoint.fake.script = lambda request, choice: byte_level.encode(said[choice])
    endpoint.fake.logprobs = (-0.9, -0.25, -0.5, -0.125)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    for logprobs in (None, 0):
        for message in (pb.GenerateRequest(prompt="x"), pb.GenerateRequest(chat=chat)):
            message.sampling.MergeFrom(pb.SamplingParams(max_tokens=20, n=2, best_of=4, logprobs=logprobs))
            responses = await endpoint.generate(message)
            texts = {0: "", 1: ""}
            for response in responses[:-1]:
                texts[response.delta.choice] += response.delta.text
                assert logprobs is None or not response.HasField("delta") or response.delta.logprobs
            assert texts == {0: "ddddddddd", 1: "bbb"}
            ends = [response.finished for response in responses if response.HasField("finished")]
            assert [(end.choice, end.finish_reason) for end in ends] == [(0, "stop"), (1, "stop")]
            assert logprobs == 0 or not any(response.delta.logprobs for response in responses)
            usage = responses[-1].summary.usage
            assert usage.completion_tokens == sum(len(byte_level.encode(text)) for text in said)
    assert {sent.choices for sent in endpoint.fake.started} == {(0, 1, 2, 3)}
    same = await endpoint.generate(pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=20, best_of=1)))
    assert text_of(same) == "aa"


async def test_every_sampling_field_reaches_the_workers(endpoint: Served, byte_level: Tokenizer) -> None:
    sampling = pb.SamplingParams(
        max_tokens=4, min_tokens=2, temperature=0.5, top_k=5, top_p=0.5, min_p=0.25, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=7, stop=["zz"], stop_token_ids=[300], ignore_eos=True,
        n=2, best_of=3, logprobs=1, skip_special_tokens=False, include_stop=True, truncate_prompt_tokens=-1,
        add_special_tokens=False, logit_bias={11: -100.0, 2: 0.5}, allowed_token_ids=[300, 5], bad_words=["Paris"],
        prompt_logprobs=3,
    )  # fmt: skip
    elsewhere = {"skip_special_tokens", "thinking_token_budget"}  # thinking_token_budget requires a model that thinks
    assert {field.name for field, _ in sampling.ListFields()} | elsewhere == {
        field.name for field in pb.SamplingParams.DESCRIPTOR.fields
    }
    message = pb.GenerateRequest(prompt="ab", sampling=sampling, tenant="acme", cache_salt="s", priority=-3)
    await endpoint.generate(message, timeout=30)
    (sent,) = endpoint.fake.started
    assert (sent.choices, sent.priority, sent.tenant, sent.user) == ((0, 1, 2), -3, "", "acme")
    assert sent.salt and "s" != sent.salt
    assert sent.deadline_s is not None and 25 < sent.deadline_s < 31  # gRPC rounds it up on the wire
    for name in ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                 "presence_penalty", "frequency_penalty", "seed"):  # fmt: skip
        assert getattr(sent.sampling, name) == getattr(sampling, name), name
    assert (sent.sampling.stop_token_ids, sent.sampling.num_logprobs, sent.num_prompt_logprobs) == ((300,), 1, 3)
    bad_words = tuple(tuple(byte_level.encode(text)) for text in ("Paris", " Paris"))
    assert sent.sampling.token_rules == TokenRules(
        logit_bias=((2, 0.5), (11, -100.0)), allowed_token_ids=(300, 5), bad_words=bad_words
    )


async def test_prompt_logprobs_precede_the_answer(endpoint: Served, byte_level: Tokenizer) -> None:
    ids = byte_level.encode("capital")
    sampling = pb.SamplingParams(max_tokens=2, n=2, prompt_logprobs=2)
    first, *others = await endpoint.generate(pb.GenerateRequest(prompt="capital", sampling=sampling))
    assert len(ids) > 1 and {other.WhichOneof("event") for other in others} == {"delta", "finished", "summary"}
    assert [token.token_id for token in first.prompt_logprobs.tokens] == ids[1:]
    for place, token in enumerate(first.prompt_logprobs.tokens, 1):
        assert (token.logprob, token.rank, token.token) == (-place, 2, byte_level.token_text(token.token_id))
        assert [(top.token_id, top.logprob) for top in token.top] == [
            (token.token_id + 1, 0.5 - place),
            (token.token_id, -place),
        ]


async def test_defaults_match_the_proto_comments(endpoint: Served, byte_level: Tokenizer) -> None:
    await endpoint.generate(pb.GenerateRequest(prompt="ab"))
    (sent,) = endpoint.fake.started
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.num_logprobs) == (254, 0, None)
    assert sampling.token_rules is None
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert set(sampling.stop_token_ids) == byte_level.eos_token_ids
    assert (sent.choices, sent.salt, sent.priority) == ((0,), "", 0)
    assert sent.deadline_s is not None and sent.deadline_s <= 60  # the router's own limit


async def test_client_deadline_is_capped_by_the_router(endpoint: Served) -> None:
    await endpoint.generate(pb.GenerateRequest(prompt="ab"), timeout=3600)
    (sent,) = endpoint.fake.started
    assert sent.deadline_s is not None and sent.deadline_s <= endpoint.service.max_request_s == 60


async def test_stop_strings_and_choices(endpoint: Served) -> None:
    sampling = pb.SamplingParams(n=2, stop=["cd"], max_tokens=20)
    responses = await endpoint.generate(pb.GenerateRequest(prompt="abcde", sampling=sampling))
    for choice in (0, 1):
        assert "".join(r.delta.text for r in responses if r.delta.choice == choice) == "ab"
    finished = [r.finished for r in responses if r.HasField("finished")]
    assert finished == [pb.Finished(choice=choice, finish_reason="stop", stop="cd") for choice in (0, 1)]


async def test_logprobs(endpoint: Served) -> None:
    sampling = pb.SamplingParams(max_tokens=2, logprobs=2)
    first, *_ = await endpoint.generate(pb.GenerateRequest(prompt="ab", sampling=sampling))
    (logprob,) = first.delta.logprobs
    assert (logprob.token, logprob.logprob, len(logprob.top)) == ("a", -0.5, 2)
    assert logprob.token_id == logprob.top[0].token_id and logprob.top[1].logprob == -1.5


async def test_models(endpoint: Served) -> None:
    models = (await endpoint.stub.ListModels(pb.ListModelsRequest())).models
    assert list(models) == [pb.Model(id="tiny", max_context=256, dtype="float32")]


async def test_blocking_client(endpoint: Served) -> None:
    def ask() -> str:
        with grpc.insecure_channel(f"127.0.0.1:{endpoint.api.port}") as channel:
            message = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=4))
            return "".join(response.delta.text for response in InferenceStub(channel).Generate(message, timeout=10))

    assert await asyncio.to_thread(ask) == "abca"


# ---- errors

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "one of prompt, chat and token_ids"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": "a", "sampling": pb.SamplingParams(temperature=-1)}, "sampling.temperature", "from 0"),
    ({"prompt": "a", "sampling": pb.SamplingParams(stop=[""])}, "sampling.stop", "characters"),
    ({"prompt": "a", "sampling": pb.SamplingParams(prompt_logprobs=21)}, "sampling.prompt_logprobs", "from 0 to 20"),
    *(
        ({"prompt": "a", "sampling": pb.SamplingParams(**wrong)}, "sampling.best_of", f"sampling.best_of: {says}")
        for wrong, says in (
            ({"n": 2, "best_of": 1}, "must be at least n"),
            ({"best_of": 129}, "must be from 1 to 128"),
            ({"best_of": 0}, "must be from 1 to 128"),
        )
    ),
    ({"token_ids": pb.TokenIds(ids=[10**6])}, "token_ids", "token_ids: token id 1000000 is out of range"),
    ({"token_ids": pb.TokenIds()}, "token_ids", "token_ids: must not be empty"),
    ({"token_ids": pb.TokenIds(ids=[1] * 256)}, "token_ids", "context holds 256"),
    ({"chat": pb.Chat()}, "chat.messages", "must not be empty"),
    ({"prompt": "a", "request_id": "a\nb"}, "request_id", "visible ASCII"),
    ({"prompt": "a", "tenant": "a" * 257}, "tenant", "tenant: has 257 characters"),
]


@pytest.mark.parametrize(("fields", "field", "says"), WRONG, ids=lambda value: str(value).replace("\n", " ")[:40])
async def test_wrong_request_names_the_field(endpoint: Served, fields: dict[str, Any], field: str, says: str) -> None:
    code, text, details = await endpoint.rejected(pb.GenerateRequest(**fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and says in text
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == (field, text)
    assert not endpoint.fake.started


async def test_unknown_model(endpoint: Served) -> None:
    code, text, details = await endpoint.rejected(pb.GenerateRequest(model="gpt-9", prompt="a"))
    assert code is grpc.StatusCode.NOT_FOUND and "'tiny' is" in text
    assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND" and details["ErrorInfo"].domain == "cluster.v1"


async def test_full_cluster(endpoint: Served) -> None:
    endpoint.fake.reject = CapacityError("every decode replica is full", retry_after_s=2.25)
    code, _, details = await endpoint.rejected(pb.GenerateRequest(prompt="a"))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2250


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ReplicaLost("decode-0 died"), grpc.StatusCode.UNAVAILABLE),
        (LayoutMismatch("block sizes differ"), grpc.StatusCode.FAILED_PRECONDITION),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL),
    ],
    ids=["lost", "mismatch", "bug"],
)
async def test_failure_in_the_stream(endpoint: Served, error: Exception, code: grpc.StatusCode) -> None:
    endpoint.fake.fail_after = (2, error)
    call = endpoint.stub.Generate(pb.GenerateRequest(prompt="abc"))
    texts = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in call:
            texts.append(response.delta.text)
    assert texts == ["a", "b"]
    assert caught.value.code() is code and "secret" not in (caught.value.details() or "")
    assert list((await endpoint.rejected(pb.GenerateRequest(prompt="abc"))).details) == ["ErrorInfo"]


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x12\x02\xff\xfe"], ids=["no protobuf", "no UTF-8"])
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_message_that_cannot_be_decoded_is_the_clients_fault(endpoint: Served, method: str, raw: bytes) -> None:
    call = endpoint.channel.unary_stream(f"/cluster.v1.Inference/{method}")
    with pytest.raises(grpc.aio.AioRpcError, match="not valid protobuf") as caught:
        async for _ in call(raw, timeout=30):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_too_large_message(endpoint: Served) -> None:
    code, text, _ = await endpoint.rejected(pb.GenerateRequest(prompt="x" * 50_000_000))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text


# ---- end of a call


@pytest.mark.parametrize("hang_after", [0, 2])
async def test_cancelled_call_ends_the_generation(endpoint: Served, hang_after: int) -> None:
    endpoint.fake.hang_after = hang_after
    call = endpoint.stub.Generate(pb.GenerateRequest(prompt="abc"))
    reading = asyncio.ensure_future(call.read())
    await asyncio.wait_for(endpoint.fake.is_hanging.wait(), 5)
    reading.cancel()
    call.cancel()
    await asyncio.wait_for(endpoint.fake.has_ended.wait(), 1)
    assert endpoint.fake.ended[0][1] is asyncio.CancelledError


async def test_vanished_client_ends_the_generation(endpoint: Served) -> None:
    endpoint.fake.hang_after = 2
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.api.port}") as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="abc"))
        await call.read()
        await asyncio.wait_for(endpoint.fake.is_hanging.wait(), 5)
    await asyncio.wait_for(endpoint.fake.has_ended.wait(), 1)


async def test_call_deadline_ends_the_generation(endpoint: Served) -> None:
    endpoint.fake.hang_after = 2
    code, _, _ = await endpoint.rejected(pb.GenerateRequest(prompt="abc"), timeout=0.2)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(endpoint.fake.has_ended.wait(), 1)


# ---- health, reflection, ports


async def test_health(completions: MakeCompletions) -> None:
    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    asked = [health_pb2.HealthCheckRequest(service=service) for service in ("", "readiness", "cluster.v1.Inference")]
    async with serving(completions()) as endpoint:
        stub = health_pb2_grpc.HealthStub(endpoint.channel)
        assert [(await stub.Check(one)).status for one in asked] == [serving_] * 3
        of_process, watch = stub.Watch(asked[0]), stub.Watch(asked[2])
        assert (await of_process.read()).status == (await watch.read()).status == serving_
        endpoint.api.set_health(is_ready=False)
        assert (await watch.read()).status == not_serving
        assert [(await stub.Check(one)).status for one in asked] == [serving_, not_serving, not_serving]
        endpoint.api.set_health(is_live=False, is_ready=False)
        assert (await of_process.read()).status == not_serving, "told of changes only"
        for one in (of_process, watch):
            one.cancel()


async def test_closing_reports_not_serving_and_waits_only_for_running_requests(completions: MakeCompletions) -> None:
    asked = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=4))
    async with serving(completions(FakeTokenService(hang_after=2))) as endpoint:
        stub = health_pb2_grpc.HealthStub(endpoint.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        await watch.read()
        call = endpoint.call(asked)
        await endpoint.fake.is_hanging.wait()
        closing = asyncio.create_task(endpoint.api.close(grace_s=100))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await endpoint.rejected(asked)).code is grpc.StatusCode.UNAVAILABLE
        assert len(endpoint.fake.started) == 1 and not closing.done()
        endpoint.fake.go_on.set()
        *responses, summary = [event async for event in call]
        assert text_of(responses) == "abca" and summary.HasField("summary")
        await asyncio.wait_for(closing, 50)


async def test_reflection(endpoint: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(endpoint.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = [response async for response in stub.ServerReflectionInfo(iter([asked]))]
    assert "cluster.v1.Inference" in {service.name for service in answer.list_services_response.service}


async def test_port_is_shared_only_by_routers_that_say_so(endpoint: Served) -> None:
    options: Any = {"access": Access.anybody(), "host": "127.0.0.1"}
    with pytest.raises(DeployError, match="in use"):
        await open_grpc_api(endpoint.service, port=endpoint.api.port, **options)
    first = await open_grpc_api(endpoint.service, port=0, is_port_shared=True, **options)
    second = await open_grpc_api(endpoint.service, port=first.port, is_port_shared=True, **options)
    assert second.port == first.port
    for one in (first, second):
        await one.close(grace_s=0)

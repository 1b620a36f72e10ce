"""SmolLM2: tokens equal those of one process, and real clients on both endpoints of a real router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import openai
import pytest
from openai import AsyncOpenAI

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.request import Role, Sampling
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.text.tokenizer import Tokenizer
from tests.e2e.conftest import Lab, smollm2_tree
from tests.support.plain_http import http_client
from tests.support.router_service import admin_url, http_url, router_service
from tests.support.scraping import scrape_workers
from tests.support.sdk_clients import openai_client

_QUESTION = "What is the capital of France?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dtype", "tp"),
    [
        ("float32", (1, 1)),
        *(pytest.param("float32", tp, marks=pytest.mark.slow) for tp in [(1, 3), (3, 1), (3, 3)]),
        pytest.param("bfloat16", (1, 1), marks=pytest.mark.slow),
    ],
)
async def test_tokens_equal_one_process(smollm2_dir: Path, lab: Lab, dtype: str, tp: tuple[int, int]) -> None:
    """Real weights, with 9 query heads and 3 KV heads. One request at a time, because in bfloat16 a batch may round."""
    tokenizer = Tokenizer(smollm2_dir)
    template = ChatTemplate(find_chat_template(smollm2_dir), special_tokens=tokenizer.special_tokens)
    tree, greedy = smollm2_tree(max_local_prefill=0), Sampling(max_tokens=12, temperature=0.0)
    tree["model"] |= {"dtype": dtype}
    tree |= {role.value: {"tensor_parallel": size} for role, size in zip(Role, tp, strict=True)}
    texts = [template.render([{"role": "user", "content": asked}]) for asked in (_QUESTION, "Name three colours.")]
    inputs = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = [lab.reference.ids(smollm2_dir, [prompt], greedy, dtype=dtype)[0] for prompt in inputs]
    async with lab.shared(smollm2_dir, **tree) as cluster:
        answers = [await cluster.generate(prompt, greedy) for prompt in inputs]
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)


@pytest.mark.timeout(180)
async def test_chat_streams_seeds_stops_and_errors_at_both_endpoints(smollm2_dir: Path, lab: Lab) -> None:
    async with lab.shared(smollm2_dir, **smollm2_tree()) as cluster, router_service(cluster) as service:
        async with asyncio.timeout(150):
            await _check_health(http_url(service))
            async with openai_client(base_url=f"{http_url(service)}/v1", api_key="none") as client:
                await _check_openai(client)
            await _check_lm_eval(http_url(service))
            await _check_grpc(service.grpc_port)
            await _check_admin(admin_url(service))


async def _check_health(url: str) -> None:
    async with http_client() as client:
        answer = await client.get(f"{url}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def _check_openai(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smollm2"]
    whole = await client.chat.completions.create(
        model="smollm2", messages=_MESSAGES, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2
    )
    choice = whole.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop" and whole.usage and whole.usage.prompt_tokens > 20
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content[0].top_logprobs) == 2

    stream = await client.chat.completions.create(
        model="smollm2", messages=_MESSAGES, temperature=0, max_tokens=16, stream=True
    )
    pieces = [part.choices[0].delta.content or "" async for part in stream if part.choices]
    assert "".join(pieces) == choice.message.content and len(pieces) > 4

    stopped = await client.chat.completions.create(
        model="smollm2", messages=_MESSAGES, temperature=0, max_tokens=16, stop=[" is"]
    )
    assert stopped.choices[0].message.content == (choice.message.content or "").split(" is")[0]

    seeded = [
        await client.completions.create(model="smollm2", prompt="Once", max_tokens=8, temperature=1.5, seed=seed, n=2)
        for seed in (5, 5, 6)
    ]
    texts = [[choice.text for choice in answer.choices] for answer in seeded]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]

    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.completions.create(model="smollm2", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="the request needs 9001"):
        await client.completions.create(model="smollm2", prompt="word " * 9000)


async def _check_lm_eval(url: str) -> None:
    """Prompt log-likelihoods, as requested by lm-eval's local-completions, do not depend on cached prompts.

    tests/engine/test_smollm2.py compares them with transformers.
    """
    body = {"model": "smollm2", "prompt": "The capital of France is Paris.", "temperature": 0, "max_tokens": 1,
            "logprobs": 1, "seed": 1234, "echo": True}  # fmt: skip
    async with http_client(timeout=60) as client:
        cold, warm = [
            (await client.post(f"{url}/v1/completions", json=body)).json()["choices"][0]["logprobs"] for _ in range(2)
        ]
    assert cold["tokens"][:-1] == ["The", " capital", " of", " France", " is", " Paris", "."]
    assert cold["token_logprobs"][0] is None and warm["token_logprobs"][1:] == pytest.approx(
        cold["token_logprobs"][1:], abs=1e-3
    )
    tops = zip(cold["top_logprobs"][1:], cold["token_logprobs"][1:], strict=True)
    assert [max(top.values()) == own for top, own in tops][:4] == [False, True, False, True]


async def _check_grpc(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rpc.InferenceStub(channel)
        request = pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=_QUESTION)]),
            sampling=pb.SamplingParams(temperature=0, max_tokens=16),
        )
        events = [event async for event in stub.Generate(request)]
        assert "Paris" in "".join(event.delta.text for event in events)
        trace = events[-1].summary.trace
        # Measured costs decide where the short uncached rest is computed.
        assert trace.prefill_replica in ("", "prefill-0") and trace.decode_replica == "decode-1"
        assert trace.attempts == 1 and trace.ttft_ms > 0
        request.sampling.temperature = -1
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            [event async for event in stub.Generate(request)]
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _check_admin(url: str) -> None:
    async with http_client() as client:
        assert (await client.get(f"{url}/health")).json()["replicas"] == {"prefill": 1, "decode": 1}
        assert "xpyd_time_to_first_token_seconds_count" in (await client.get(f"{url}/metrics")).text
    admin = url.removeprefix("http://")
    found = await asyncio.to_thread(lambda: list(scrape_workers(admin)))
    assert {sample.labels["replica"] for sample in found if sample.name == "xpyd_kv_blocks_free"} == {
        "prefill-0",
        "decode-1",
    }
    assert [sample for sample in found if sample.name == "xpyd_kv_transfer_bytes_total" and sample.value]

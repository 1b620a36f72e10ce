"""Two real deployments behind one router, operated by the CLI: SmolLM2, and a tiny model attached while it streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from core.process.ports import free_port
from core.types.request import Sampling
from tests.cluster.cli.command import ClusterCommand
from tests.e2e.conftest import Lab
from tests.engine.steps import prompts
from tests.support.waiting import until

_SMALL = ["prefill.kv_memory_gib=0.05", "decode.kv_memory_gib=0.05"]
_EXACT = ["model.dtype=float32", "kv.wire_dtype=raw", "router.max_local_prefill=0", "timeouts.queue_s=1"]


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterCommand]:
    command = ClusterCommand(tmp_path)
    yield command
    command.run("down", "--name", "beside")
    command.run("down", "--name", "main", "--force")


@contextmanager
def streaming(client: openai.OpenAI) -> Iterator[None]:
    """Stream answers of SmolLM2 repeatedly while the block runs. Asserts that none fails and all are equal."""
    is_over, failures, texts = threading.Event(), list[Exception](), list[str]()

    def ask() -> None:
        while not is_over.is_set():
            try:
                stream = client.completions.create(
                    model="smol", prompt="One, two, three,", temperature=0, max_tokens=32, stream=True
                )
                texts.append("".join(part.choices[0].text for part in stream if part.choices))
            except openai.OpenAIError as error:
                failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert not failures and len(texts) > 2 and len(set(texts)) == 1


def ids_of(client: openai.OpenAI, prompt: list[int]) -> list[int]:
    asked = {"return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=24, extra_body=asked)
    ids: list[int] = answer.choices[0].model_dump()["token_ids"]
    return ids


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_second_model_joins_fails_and_leaves_while_the_first_streams(cluster: ClusterCommand, lab: Lab) -> None:
    port, tiny = free_port(), lab.checkpoint("llama")
    endpoints = ["--grpc-port", str(free_port()), "--http-port", str(port)]
    first = ["--name", "main", *endpoints, *sets("model.served_name=smol", *_EXACT[:2], *_SMALL)]
    made = cluster.run("deploy", "1P1D", *first, within_s=300)
    assert made.code == 0, made.err
    beside = ["--name", "beside", "--model", str(tiny)]
    spec = sets("model.served_name=tiny", "router.endpoints=main", "prefill.answer_share=0", *_EXACT, *_SMALL)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:

        def rejected() -> openai.APIStatusError:
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(model="tiny", prompt=[1, 2, 3])
            return caught.value

        with streaming(client):
            made = cluster.run("deploy", "1P1D", *beside, *spec, within_s=300)
            assert made.code == 0, made.err
            assert "served at the endpoints of main as model tiny" in made.out
            assert [model.id for model in client.models.list()] == ["smol", "tiny"]
            asked = prompts(5, 47, 70)
            expected = lab.reference.ids(tiny, asked, Sampling(max_tokens=24, temperature=0.0))
            assert [ids_of(client, prompt) for prompt in asked] == expected
            report = json.loads(cluster.run("status", "--name", "beside", "--json").out)
            assert report["ready"] and report["endpoints"]["http"] == f"http://127.0.0.1:{port}"
            answer = cluster.run("generate", "hi", "--name", "main", "--max-tokens", "2", "--json")
            assert answer.code == 0, answer.err

            again = cluster.run("deploy", "1P1D", "--name", "third", "--model", str(tiny), *spec)
            assert (
                again.code == 2
                and "model.served_name: tiny is already served by beside at these endpoints" in again.err
            )
            keys = cluster.run("keys", "create", "acme", "--name", "beside")
            assert keys.code == 2 and "add --name main" in keys.err
            down = cluster.run("down", "--name", "main")
            assert down.code == 2 and "its endpoints also serve beside; `cluster down --name beside` first" in down.err

            assert cluster.run("scale", "decode=0", "--name", "beside").code == 0
            away = rejected()
            assert (away.status_code, away.code) == (503, "model_unavailable")
            assert cluster.run("scale", "decode=1", "--name", "beside").code == 0
            assert ids_of(client, asked[0]) == expected[0]

            down = cluster.run("down", "--name", "beside")
            assert down.code == 0, down.err
            until(lambda: [model.id for model in client.models.list()] == ["smol"])
            gone = rejected()
            assert (gone.status_code, gone.code) == (404, "model_not_found")
            assert gone.body["message"] == "model 'tiny' is not served here; 'smol' is"  # type: ignore[index]
        down = cluster.run("down", "--name", "main")
        assert down.code == 0, down.err

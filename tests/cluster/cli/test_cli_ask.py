"""`cluster generate` and `cluster chat` as processes, against a server that echoes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launch import state
from tests.cluster.cli.command import ClusterCommand, CommandInProcess
from tests.cluster.cli.fake_inference import FakeInference, serving
from tests.cluster.deployments import save_state


@pytest.fixture
def inference(state_root: object) -> Iterator[FakeInference]:
    """Fake router, registered as the only deployment."""
    with serving() as (servicer, endpoint):
        save_state("a", grpc=endpoint)
        yield servicer


def test_answer_is_printed_as_text(inference: FakeInference, cluster: CommandInProcess) -> None:
    outcome = cluster.run("generate", "Grüße an alle")
    assert (outcome.code, outcome.out, outcome.err) == (0, "Grüße an alle\n", "")
    [request] = inference.requests
    assert request.prompt == "Grüße an alle"
    assert request.sampling.max_tokens == 256
    assert not request.sampling.HasField("temperature") and not request.sampling.HasField("seed")


def test_options_reach_the_router(inference: FakeInference, cluster: CommandInProcess) -> None:
    options = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 3 --seed 9 --stop a --stop b --system S".split()
    assert cluster.run("generate", "hi", "--chat", *options).code == 0
    [request] = inference.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("system", "S"), ("user", "hi")]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0, 0.5, 3)
    assert (sampling.seed, list(sampling.stop)) == (9, ["a", "b"])
    assert sampling.HasField("temperature")


def test_json_output(inference: FakeInference, cluster: CommandInProcess) -> None:
    outcome = cluster.run("generate", "-", "--json", stdin="one two three")
    assert json.loads(outcome.out) == {
        "text": "one two three",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 4},
        "prefill_replica": "prefill-0",
        "decode_replica": "decode-1",
        "cached_tokens": 4,
        "blocks_shipped": 2,
        "wire_bytes": 1000,
        "ttft_ms": 12.5,
        "itl_ms": 3.5,
        "attempts": 1,
        "request_id": "r-1",
    }


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["refuse"], 2, "invalid_argument: temperature: must not be negative"),
        (["full"], 1, "resource_exhausted: every replica is full"),
        (["hi", "--endpoint", "127.0.0.1:9"], 1, "no router answers at 127.0.0.1:9; see `cluster status`"),
    ],
)
def test_rejection_is_one_line(
    inference: FakeInference, cluster: CommandInProcess, arguments: list[str], code: int, error: str
) -> None:
    outcome = cluster.run("generate", *arguments)
    assert (outcome.code, outcome.out, outcome.err) == (code, "", f"cluster: {error}\n")


def test_chat_sends_the_history(inference: FakeInference, state_root: Path) -> None:
    outcome = ClusterCommand(state_root).run(
        "chat", "--system", "S", stdin="first\n\nsecond one\n/new\nthird\n/quit\nnever\n"
    )
    assert (outcome.code, outcome.out, outcome.err) == (0, "first\nsecond one\nthird\n", "")
    histories = [[(m.role, m.content) for m in request.chat.messages] for request in inference.requests]
    system, first = ("system", "S"), ("user", "first")
    assert histories == [
        [system, first],
        [system, first, ("assistant", "first"), ("user", "second one")],
        [system, ("user", "third")],
    ]


def test_api_key_from_environment_or_operator_file(
    inference: FakeInference, cluster: CommandInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.run("generate", "hi").code == 0
    save_state("a", grpc=state.find("a").grpc, needs_keys=True)
    assert cluster.run("generate", "hi").code == 0  # this machine has no operator key
    state.operator_key_file("a").write_text("sk-own")
    assert cluster.run("generate", "hi").code == 0
    monkeypatch.setenv("XPYD_API_KEY", "sk-other")
    answer = cluster.run("generate", "hi")
    assert (answer.code, answer.out, answer.err) == (0, "hi\n", "")
    assert "sk-other" not in cluster.run("generate", "--help").out
    assert inference.authorizations == [None, None, "Bearer sk-own", "Bearer sk-other"]


def test_generate_does_not_import_ray(tmp_path: Path) -> None:
    code = (
        "import sys; import cluster.cli.inference_client; print([m for m in ('ray', 'pydantic') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["generate", "hi", "--max-tokens", str(2**31)], "--max-tokens"),
        (["generate", "hi", "--top-k", str(2**31)], "--top-k"),
        (["generate", "hi", "--seed", str(2**64)], "--seed"),
        (["generate", "\udcff\udcfe"], "the prompt is not UTF-8"),
        (["generate", "hi", "--stop", "\udcff"], "--stop is not UTF-8"),
        (["generate", "hi", "--system", "\udcff"], "--system is not UTF-8"),
        (["explain", "r", "--admin", "http://[::1"], "no router answers"),
        (["explain", "r", "--admin", "localhost:notaport"], "no router answers"),
        (["trace", "r", "--admin", "localhost:notaport"], "no router answers"),
        (["top", "--once", "--admin", "localhost:notaport"], "no router answers"),
    ],
)
def test_user_error_is_one_line(
    inference: FakeInference, cluster: CommandInProcess, arguments: list[str], error: str
) -> None:
    printed = cluster.run(*arguments)
    assert printed.code == 2 and printed.out == "" and error in printed.err and printed.err.count("\n") == 1
    assert not inference.requests


def test_prompt_is_utf8_whatever_the_locale() -> None:
    code = "import sys; from cluster.cli.generate import _utf8; print(ascii(_utf8('the prompt', sys.argv[1])))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = subprocess.run(
        [sys.executable, "-c", code, "Grüße".encode()],
        env={**os.environ, **locale},
        capture_output=True,
        check=True,
    )
    assert shown.stdout == b"'Gr\\xfc\\xdfe'\n"


def test_binary_prompt_on_stdin_is_one_line(inference: FakeInference, cluster: CommandInProcess) -> None:
    outcome = cluster.run("generate", "-", stdin=b"\xff\xfe")
    assert outcome.code == 2 and "not UTF-8" in outcome.err

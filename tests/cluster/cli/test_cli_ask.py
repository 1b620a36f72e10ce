"""`cluster generate` and `cluster chat` as processes, against a server that echoes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli.app import run
from cluster.launch import state
from cluster.launch.state import State
from tests.cluster.cli.command import ClusterCommand, CommandInProcess
from tests.cluster.cli.fake_inference import FakeInference, serving


@pytest.fixture
def inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeInference]:
    """Fake router, registered as the only deployment."""
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    with serving() as (servicer, endpoint):
        state.save(State(name="a", ray_address="", local_ray=None, grpc=endpoint, http="http://x", deploying=None))
        yield servicer


@pytest.fixture
def cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandInProcess:
    return CommandInProcess(capsys, monkeypatch)


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
    ("prompt", "code", "error"),
    [
        ("refuse", 2, "cluster: invalid_argument: temperature: must not be negative\n"),
        ("full", 1, "cluster: resource_exhausted: every replica is full\n"),
    ],
)
def test_rejection_is_one_line(
    inference: FakeInference, cluster: CommandInProcess, prompt: str, code: int, error: str
) -> None:
    outcome = cluster.run("generate", prompt)
    assert (outcome.code, outcome.out, outcome.err) == (code, "", error)


def test_unreachable_router_is_one_line(cluster: CommandInProcess) -> None:
    outcome = cluster.run("generate", "hi", "--endpoint", "127.0.0.1:9")
    assert (outcome.code, outcome.err) == (1, "cluster: no router answers at 127.0.0.1:9; see `cluster status`\n")


def test_chat_sends_the_history(inference: FakeInference, tmp_path: Path) -> None:
    outcome = ClusterCommand(tmp_path).run(
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
    state.save(replace(state.find("a"), needs_keys=True))
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
    inference: FakeInference, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and error in printed.err and printed.err.count("\n") == 1, printed.err
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


def test_binary_prompt_on_stdin_is_one_line(
    inference: FakeInference, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert run(["generate", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err

"""`cluster batch` over a router's door: a file of requests and its answers, coming back to it, and what is wrong."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cluster.cli.app import run
from frontend.text.tokenizer import Tokenizer
from tests.cluster.cli.command import ClusterCommand
from tests.frontend.access.keys import access_with, issue
from tests.router.batches.batch_doors import BatchRouter, batch_router, chat_line, jsonl
from tests.support.fake_token_service import FakeTokenService
from tests.support.tiny_service import MakeCompletions
from tests.support.tiny_tokenizers import make_byte_level


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeCompletions:
    directory = make_byte_level(tmp_path_factory.mktemp("byte_level"))
    return MakeCompletions(directory, Tokenizer(directory))


@pytest.fixture
async def router(
    made: MakeCompletions, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[BatchRouter]:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    async with batch_router(made, redis_url) as one:
        yield one


async def asked(router: BatchRouter, *arguments: str | Path) -> int:
    """The exit code of `cluster batch`, in a thread of this process."""
    return await asyncio.to_thread(run, ["batch", *map(str, arguments), "--endpoint", router.address])


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_file_becomes_answers_and_errors(
    router: BatchRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_bytes(jsonl([chat_line("a"), chat_line("b", temperature=1000), chat_line("c")]))
    assert await asked(router, file) == 1
    said = capsys.readouterr()
    answers, errors = tmp_path / "asked.out.jsonl", tmp_path / "asked.out.errors.jsonl"
    assert said.out == f"2 answers in {answers}\n1 error in {errors}\n"
    assert [one["custom_id"] for one in lines_in(answers)] == ["a", "c"]
    assert [one["custom_id"] for one in lines_in(errors)] == ["b"]
    assert "completed 3/3" in said.err
    file.write_bytes(jsonl([chat_line("a")]))
    assert await asked(router, file, "-o", tmp_path / "here") == 0
    assert capsys.readouterr().out == f"1 answer in {tmp_path / 'here'}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "asked.jsonl",
        "asked.out.errors.jsonl",
        "asked.out.jsonl",
        "here",
    ]


async def test_ctrl_c_leaves_it_running_and_resume_comes_back(
    router: BatchRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router.fake.hang_after = 1
    file = tmp_path / "asked.jsonl"
    file.write_bytes(jsonl([chat_line("a"), chat_line("b")]))
    cluster = ClusterCommand(tmp_path)
    with cluster.start("batch", str(file), "--endpoint", router.address) as process:
        await router.fake.is_hanging.wait()
        assert process.stderr
        line = await asyncio.to_thread(process.stderr.readline)  # it waits from now on
        while "in_progress" not in line:
            line = await asyncio.to_thread(process.stderr.readline)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.to_thread(process.communicate)
    [batch] = (await router.client.batches.list()).data
    assert process.returncode == 130 and err.count("\n") == 1
    assert f"`cluster batch --resume {batch.id}`" in err and f"`cluster batch --cancel {batch.id}`" in err
    assert batch.status == "in_progress"
    router.fake.hang_after = None
    router.fake.go_on.set()
    assert await asked(router, "--resume", batch.id, "-o", tmp_path / "out.jsonl") == 0
    assert [one["custom_id"] for one in lines_in(tmp_path / "out.jsonl")] == ["a", "b"]


async def test_cancel(router: BatchRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router.fake.hang_after = 1
    file = await router.client.files.create(file=("a", jsonl([chat_line("a")])), purpose="batch")
    batch = await router.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert await asked(router, "--cancel", batch.id) == 0
    assert f"{batch.id} is cancel" in capsys.readouterr().err
    assert await asked(router, "--resume", batch.id, "-o", tmp_path / "out") == 1
    assert "cancelled before anything was answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "has no line; write one for each request"),
        (b"hello\n", "its first line is no JSON object"),
        (b"[]\n", "its first line is no JSON object"),
        (jsonl([chat_line("a"), chat_line("a"), chat_line("b", model="x")]), "line 2: custom_id: 'a' is that of line"),
        (jsonl([{**chat_line("a"), "url": "/v1/embeddings"}]), "endpoint: must be one of /v1/chat/completions"),
    ],
)
async def test_what_is_wrong_with_a_file_is_one_line(
    router: BatchRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, error: str
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_bytes(content)
    assert await asked(router, file) == 2
    said = capsys.readouterr()
    [line] = [line for line in said.err.splitlines() if line.startswith("cluster:")]
    assert error in line and said.out == "" and not router.fake.started


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give one of them"),
        (["a.jsonl", "--resume", "batch_1"], "give one of them"),
        (["nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--resume", "batch_1"], "batch: there is no batch 'batch_1'"),
        (["--cancel", "batch_1"], "batch: there is no batch 'batch_1'"),
        (["--resume", "batch_1", "-o", "/"], "is a directory"),
        (["--resume", "batch_1", "-o", "/nowhere/x"], "there is no directory /nowhere"),
    ],
)
async def test_what_is_wrong_is_one_line(
    router: BatchRouter, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert await asked(router, *arguments) == 2
    said = capsys.readouterr()
    assert error in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_door_that_is_away_or_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    assert run(["batch", "--cancel", "batch_1", "--endpoint", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "cluster: no router answers at http://127.0.0.1:9; see `cluster status`\n"
    assert run(["batch", "--cancel", "batch_1", "--endpoint", "127.0.0.1:9"]) == 2
    assert "write http://HOST:PORT" in capsys.readouterr().err


async def test_a_key_is_shown_at_the_door(
    made: MakeCompletions, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    file, key = tmp_path / "asked.jsonl", issue("one")
    file.write_bytes(jsonl([chat_line("a")]))
    async with batch_router(made, redis_url, access=access_with(key), fake=FakeTokenService()) as router:
        assert await asked(router, file) == 2
        monkeypatch.setenv("XPYD_API_KEY", key.secret)
        assert await asked(router, file) == 0

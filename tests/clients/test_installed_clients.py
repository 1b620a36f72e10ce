"""Published client packages against a whole deployment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from core.model.weight_files import weight_files
from tests.engine.gguf_files import read_model
from tests.support.local_cluster import local_cluster
from tests.support.router_service import http_url, router_service

_HERE = Path(__file__).parent
_TEMPLATE = _HERE.parent / "frontend" / "chat" / "templates" / "hermes_tools.jinja"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment that has the clients, and none of this project's code."""
    environment = tmp_path_factory.mktemp("clients") / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    install = [environment / "bin" / "pip", "install", "--quiet", "--requirement", _HERE / "requirements.txt"]
    subprocess.run(install, check=True)
    return environment / "bin" / "python"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(smollm2_dir: Path, redis_url: str) -> AsyncIterator[str]:
    """Serve a deployment and yield its OpenAI base URL. float32, because log-likelihoods are compared."""
    tree = {
        "model": {"served_name": "smollm2", "chat_template": str(_TEMPLATE), "dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"kv_memory_gib": 0.1},
        "decode": {"kv_memory_gib": 0.1},
    }
    async with local_cluster(smollm2_dir, redis_url, **tree) as cluster, router_service(cluster) as service:
        yield f"{http_url(service)}/v1"


@pytest.mark.parametrize("client", ["langchain", "litellm", "instructor", "agents"])
async def test_client_works_as_documented(client: str, python: Path, url: str, tmp_path: Path) -> None:
    await _run(python, client, url, tmp_path)


@pytest.mark.parametrize("computed_by", ["server", "engine"])
async def test_lm_eval_scores_equal_those_of_transformers(
    python: Path, url: str, smollm2_dir: Path, tmp_path: Path, computed_by: str
) -> None:
    place = url if computed_by == "server" else str(smollm2_dir)
    found = json.loads((await _run(python, "lm_eval", place, tmp_path)).splitlines()[-1])
    assert found["texts"] == [" Paris", " Celsius"] and found["scores"] == [1.0, 1.0]
    settings = json.loads((smollm2_dir / "config.json").read_text())
    config = LlamaConfig(**{name: value for name, value in settings.items() if value is not None})
    model = LlamaForCausalLM(config).eval()
    read_model(weight_files(smollm2_dir).paths[0], model)
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert len(found["likelihoods"]) == 5
    for context, continuation, told, is_greedy in found["likelihoods"]:
        num_before, ids = len(tokenizer.encode(context).ids), tokenizer.encode(context + continuation).ids
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, num_before - 1 : -1].float().log_softmax(-1)
        own = torch.tensor(ids[num_before:])
        likelihood = expected.gather(-1, own[:, None]).sum().item()
        assert told == pytest.approx(likelihood, abs=1e-3) and is_greedy == torch.equal(expected.argmax(-1), own)


async def _run(python: Path, client: str, url: str, home: Path) -> str:
    """Run a client program and return its output. A program without a server may import this project."""
    ours_too = {} if url.startswith("http") else {"PYTHONPATH": f"{_HERE.parents[1]}:{sysconfig.get_path('purelib')}"}
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    process = await asyncio.create_subprocess_exec(
        *(python, _HERE / f"{client}_program.py", url),
        cwd=home,
        env={**ours, **_OFFLINE, "HOME": str(home), "HF_HOME": str(home), **ours_too},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, error = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, error.decode()[-4000:]
    return out.decode()

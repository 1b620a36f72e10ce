"""Faults that are really planted on this machine, and what the doctor says of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.cli.app import run
from cluster.doctor import host_facts
from core.index.redis_server import RedisAddress, RedisServer
from core.process.ports import free_ports
from tests.frontend.http.certificate_files import write_certificate


class Host:
    """A spec for this machine, and what was planted on it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.monkeypatch = monkeypatch
        first = free_ports(2)
        self.tree: dict[str, Any] = {"router": {"grpc_port": first, "http_port": first + 1}}
        self.ends: list[Callable[[], object]] = []

    def write(self) -> str:
        path = self.directory / "spec.yaml"
        path.write_text(json.dumps(self.tree))  # JSON is YAML
        return str(path)

    def take_port(self, which: str) -> None:
        listener = socket.create_server(("127.0.0.1", self.tree["router"][which]))
        self.ends.append(listener.close)

    def certify(self, *, days: int, of_another_key: bool = False) -> None:
        files = write_certificate(self.directory, name="door", days=days)
        if of_another_key:
            (self.directory / "other").mkdir()
            files = replace(files, key=write_certificate(self.directory / "other", name="door").key)
        self.tree["router"].update(tls_cert=files.certificate, tls_key=files.key)

    def serve_redis(self, password: str) -> None:
        address = RedisAddress(free_ports(1))
        server = RedisServer(address, log=self.directory / "redis.log")
        server.start()
        self.ends.append(server.stop)
        self.tree["index"] = f"redis://:{password}@127.0.0.1:{address.port}/0"


def _file_for_a_directory(host: Host) -> None:
    (host.directory / "blocks").write_text("")
    host.tree["prefill"] = {"kv_disk_gib": 1, "kv_disk_path": str(host.directory / "blocks")}


def _want_nixl(host: Host) -> None:
    host.monkeypatch.setattr(host_facts, "find_spec", lambda name: None)
    host.tree["kv"] = {"host_link": "nixl"}


_PLANTED: dict[str, tuple[str, Callable[[Host], object]]] = {
    "its HTTP port is taken": ("ports", lambda host: host.take_port("http_port")),
    "its gRPC port is taken": ("ports", lambda host: host.take_port("grpc_port")),
    "the directory for blocks is a file": ("disk", _file_for_a_directory),
    "the disk is too small": ("disk", lambda host: host.tree.update(prefill={"kv_disk_gib": 1_000_000})),
    "there is too little memory": (
        "memory",
        lambda host: host.tree.update({pool: {"kv_memory_gib": 100_000} for pool in ("prefill", "decode")}),
    ),
    "nobody answers where Redis should be": (
        "redis",
        lambda host: host.tree.update(index=f"redis://127.0.0.1:{free_ports(1)}/0"),
    ),
    "Redis has another password": ("redis", lambda host: host.serve_redis("another")),
    "the certificate has expired": ("certificates", lambda host: host.certify(days=-1)),
    "the certificate is of another key": ("certificates", lambda host: host.certify(days=90, of_another_key=True)),
    "the certificate ends in a week": ("certificates", lambda host: host.certify(days=7)),
    "there is no room": ("places", lambda host: host.tree.update(decode={"resources": {"cpus": 100_000}})),
    "nixl is not installed": ("links", _want_nixl),
    "the model is not there": ("files", lambda host: host.tree.update(model={"source": str(host.directory / "no")})),
    "what drafts is not there": (
        "files",
        lambda host: host.tree.update(speculation={"method": "eagle", "model": str(host.directory / "no")}),
    ),
    "there is no compiler": ("compiler", lambda host: host.monkeypatch.setenv("PATH", str(host.directory))),
    "calls go to a proxy": ("proxies", lambda host: host.monkeypatch.setenv("http_proxy", "http://10.9.9.9:3128")),
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Host(tmp_path, monkeypatch)
    yield made
    for end in made.ends:
        end()


@pytest.mark.parametrize("name", _PLANTED)
def test_a_planted_fault_is_found_and_without_it_nothing(
    name: str, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _checks(host, capsys) == set()
    check, plant = _PLANTED[name]
    plant(host)
    assert _checks(host, capsys) == {check}


def test_a_process_that_may_open_few_files(host: Host) -> None:
    """Of a process of its own: it cannot raise the limit again."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    code = f"{limit}; from cluster.cli.app import run; raise SystemExit(run(['doctor', {host.write()!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "open files: a process may open 1024" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [("cuda: Optional[str] = None", None), ("cuda: str | None = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("", "")],
)
def test_what_torch_says_it_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str | None
) -> None:
    (tmp_path / "version.py").write_text(f"__all__ = ['cuda']\n{line}\nhip: Optional[str] = None\n")
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host_facts, "find_spec", lambda name: torch)
    assert host_facts.look(host_facts.HostQuestion(ip="127.0.0.1")).torch_cuda == said


def test_what_it_says(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.take_port("http_port")
    port = host.tree["router"]["http_port"]
    assert run(["doctor", host.write()]) == 1
    said = capsys.readouterr().out
    assert f"problem: 127.0.0.1: ports: HTTP port {port} on 127.0.0.1 cannot be opened\n    end what listens" in said


def _checks(host: Host, capsys: pytest.CaptureFixture[str]) -> set[str]:
    code = run(["doctor", host.write(), "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert code == int(any(one["severity"] == "problem" for one in found))
    return {one["check"] for one in found} - {"shared memory"}  # a container may have little by itself

"""A controller without replicas that people operate by certificates, on a port of its own; no Ray."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.control.operations import Operations
from cluster.control.operator_registry import PersonBook
from cluster.control.report import ControllerReport, PoolReport, ReplicaReport
from cluster.launch.person_file import PersonFile
from cluster.ray import authority_store, internals
from cluster.ray.authority_store import issue_identity
from core.identity.credentials import Identity
from core.identity.key_pair import KeyPair
from core.identity.operator_account import PersonRole
from core.identity.process_name import ProcessName
from core.process.log import LogPart
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.api_key import ApiKey, KeyChange, KeyRegistry
from core.types.errors import SpecError
from core.types.request import Role

NAME = "operated"


class FakeController:
    """Implements cluster.control.operations.Operated."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.book = KeyRegistry()
        self.num_replicas = {role.value: 1 for role in Role}

    async def status(self) -> ControllerReport:
        timeouts = {"start_s": 10.0, "drain_s": 10.0}
        spec = {"name": NAME, "index": "redis://:s3cret@h", "security": {"tls": "auto"}, "timeouts": timeouts}
        return {"spec": spec, "pools": {role: _pool(role, number) for role, number in self.num_replicas.items()}}

    async def logs(self, replica: str, *, lines: int = 50, starts: dict[int, int] | None = None) -> dict[int, LogPart]:
        return {0: LogPart(f"{replica} {lines} {starts}\n", 9), 1: LogPart("", 0)}

    async def scale(self, replicas: dict[str, int], *, wait_for_nodes: bool = False) -> dict[str, tuple[int, int]]:
        self.asked.append(f"scale {replicas} {wait_for_nodes}")
        before = dict(self.num_replicas)
        self.num_replicas |= replicas
        return {role: (before[role], number) for role, number in replicas.items()}

    async def drain(self, replica: str) -> None:
        if replica == "decode-99":
            raise SpecError("no replica is called decode-99; there are: decode-1")
        self.asked.append(f"drain {replica}")

    async def switch(self, replica: str) -> str:
        self.asked.append(f"switch {replica}")
        return "prefill-1"

    async def keys(self) -> KeyRegistry:
        self.asked.append("keys")
        return self.book

    async def add_key(self, key: ApiKey) -> KeyChange:
        self.asked.append(f"add {key.name}")
        self.book = self.book.with_key(key)
        return KeyChange(key=key, is_told=True)

    async def revoke_key(self, key: ApiKey) -> KeyChange:
        self.asked.append(f"revoke {key.name}")
        self.book = self.book.without(key)
        return KeyChange(key=key, is_told=False, problem="the disk is full")


@dataclass
class Operating:
    """A controller that people operate, and what they have for that."""

    spec: Spec
    book: PersonBook
    operations: Operations
    audit_log: Path
    controller: FakeController

    def person(self, name: str, role: PersonRole) -> PersonFile:
        keys = KeyPair()
        _, certificate = self.book.issue(self.spec, name, role, keys.request, days=1)
        return self.file(Identity(ProcessName.of_person(NAME, role, name), keys.tls_credentials(certificate)))

    def file(self, identity: Identity) -> PersonFile:
        return PersonFile(address=f"127.0.0.1:{self.operations.port}", identity=identity)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_log.read_text().splitlines()] if self.audit_log.exists() else []


@asynccontextmanager
async def operating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operating]:
    """A controller, and the port at which people operate it."""
    stored: dict[bytes, bytes] = {}
    monkeypatch.setattr(internals, "put", lambda key, value, *, namespace: stored.update({key: value}))
    monkeypatch.setattr(internals, "get", lambda key, *, namespace: stored.get(key))
    monkeypatch.setattr(internals, "delete", lambda key, *, namespace: stored.pop(key, None))
    spec = parse_spec({"name": NAME, "security": {"operators": "127.0.0.1:1"}})
    authority_store.prepare(spec)
    identity = issue_identity(spec, ProcessName.of_controller(NAME))
    controller, book, audit_log = FakeController(), PersonBook(NAME), tmp_path / "audit_log" / "commands.jsonl"
    operations = await Operations.open(controller, book, "127.0.0.1:0", identity, audit_log=audit_log)
    yield Operating(spec, book, operations, audit_log, controller)
    await operations.close()


def _pool(role: str, number: int) -> PoolReport:
    replicas: list[ReplicaReport] = [
        {
            "id": f"{role}-{i}",
            "state": "ready",
            "node": "here",
            "ranks": [{"pid": 1, "device": "cpu"}],
            "blocks": {"total": 9, "free": 9, "cached": 0},
            "running": 0,
            "waiting": 0,
            "stage": "",
            "fraction": 1.0,
        }
        for i in range(number)
    ]
    return {
        "desired": number,
        "ready": number,
        "replicas": replicas,
        "failures": [],
        "failed_rounds": 0,
        "has_given_up": False,
    }

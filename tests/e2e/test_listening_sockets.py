"""Every listening socket of a deployed 2P2D, probed by a stranger with network access."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import aio

from core.identity.authority import Authority
from core.process import processes
from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand
from tests.core.wire.every_rpc import METHODS, call, truthful
from tests.support.identities import rank, router, tls_credentials

_NAME = "walked"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # preface with empty settings
_ANSWER_S = 10.0
_AT_ONCE = 8
_WORDS = [
    b"PING\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 29\r\n\r\n" + b'{"prompt":"a","max_tokens":1}',
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stranger_gets_nothing_from_any_socket_of_a_deployment(command: ClusterCommand, tmp_path: Path) -> None:
    small = ["--set", "prefill.kv_memory_gib=0.1", "--set", "decode.kv_memory_gib=0.1"]
    endpoints = ["--grpc-port", str(free_port()), "--http-port", str(http := free_port())]
    closed = ["--set", "router.keys=required"]
    deployed = command.run("deploy", "2P2D", "--name", _NAME, *small, *endpoints, *closed, within_s=600)
    assert deployed.code == 0, deployed.err
    before = json.loads(command.run("status", "--json").out)
    assert before["tls"] == "auto"
    ranks = [one["pid"] for pool in before["pools"].values() for two in pool["replicas"] for one in two["ranks"]]
    listening = _listening(command)
    assert len(ranks) == 4 and set(ranks) <= listening.keys()

    neighbour = tls_credentials(Authority.create(_NAME), router(deployment=_NAME))
    chain, key = tmp_path / "neighbour.pem", tmp_path / "neighbour.key"
    chain.write_bytes(neighbour.certificate.chain)
    key.write_bytes(neighbour.key)
    for pid, addresses in listening.items():
        found = {address: _knock(*address, None) for address in addresses}
        found_as_neighbour = {address: _knock(*address, (str(chain), str(key))) for address in addresses}
        assert "let in" not in {*found.values(), *found_as_neighbour.values()}, (processes.title(pid), found)
        if pid in ranks:
            assert "refused" in found.values(), "a rank asks its callers for a certificate"

    everywhere = {address for addresses in listening.values() for address in addresses}
    assert ("127.0.0.1", http) in everywhere
    probes = [(*address, words) for address in everywhere for words in _WORDS]
    with ThreadPoolExecutor(32) as pool:
        responses = dict(zip(probes, pool.map(lambda each: _answer(*each), probes), strict=True))
    assert sum(answer.startswith(b"-NOAUTH") for answer in responses.values()) == 1, "the index asks who it is"
    assert responses["127.0.0.1", http, _WORDS[1]].startswith(b"HTTP/1.1 401 ")
    assert not {each: answer for each, answer in responses.items() if _is_given(answer)}
    answers = asyncio.run(_call_all({address for addresses in listening.values() for address in addresses}))
    assert not answers
    after = json.loads(command.run("status", "--json").out)
    assert after["ready"] and after["pools"] == before["pools"], "nothing died, and no block is held"
    assert command.run("generate", "Hello", "--max-tokens", "4").code == 0


def _listening(command: ClusterCommand) -> dict[int, set[tuple[str, int]]]:
    """Return the listening addresses by process."""
    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    marked = [psutil.Process(pid) for pid in processes.marked(f"CLUSTER_STATE_DIR={command.state_root}")]
    # The Redis server overwrites the mark by its process title.
    for process in {*marked, *(child for parent in marked for child in parent.children(recursive=True))}:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ip = connection.laddr.ip.removeprefix("::ffff:")
                ip = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip)
                found[process.pid].add((ip, connection.laddr.port))
    return found


def _answer(host: str, port: int, words: bytes) -> bytes:
    """Return the start of the response to these bytes; empty if there is none."""
    with suppress(OSError), socket.create_connection((host, port), _ANSWER_S) as plain:
        plain.sendall(words)
        return plain.recv(256)
    return b""


def _is_given(answer: bytes) -> bool:
    """Return whether the response serves the request."""
    return answer.startswith(b"+PONG") or (answer.startswith(b"HTTP/1.1 200 ") and b'"object"' in answer)


def _knock(host: str, port: int, shown: tuple[str, str] | None) -> str:
    """Connect with TLS, trusting any server, with a foreign certificate or none.

    Returns "no TLS", "refused", or, if an HTTP/2 preface is answered, "let in".
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if shown:
        context.load_cert_chain(*shown)
    try:
        with socket.create_connection((host, port), _ANSWER_S) as plain, context.wrap_socket(plain) as secure:
            try:
                secure.sendall(_PREFACE)
                return "let in" if secure.recv(1) else "refused"
            except OSError:
                return "refused"
    except OSError:  # SSLError is one
        return "no TLS"


async def _call_all(addresses: set[tuple[str, int]]) -> list[tuple[tuple[str, int], str]]:
    """Call each RPC at each address without TLS. Returns those that were answered."""
    peer, me = rank("decode-0", deployment=_NAME), router(deployment=_NAME)
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(host: str, port: int) -> list[tuple[tuple[str, int], str]]:
        async with room, aio.insecure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
            statuses = await asyncio.gather(*(call(channel, name, truthful(name, me, peer)) for name in METHODS))
        return [
            ((host, port), name)
            for name, status in zip(METHODS, statuses, strict=True)
            if status in (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
        ]

    return [answer for answers in await asyncio.gather(*(one(*address) for address in addresses)) for answer in answers]

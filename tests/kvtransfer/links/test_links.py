"""The contract of Link, run by every backend that this machine has. Each side is a process of its own."""

import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore, Store

from cluster.words.errors import LinkClosed
from kvtransfer.links.backends import LINKS, open_link
from kvtransfer.links.link import Link, LinkEnd
from tests.forks import forks

_TIMEOUT_S = 1.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        ours = [pytest.param(name, marks=pytest.mark.gpu) if name == "nccl" else name for name in LINKS]
        metafunc.parametrize("backend", [*ours, *metafunc.config.getoption("link")])


def _end(backend: str, store: Store, *, is_sender: bool) -> LinkEnd:
    device = torch.device("cuda", 0 if is_sender else 1) if backend == "nccl" else torch.device("cpu")
    return LinkEnd(store=store, prefix="link/1", is_sender=is_sender, host="127.0.0.1", device=device, timeout_s=20.0)


def _serve_peer(backend: str, place: str, orders: Connection) -> None:
    """The other side: sends when told ("send", bytes) or receives when told ("recv", size), and says what it got."""
    store = FileStore(place)
    orders.send("up")
    is_sender = orders.recv()
    link = open_link(backend, _end(backend, store, is_sender=is_sender))
    orders.send("ready")
    while True:
        order, value = orders.recv()
        if order == "send":
            link.send(torch.frombuffer(bytearray(value), dtype=torch.uint8).to(link.device)).wait(timeout_s=10)
        else:
            payload = torch.empty(value, dtype=torch.uint8, device=link.device)
            link.recv(payload).wait(timeout_s=10)
            orders.send(bytes(payload.cpu().numpy()))


class Peer:
    """A link of ours and the process at its other end."""

    def __init__(self, link: Link, process: mp.Process, orders: Connection) -> None:
        self.link, self.process, self.orders = link, process, orders

    def kill(self, with_signal: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, with_signal)


@contextmanager
def _peer(backend: str, directory: Path, *, we_send: bool) -> Iterator[Peer]:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of two ranks")
    ours, theirs = forks.Pipe()
    place = str(directory / "store")
    process = forks.Process(target=_serve_peer, args=(backend, place, theirs), daemon=True)
    process.start()
    assert ours.recv() == "up"  # before the deadline to meet begins: it takes seconds to import torch
    ours.send(not we_send)
    link = open_link(backend, _end(backend, FileStore(place), is_sender=we_send))
    assert ours.recv() == "ready"
    try:
        yield Peer(link, process, ours)
    finally:
        link.close()
        process.kill()
        process.join(10)


def _payload(link: Link, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8).to(link.device)


def test_bytes_arrive_in_order_whatever_their_size(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=True) as peer:
        for size in (1, 7, 1000, 65_536, 5_000_001):
            payload = _payload(peer.link, size)
            peer.orders.send(("recv", size))
            peer.link.send(payload).wait(timeout_s=10)
            assert peer.orders.recv() == bytes(payload.cpu().numpy())


def test_several_payloads_may_be_on_their_way(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=True) as peer:
        payloads = [_payload(peer.link, size) for size in (300_000, 1, 2_000_000)]
        for payload in payloads:
            peer.orders.send(("recv", len(payload)))
        operations = [peer.link.send(payload) for payload in payloads]
        for payload, operation in zip(payloads, operations, strict=True):
            operation.wait(timeout_s=10)
            assert peer.orders.recv() == bytes(payload.cpu().numpy())


def test_a_killed_peer_fails_the_operation_by_its_deadline_and_the_link_for_good(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=True) as peer:
        peer.kill(signal.SIGKILL)
        peer.process.join(10)
        started = time.monotonic()
        with pytest.raises(LinkClosed):
            for _ in range(8):  # the first may still fit into a buffer
                peer.link.send(_payload(peer.link, 8 << 20)).wait(timeout_s=_TIMEOUT_S)
        assert time.monotonic() - started < 8 * _TIMEOUT_S
        with pytest.raises(LinkClosed):
            peer.link.send(_payload(peer.link, 1)).wait(timeout_s=_TIMEOUT_S)


def test_a_frozen_peer_fails_a_receive_at_the_deadline(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=False) as peer:
        peer.kill(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(LinkClosed):
            peer.link.recv(torch.empty(1 << 20, dtype=torch.uint8, device=peer.link.device)).wait(timeout_s=_TIMEOUT_S)
        assert time.monotonic() - started < 10 * _TIMEOUT_S


def test_a_closed_link_refuses_and_closing_twice_is_fine(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=True) as peer:
        peer.link.close()
        peer.link.close()
        with pytest.raises(LinkClosed):
            peer.link.send(_payload(peer.link, 1)).wait(timeout_s=_TIMEOUT_S)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("we_send", [True, False])
def test_closing_a_tcp_link_wakes_whoever_waits_for_it(we_send: bool, tmp_path: Path) -> None:
    """Long before the deadline, which the peer's silence would have it sit out."""
    with _peer("tcp", tmp_path, we_send=we_send) as peer, ThreadPoolExecutor(1) as pool:
        payload = _payload(peer.link, 64 << 20)  # more than the kernel takes in for somebody who does not read
        operation = peer.link.send(payload) if we_send else peer.link.recv(payload)
        waiting = pool.submit(operation.wait, timeout_s=600)
        assert not wait([waiting], timeout=0.2).done
        peer.link.close()
        with pytest.raises(LinkClosed):
            waiting.result()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("we_send", [True, False])
def test_the_death_of_a_tcp_peer_is_known_at_once(we_send: bool, tmp_path: Path) -> None:
    with _peer("tcp", tmp_path, we_send=we_send) as peer:
        payload = _payload(peer.link, 64 << 20)
        operation = peer.link.send(payload) if we_send else peer.link.recv(payload)
        peer.kill(signal.SIGKILL)
        with pytest.raises(LinkClosed):
            operation.wait(timeout_s=600)


def test_a_stranger_is_not_let_in_to_a_tcp_link(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    ours, theirs = (_end("tcp", FileStore(place), is_sender=is_sender) for is_sender in (True, False))
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(open_link, "tcp", theirs)
        host, port, _ = PrefixStore(ours.prefix, FileStore(place)).get("place").decode().split()
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(bytes(16))
            assert stranger.recv(1) == b""  # turned away
        sender, receiver = open_link("tcp", ours), receiving.result(20)
    payload = torch.arange(100, dtype=torch.uint8)
    sent, got = sender.send(payload), torch.empty(100, dtype=torch.uint8)
    receiver.recv(got).wait(timeout_s=10)
    sent.wait(timeout_s=10)
    sender.close()
    receiver.close()
    assert torch.equal(got, payload)


def test_a_peer_that_never_comes_is_reported_at_the_deadline(backend: str, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    device = torch.device("cuda") if backend == "nccl" else torch.device("cpu")
    end = LinkEnd(store=store, prefix="x", is_sender=True, host="127.0.0.1", device=device, timeout_s=_TIMEOUT_S)
    with pytest.raises(LinkClosed):
        open_link(backend, end)

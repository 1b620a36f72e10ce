"""Contract of Link, for every backend that this machine has. Each end is a separate process."""

import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from core.types.errors import LinkClosed
from kvtransfer.links.backends import LINKS, make_link
from kvtransfer.links.connection import PeerAuthentication
from kvtransfer.links.link import Link, LinkEnd, LinkGuard
from kvtransfer.links.tcp import Cipher
from tests.support.forks import forks
from tests.support.grids import quick

_TIMEOUT_S = 1.0
_SHORT_S = 0.2  # deadlines that are known to expire; a FileStore waits whole seconds
_SECRET = bytes(range(32))
_ENCRYPTED = "tcp, encrypted"
_WAYS = quick(product(("tcp", _ENCRYPTED), (True, False)), [("tcp", True), (_ENCRYPTED, False)])  # and whether we send
_NEEDS = {
    "nccl": pytest.mark.gpu,
    "nixl": pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
}
_FAKE_NCCL = "tests.kvtransfer.links.fake_nccl:fake_nccl_link"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        ours = [pytest.param(name, marks=_NEEDS.get(name, ())) for name in [*LINKS, _ENCRYPTED, _FAKE_NCCL]]
        metafunc.parametrize("backend", [*ours, *metafunc.config.getoption("link")])


def _make(backend: str, store: Store, *, is_sender: bool, timeout_s: float = 20.0) -> Link:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", 0 if is_sender or torch.cuda.device_count() < 2 else 1)
    end = LinkEnd(
        store=store,
        prefix="link/1",
        is_sender=is_sender,
        host="127.0.0.1",
        device=device,
        timeout_s=timeout_s,
        guard=LinkGuard(_SECRET, is_encrypted=backend == _ENCRYPTED),
    )
    return make_link("tcp" if backend == _ENCRYPTED else backend, end)


def _open(backend: str, store: Store, *, is_sender: bool) -> Link:
    link = _make(backend, store, is_sender=is_sender)
    link.meet()
    return link


def _serve_peer(backend: str, place: str, orders: Connection) -> None:
    """Run the other end: receives payloads of the ordered sizes, and returns their bytes."""
    os.environ["NCCL_HOSTID"] = "the peer's"  # allows two NCCL ranks on one GPU
    store = FileStore(place)
    orders.send("up")
    link = _open(backend, store, is_sender=orders.recv())
    orders.send("ready")
    while True:
        payload = torch.empty(orders.recv(), dtype=torch.uint8, device=link.device)
        link.recv(payload).wait(timeout_s=10)
        orders.send(bytes(payload.cpu().numpy()))


@dataclass
class Peer:
    """A link and the process at its other end."""

    link: Link
    process: mp.Process
    orders: Connection

    def kill(self, with_signal: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, with_signal)


@contextmanager
def _peer(backend: str, directory: Path, *, we_send: bool) -> Iterator[Peer]:
    ours, theirs = forks.Pipe()
    place = str(directory / "store")
    process = forks.Process(target=_serve_peer, args=(backend, place, theirs), daemon=True)
    process.start()
    assert ours.recv() == "up"  # before the connect deadline starts, because importing torch takes seconds
    ours.send(not we_send)
    link = _open(backend, FileStore(place), is_sender=we_send)
    assert ours.recv() == "ready"
    try:
        yield Peer(link, process, ours)
    finally:
        link.close()
        process.kill()
        process.join(10)


def _payload(link: Link, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8).to(link.device)


def test_payloads_of_any_size_in_flight_together_arrive_in_order(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=True) as peer:
        payloads = [_payload(peer.link, size) for size in (300_000, 1, 7, 65_536, 5_000_001)]
        for payload in payloads:
            peer.orders.send(len(payload))
        operations = [peer.link.send(payload) for payload in payloads]
        for payload, operation in zip(payloads, operations, strict=True):
            operation.wait(timeout_s=10)
            assert peer.orders.recv() == bytes(payload.cpu().numpy())
        for _ in range(2):
            peer.link.close()
        with pytest.raises(LinkClosed):
            peer.link.send(_payload(peer.link, 1)).wait(timeout_s=_TIMEOUT_S)


def test_a_killed_peer_fails_the_operation_by_its_deadline_and_the_link_for_good(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=True) as peer:
        peer.kill(signal.SIGKILL)
        peer.process.join(10)
        started = time.monotonic()
        with pytest.raises(LinkClosed):
            for _ in range(8):  # the first ones may fit into a buffer
                peer.link.send(_payload(peer.link, 8 << 20)).wait(timeout_s=_TIMEOUT_S)
        assert time.monotonic() - started < 8 * _TIMEOUT_S
        with pytest.raises(LinkClosed):
            peer.link.send(_payload(peer.link, 1)).wait(timeout_s=_TIMEOUT_S)


def test_a_frozen_peer_fails_a_receive_at_the_deadline(backend: str, tmp_path: Path) -> None:
    with _peer(backend, tmp_path, we_send=False) as peer:
        peer.kill(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(LinkClosed):
            peer.link.recv(torch.empty(1 << 20, dtype=torch.uint8, device=peer.link.device)).wait(timeout_s=_SHORT_S)
        assert time.monotonic() - started < 10 * _TIMEOUT_S


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "closed"])
@pytest.mark.parametrize(("kind", "we_send"), _WAYS)
def test_tcp_wait_ends_at_once_when_the_peer_dies_or_the_link_closes(
    kind: str, we_send: bool, is_killed: bool, tmp_path: Path
) -> None:
    with _peer(kind, tmp_path, we_send=we_send) as peer, ThreadPoolExecutor(1) as pool:
        payload = _payload(peer.link, 64 << 20)  # more than the socket buffers hold
        operation = peer.link.send(payload) if we_send else peer.link.recv(payload)
        waiting = pool.submit(operation.wait, timeout_s=600)
        assert not wait([waiting], timeout=0.2).done
        if is_killed:
            peer.kill(signal.SIGKILL)
        else:
            peer.link.close()
        with pytest.raises(LinkClosed):
            waiting.result()


class BothEnds:
    """Both ends of a tcp link in this process, and the address of the receiving one."""

    def __init__(self, pool: ThreadPoolExecutor, directory: Path) -> None:
        self._store = str(directory / "store")
        self.receiving = pool.submit(_open, "tcp", FileStore(self._store), is_sender=False)
        host, port = PrefixStore("link/1", FileStore(self._store)).get("place").decode().split()
        self.place = host, int(port)

    def knock(self) -> socket.socket:
        """Connect to the receiving end without authentication."""
        return socket.create_connection(self.place, 10)

    def let_in(self) -> tuple[Link, Link]:
        """Connect both ends and return the sending and the receiving one."""
        return _open("tcp", FileStore(self._store), is_sender=True), self.receiving.result(20)


def _carry(sender: Link, receiver: Link) -> None:
    """Send one payload through a link, then close it."""
    payload, got = _payload(sender, 100_000), torch.empty(100_000, dtype=torch.uint8)
    sent = sender.send(payload)
    receiver.recv(got).wait(timeout_s=10)
    sent.wait(timeout_s=10)
    sender.close()
    receiver.close()
    assert torch.equal(got, payload)


def _is_turned_away(pending_peer: socket.socket) -> bool:
    """Assert that the connection was closed after at most a nonce."""
    pending_peer.settimeout(10)
    try:
        return all(pending_peer.recv(100) for _ in range(2)) is False
    except ConnectionResetError:
        return True


def test_peer_without_the_secret_is_rejected(tmp_path: Path) -> None:
    """Garbage, a proof by another secret or for another link or mode, a replay, and an echo are all turned away."""
    same = PeerAuthentication(secret=_SECRET, link="link/1", is_encrypted=False)
    others = [replace(same, secret=bytes(32)), replace(same, link="link/2"), replace(same, is_encrypted=True)]
    ours = os.urandom(32)
    with ThreadPoolExecutor(1) as pool:
        rendezvous = BothEnds(pool, tmp_path)
        with rendezvous.knock() as early:
            replayed = same.proof(early.recv(32) + ours, is_sender=True)
        replies: list[Callable[[bytes], bytes]] = [
            lambda nonce: bytes(64),
            lambda nonce: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
            *(lambda nonce, other=other: ours + other.proof(nonce + ours, is_sender=True) for other in others),
            lambda nonce: ours + replayed,  # the receiving end sends a new nonce each time
            lambda nonce: ours + same.proof(nonce + ours, is_sender=False),  # the receiver's own bytes
        ]
        for reply in replies:
            with rendezvous.knock() as stranger:
                stranger.sendall(reply(stranger.recv(32)))
                assert _is_turned_away(stranger)
        _carry(*rendezvous.let_in())


@pytest.mark.timeout(30)
def test_silent_peers_block_no_link(tmp_path: Path) -> None:
    """Neither a link that waits, whose oldest pending peers are dropped beyond a limit, nor one that is connected."""
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        connected = BothEnds(pool, tmp_path)
        ends = connected.let_in()
        (tmp_path / "other").mkdir()
        waiting = BothEnds(pool, tmp_path / "other")
        strangers = [stack.enter_context(waiting.knock()) for _ in range(100)]
        for number in range(0, 100, 2):
            strangers[number].sendall(os.urandom(number))
        with pytest.raises(OSError):
            connected.knock()  # rejected, because the peer has connected already
        _carry(*ends)
        _carry(*waiting.let_in())
        assert all(_is_turned_away(stranger) for stranger in strangers)


@pytest.mark.timeout(60)
def test_peers_that_keep_reconnecting_block_no_link(tmp_path: Path) -> None:
    is_over = threading.Event()

    def reconnect(place: tuple[str, int]) -> None:
        with suppress(OSError):  # the link is connected and listens no more
            while not is_over.is_set():
                socket.create_connection(place, 1).close()

    with ThreadPoolExecutor(3) as pool:
        try:
            for number in range(8):
                directory = tmp_path / str(number)
                directory.mkdir()
                ends = BothEnds(pool, directory)
                for _ in range(2):
                    pool.submit(reconnect, ends.place)
                _carry(*ends.let_in())
        finally:
            is_over.set()


@pytest.mark.parametrize(
    ("nonce", "num_signed", "error"),
    [
        (bytes(32), 64, "failed to authenticate for this link"),
        (bytes(31), 0, "before sending its nonce"),  # its signature could be valid for another link or nonce
    ],
)
def test_a_sender_sends_nothing_to_who_cannot_prove_that_he_is_the_receiver(
    nonce: bytes, num_signed: int, error: str, tmp_path: Path
) -> None:
    """An impostor knows the rendezvous, but not the secret."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        store = str(tmp_path / "store")
        PrefixStore("link/1", FileStore(store)).set("place", f"127.0.0.1 {server.getsockname()[1]}")
        sending = pool.submit(_open, "tcp", FileStore(store), is_sender=True)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            connection.sendall(nonce)
            if not num_signed:
                connection.shutdown(socket.SHUT_WR)
            assert len(connection.recv(1000)) == num_signed
            if num_signed:
                connection.sendall(bytes(32))
            with pytest.raises(LinkClosed, match=error):
                sending.result(20)


def test_what_travels_encrypted_is_not_what_was_sent() -> None:
    """Ciphertexts never repeat, and a changed or repeated piece closes the link."""
    payload = b"the same words, again and again " * 5_000  # one piece
    sealing, opening = Cipher(bytes(32)), Cipher(bytes(32))
    first, second = sealing.buffer(len(payload)), sealing.buffer(len(payload))
    for encrypted in (first, second):
        assert list(sealing.encrypt(memoryview(payload), encrypted)) == [len(encrypted)]
        assert payload[:32] not in encrypted.tobytes()
    assert first != second
    got, again = memoryview(bytearray(len(payload))), Cipher(bytes(32))
    for reading in (opening, again):
        reading.decrypt(first, got)
        assert got == payload
    second[5] ^= 1
    for reading, encrypted in ((opening, second), (again, first)):
        with pytest.raises(LinkClosed):
            reading.decrypt(encrypted, got)


@pytest.mark.parametrize("is_sender", [True, False])
def test_missing_peer_is_reported_at_the_deadline(backend: str, is_sender: bool) -> None:
    link = _make(backend, HashStore(), is_sender=is_sender, timeout_s=_SHORT_S)
    with pytest.raises(LinkClosed):
        link.meet()
    with pytest.raises(LinkClosed):
        link.send(_payload(link, 1)).wait(timeout_s=_SHORT_S)
    link.close()


@pytest.mark.parametrize("is_sender", [True, False])
def test_link_may_be_closed_before_and_during_meet(backend: str, is_sender: bool) -> None:
    """The owner can close it at any time, and it ends by its deadline."""
    others = set(threading.enumerate())
    with ThreadPoolExecutor(1) as pool:
        link = _make(backend, HashStore(), is_sender=is_sender, timeout_s=_SHORT_S)
        rendezvous = pool.submit(link.meet)
        link.close()
        with pytest.raises(LinkClosed):
            rendezvous.result(10 * _TIMEOUT_S)
        early = _make(backend, HashStore(), is_sender=is_sender, timeout_s=_SHORT_S)
        early.close()
        with pytest.raises(LinkClosed):
            pool.submit(early.meet).result(10 * _TIMEOUT_S)
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("kv-"):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} is still running"

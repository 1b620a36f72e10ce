"""NCCL links whose NCCL calls hang: every wait ends by its deadline, and no thread is left. NCCL's environment."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

from core.types.errors import LinkClosed
from engine.runner import streams
from engine.runner.streams import AtOnce
from kvtransfer.links import nccl as nccl_module
from kvtransfer.links.link import LinkEnd, LinkGuard, own_stream
from kvtransfer.links.nccl import NcclLink
from kvtransfer.links.nccl_library import NcclError, guide_nccl, interface_for
from tests.kvtransfer.links.fake_nccl import FakeNccl
from tests.support.waiting import until

_SHORT_S, _LONG_S = 0.1, 600.0

pytestmark = pytest.mark.timeout(30)


class Made:
    """Links of one test, and the fake libraries that they call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.fakes: list[FakeNccl] = []
        self.links: list[NcclLink] = []

    def fake(self, *hanging: str) -> FakeNccl:
        self.fakes.append(FakeNccl(hanging))
        return self.fakes[-1]

    def link(
        self, fake: FakeNccl, *, is_sender: bool, timeout_s: float = _LONG_S, store: str = "", has_peer: bool = False
    ) -> NcclLink:
        """has_peer: the receiver is ready, as a receiving end that dies right afterwards."""
        place = FileStore(str(self._directory / f"store {store}"))
        if has_peer:
            PrefixStore("link/1", place).set("ready", "")
        end = LinkEnd(
            store=place,
            prefix="link/1",
            is_sender=is_sender,
            host="127.0.0.1",
            device=torch.device("cpu"),
            timeout_s=timeout_s,
            guard=LinkGuard(bytes(32)),
        )
        self.links.append(NcclLink(end, nccl=fake, abort_s=_SHORT_S))
        return self.links[-1]

    def pair(self, sending: FakeNccl | None = None, receiving: FakeNccl | None = None) -> list[NcclLink]:
        """Connect two links, the sending and the receiving one."""
        fakes = sending or self.fake(), receiving or self.fake()
        links = [self.link(fake, is_sender=fake is fakes[0]) for fake in fakes]
        with ThreadPoolExecutor(2) as pool:
            for rendezvous in [pool.submit(link.meet) for link in links]:
                rendezvous.result(10)
        return links


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Close all links afterwards, and assert that no NCCL thread is left."""
    made = Made(tmp_path)
    yield made
    for link in made.links:
        link.close()
    for fake in made.fakes:
        fake.release()
    _until(lambda: not _nccl_threads())


def _nccl_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-nccl")]


def _until(is_so: Callable[[], bool]) -> None:
    until(is_so, within_s=10)


def _payload(num_bytes: int = 1000) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


class FakeEvents:
    """Events of a device that does nothing until the test lets it run. Replaces `stream_event`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_done, self.was_waited_for, self.may_end = threading.Event(), threading.Event(), threading.Event()
        self.askers = set[int]()  # threads that asked whether it is over
        monkeypatch.setattr(nccl_module, "stream_event", self)

    def __call__(self, device: torch.device) -> FakeEvents:
        return self

    @property
    def is_over(self) -> bool:
        self.askers.add(threading.get_ident())
        return self.is_done.is_set()

    def hold_up(self) -> None: ...

    def wait(self) -> None:
        self.was_waited_for.set()
        self.may_end.wait()


@pytest.mark.parametrize("hanging", ["new_id", "begin"])
def test_meet_times_out_when_nccl_hangs(made: Made, hanging: str) -> None:
    fake = made.fake(hanging)
    link = made.link(fake, is_sender=True, timeout_s=_SHORT_S, has_peer=True)
    with pytest.raises(LinkClosed, match="meeting the peer timed out"):
        link.meet()
    link.close()
    assert fake.hangs.is_set() and len(_nccl_threads()) <= 2
    fake.release()
    _until(lambda: not _nccl_threads())
    assert fake.num_listening == 0


def test_meet_returns_after_a_first_transfer_on_the_device(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects ranks and loads kernels in their first operation, which may wait for the whole device.

    This must happen while the ends connect, before any payload is announced.
    """
    events = FakeEvents(monkeypatch)
    sending, receiving = made.fake(), made.fake()
    links = [made.link(fake, is_sender=fake is sending) for fake in (sending, receiving)]
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(link.meet) for link in links]
        _until(lambda: len(events.askers) == 2)
        assert ("send", "kv-nccl") in sending.called and ("recv", "kv-nccl") in receiving.called
        assert not any(rendezvous.done() for rendezvous in meetings)
        events.is_done.set()
        events.may_end.set()
        for rendezvous in meetings:
            rendezvous.result(10)


@pytest.mark.parametrize("hanging", ["send", "recv"])
def test_hanging_operation_is_aborted_from_another_thread(made: Made, hanging: str) -> None:
    sending, receiving = made.fake(), made.fake()
    links = made.pair(sending, receiving)
    fake, link = (sending, links[0]) if hanging == "send" else (receiving, links[1])
    fake.hanging = {hanging}
    operation = link.send(_payload()) if hanging == "send" else link.recv(_payload())
    with pytest.raises(LinkClosed, match="an operation timed out"):
        operation.wait(timeout_s=_SHORT_S)
    assert len(_nccl_threads()) <= 3  # this link's, the aborting one, and the other link's
    _until(lambda: ("abort", "kv-nccl-abort") in fake.called)
    link.close()
    with pytest.raises(LinkClosed, match="an operation timed out"):  # the first error is kept
        link.recv(_payload())


def test_close_and_wait_do_not_block_on_abort(made: Made) -> None:
    both = made.fake("abort"), made.fake("abort")
    sender, receiver = made.pair(*both)
    waiting = receiver.recv(_payload())
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(waiting.wait, timeout_s=_LONG_S)
        for link in (receiver, sender):
            closing = threading.Thread(target=link.close)
            closing.start()
            closing.join(5)
            assert not closing.is_alive(), "close() waits"
        with pytest.raises(LinkClosed, match="the link is closed"):
            waits.result(5)
    for fake in both:
        assert fake.hangs.wait(5)
    assert len(_nccl_threads()) <= 4
    assert {thread for fake in both for what, thread in fake.called if what == "abort"} == {"kv-nccl"}


@pytest.mark.parametrize("is_sender", [True, False])
def test_close_wakes_a_meeting_thread(made: Made, is_sender: bool) -> None:
    """The communicator that is being created is aborted, too."""
    fake = made.fake()
    link = made.link(fake, is_sender=is_sender, has_peer=is_sender)
    with ThreadPoolExecutor(1) as pool:
        rendezvous = pool.submit(link.meet)
        if is_sender:
            _until(lambda: ("begin", "kv-nccl") in fake.called)
        link.close()
        with pytest.raises(LinkClosed, match="the link is closed"):
            rendezvous.result(10)
    _until(lambda: not _nccl_threads())
    assert not is_sender or ("abort", "kv-nccl") in fake.called


@pytest.mark.parametrize("has_peer", [False, True], ids=["missing", "gone"])
def test_no_nccl_listener_remains_for_a_missing_peer(made: Made, has_peer: bool) -> None:
    fake = made.fake()
    with pytest.raises(LinkClosed):
        made.link(fake, is_sender=True, timeout_s=_SHORT_S, has_peer=has_peer).meet()
    _until(lambda: not _nccl_threads())
    assert [what for what, _ in fake.called] == (["new_id", "begin", "abort"] if has_peer else [])
    assert fake.num_listening == 0


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "being taken"])
def test_payload_is_held_until_the_device_is_done(made: Made, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted operation may run for a moment and must not write into reused memory.

    NCCL may have started it before it reports so.
    """
    sender, _ = made.pair(fake := made.fake())
    events = FakeEvents(monkeypatch)
    if not is_taken:
        monkeypatch.setattr(fake, "is_ready", lambda communicator: False)
    payload = _payload()
    memory = weakref.ref(payload.untyped_storage())
    with pytest.raises(LinkClosed):
        sender.send(payload).wait(timeout_s=_SHORT_S)
    del payload
    assert events.was_waited_for.wait(5) and _nccl_threads()
    gc.collect()
    assert memory() is not None
    events.may_end.set()
    _until(lambda: gc.collect() >= 0 and memory() is None)


def test_operation_completes_when_the_device_is_done(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enqueueing is not completion: the payload is in use until the device is done."""
    sender, receiver = made.pair()
    events = FakeEvents(monkeypatch)
    events.may_end.set()
    with ThreadPoolExecutor(1) as pool:
        operations = receiver.recv(_payload()), sender.send(_payload())
        waits = pool.submit(operations[1].wait, timeout_s=_LONG_S)
        _until(lambda: events.askers)
        assert not waits.done()
        events.is_done.set()
        waits.result(5)
        operations[0].wait(timeout_s=5)


def test_operation_waits_for_earlier_uses_of_its_payload(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is recorded in the caller's stream, and the link's stream waits for it before NCCL is called."""
    sending = made.fake()

    class Noted(AtOnce):
        def __init__(self, device: torch.device) -> None:
            self._made_on = threading.current_thread().name

        def hold_up(self) -> None:
            sending.called.append((f"behind {self._made_on}", threading.current_thread().name))

    sender, receiver = made.pair(sending)
    monkeypatch.setattr(nccl_module, "stream_event", Noted)
    for operation in (receiver.recv(_payload()), sender.send(_payload())):
        operation.wait(timeout_s=5)
    last_send = len(sending.called) - 1 - sending.called[::-1].index(("send", "kv-nccl"))
    assert (f"behind {threading.current_thread().name}", "kv-nccl") in sending.called[:last_send]


def test_peer_death_is_detected_while_the_device_waits(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = made.pair(None, receiving := made.fake())
    events = FakeEvents(monkeypatch)
    events.may_end.set()
    incoming = receiver.recv(_payload())
    sender.send(_payload())
    _until(lambda: len(events.askers) == 2)  # both are enqueued on the device

    def gone(communicator: int) -> bool:
        raise NcclError("remote process exited")

    monkeypatch.setattr(receiving, "is_ready", gone)
    with pytest.raises(LinkClosed, match="remote process exited"):
        incoming.wait(timeout_s=10)


def test_number_of_hanging_links_is_bounded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    two = threading.BoundedSemaphore(2)
    monkeypatch.setattr(nccl_module, "thread_places", lambda: two)
    fake = made.fake("new_id")
    for i in range(2):
        with pytest.raises(LinkClosed, match="timed out"):
            made.link(fake, is_sender=True, timeout_s=_SHORT_S, store=str(i), has_peer=True).meet()
    with pytest.raises(LinkClosed, match="restart this replica"):
        made.link(fake, is_sender=True, store="2").meet()
    fake.release()
    _until(lambda: not _nccl_threads())


def test_streams_are_not_shared_and_hanging_streams_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a pool of 32 streams: with it, the 33rd link would share the first one's stream."""
    handles, hanging = itertools.count(1), set[int]()

    class FakeStream:
        def __init__(self, handle: int, device: torch.device) -> None:
            self._handle = handle

        def query(self) -> bool:
            return self._handle not in hanging

    monkeypatch.setattr(streams, "new_driver_stream", lambda device: next(handles))
    monkeypatch.setattr(torch.cuda, "ExternalStream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    device = torch.device("cuda", 77)  # not used by other tests
    with ExitStack() as lanes:
        assert len({lanes.enter_context(own_stream(device)) for _ in range(100)}) == 100
    with own_stream(device) as ended:
        assert ended <= 100, "streams of ended links are reused"
        hanging.add(ended)
    with ExitStack() as lanes:
        assert ended not in {lanes.enter_context(own_stream(device)) for _ in range(100)}


# The environment: network interface and host id.

_HERE = {"127.0.0.1": "lo", "::1": "lo", "172.17.0.1": "docker0", "10.0.0.5": "eth1", "fd00::5": "eth2"}


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("10.0.0.5", "=eth1"),
        ("127.0.0.1", "=lo"),
        ("fd00:0::0:5", "=eth2"),
        ("10.0.0.6", None),  # another host's address, or one behind NAT
        ("node-3", None),
    ],
)
def test_interface_with_the_host_address_is_selected(host: str, interface: str | None) -> None:
    assert interface_for(host, _HERE) == interface


@pytest.mark.parametrize("configured", [None, "ib0", "^docker", ""])
def test_configured_interface_is_kept(configured: str | None) -> None:
    environment = {} if configured is None else {"NCCL_SOCKET_IFNAME": configured}
    guide_nccl(environment, host="127.0.0.1")
    assert environment == {"NCCL_SOCKET_IFNAME": "=lo" if configured is None else configured}


def test_processes_sharing_a_gpu_get_distinct_nccl_host_ids() -> None:
    environment: dict[str, str] = {}
    for process in ("node-3/17", "node-3/18"):
        guide_nccl(environment, host="node-3", rank_on_shared_gpu=process)
        assert environment == {"NCCL_HOSTID": "node-3/17"}, "a value set before must be kept"

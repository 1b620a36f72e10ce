"""NCCL links whose NCCL calls hang: every wait ends by its deadline, and no thread is left."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

from core.types.errors import LinkClosed
from kvtransfer.links import nccl as nccl_module
from kvtransfer.links.link import LinkEnd, LinkGuard
from kvtransfer.links.nccl import NcclLink
from kvtransfer.links.nccl_library import NcclError
from tests.kvtransfer.links.fake_nccl import FakeNccl
from tests.support.waiting import until

FakeNccls = Callable[..., FakeNccl]
_CPU = torch.device("cpu")
_SHORT_S, _LONG_S = 0.1, 600.0

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def fakes() -> Iterator[FakeNccls]:
    """Yield a factory of fakes. After release, asserts that no NCCL thread is left."""
    made: list[FakeNccl] = []

    def make(hanging: Collection[str] = ()) -> FakeNccl:
        made.append(FakeNccl(hanging))
        return made[-1]

    yield make
    for fake in made:
        fake.release()
    _until(lambda: not _nccl_threads())


def _nccl_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-nccl")]


def _until(is_so: Callable[[], bool]) -> None:
    until(is_so, within_s=10)


def _link(store: Path, fake: FakeNccl, *, is_sender: bool, timeout_s: float = _LONG_S) -> NcclLink:
    end = LinkEnd(
        store=FileStore(str(store)),
        prefix="link/1",
        is_sender=is_sender,
        host="127.0.0.1",
        device=_CPU,
        timeout_s=timeout_s,
        guard=LinkGuard(bytes(32)),
    )
    return NcclLink(end, nccl=fake, abort_s=_SHORT_S)


def _pair(store: Path, sending: FakeNccl, receiving: FakeNccl) -> tuple[NcclLink, NcclLink]:
    links = _link(store, sending, is_sender=True), _link(store, receiving, is_sender=False)
    with ThreadPoolExecutor(2) as pool:
        for rendezvous in [pool.submit(link.meet) for link in links]:
            rendezvous.result(10)
    return links


def _payload(num_bytes: int = 1000) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


def _say_ready(store: Path) -> None:
    """Publish that the receiver is ready, as a receiving end that dies right afterwards."""
    PrefixStore("link/1", FileStore(str(store))).set("ready", "")


class FakeMark:
    """Event of a device that does nothing until the test lets it run."""

    is_over = False

    def __init__(self, device: torch.device) -> None: ...

    def hold_up(self) -> None: ...

    def wait(self) -> None: ...


@pytest.mark.parametrize("hanging", ["new_id", "begin"])
def test_meet_times_out_when_nccl_hangs(fakes: FakeNccls, hanging: str, tmp_path: Path) -> None:
    fake = fakes({hanging})
    _say_ready(tmp_path / "store")
    link = _link(tmp_path / "store", fake, is_sender=True, timeout_s=_SHORT_S)
    with pytest.raises(LinkClosed, match="meeting the peer timed out"):
        link.meet()
    link.close()
    assert fake.hangs.is_set() and len(_nccl_threads()) <= 2
    fake.release()
    _until(lambda: not _nccl_threads())
    assert fake.num_listening == 0


def test_meet_returns_after_a_first_transfer_on_the_device(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects ranks and loads kernels in their first operation, which may wait for the whole device.

    This must happen while the ends connect, before any payload is announced.
    """

    done, queries = threading.Event(), set[int]()

    class DoneWhenSaid(FakeMark):
        @property
        def is_over(self) -> bool:  # type: ignore[override]
            queries.add(threading.get_ident())
            return done.is_set()

    monkeypatch.setattr(nccl_module, "StreamEvent", DoneWhenSaid)
    sending, receiving = fakes(), fakes()
    links = [_link(tmp_path / "store", fake, is_sender=fake is sending) for fake in (sending, receiving)]
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(link.meet) for link in links]
        _until(lambda: len(queries) == 2)
        assert ("send", "kv-nccl") in sending.called and ("recv", "kv-nccl") in receiving.called
        assert not any(rendezvous.done() for rendezvous in meetings)
        done.set()
        for rendezvous in meetings:
            rendezvous.result(10)
    for link in links:
        link.close()


@pytest.mark.parametrize("hanging", ["send", "recv"])
def test_hanging_operation_is_aborted_from_another_thread(fakes: FakeNccls, hanging: str, tmp_path: Path) -> None:
    sending, receiving = fakes(), fakes()
    links = _pair(tmp_path / "store", sending, receiving)
    fake, link = (sending, links[0]) if hanging == "send" else (receiving, links[1])
    fake.hanging = {hanging}
    operation = link.send(_payload()) if hanging == "send" else link.recv(_payload())
    with pytest.raises(LinkClosed, match="an operation timed out"):
        operation.wait(timeout_s=_SHORT_S)
    assert len(_nccl_threads()) <= 3  # this link's, the aborting one, and the other link's
    _until(lambda: ("abort", "kv-nccl-abort") in fake.called)
    for link in links:
        link.close()


def test_close_and_wait_do_not_block_on_abort(fakes: FakeNccls, tmp_path: Path) -> None:
    """Neither `close` nor `wait` blocks on an abort."""
    both = fakes({"abort"}), fakes({"abort"})
    sender, receiver = _pair(tmp_path / "store", *both)
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
    for fake in both:
        fake.release()


@pytest.mark.parametrize("is_sender", [True, False])
def test_close_wakes_a_meeting_thread(fakes: FakeNccls, is_sender: bool, tmp_path: Path) -> None:
    """The communicator that is being created is aborted, too."""
    fake, store = fakes(), tmp_path / "store"
    if is_sender:
        _say_ready(store)
    link = _link(store, fake, is_sender=is_sender)
    with ThreadPoolExecutor(1) as pool:
        rendezvous = pool.submit(link.meet)
        if is_sender:
            _until(lambda: ("begin", "kv-nccl") in fake.called)
        link.close()
        with pytest.raises(LinkClosed, match="the link is closed"):
            rendezvous.result(10)
    _until(lambda: not _nccl_threads())
    assert not is_sender or ("abort", "kv-nccl") in fake.called


def test_no_nccl_listener_remains_for_a_missing_peer(fakes: FakeNccls, tmp_path: Path) -> None:
    never = fakes()
    with pytest.raises(LinkClosed):
        _link(tmp_path / "1", never, is_sender=True, timeout_s=_SHORT_S).meet()
    _until(lambda: not _nccl_threads())
    assert never.called == []
    gone = fakes()
    _say_ready(tmp_path / "2")
    with pytest.raises(LinkClosed):
        _link(tmp_path / "2", gone, is_sender=True, timeout_s=_SHORT_S).meet()
    _until(lambda: not _nccl_threads())
    assert [what for what, _ in gone.called] == ["new_id", "begin", "abort"]
    assert gone.num_listening == 0


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "being taken"])
def test_payload_is_held_until_the_device_is_done(
    fakes: FakeNccls, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted operation may run for a moment and must not write into reused memory.

    NCCL may have started it before it reports so.
    """
    let_go, waited = threading.Event(), threading.Event()

    class WaitedFor(FakeMark):
        def wait(self) -> None:
            waited.set()
            let_go.wait()

    sender, receiver = _pair(tmp_path / "store", fake := fakes(), fakes())
    monkeypatch.setattr(nccl_module, "StreamEvent", WaitedFor)
    if not is_taken:
        monkeypatch.setattr(fake, "is_ready", lambda communicator: False)
    payload = _payload()
    memory = weakref.ref(payload.untyped_storage())
    with pytest.raises(LinkClosed):
        sender.send(payload).wait(timeout_s=_SHORT_S)
    del payload
    assert waited.wait(5) and _nccl_threads()
    gc.collect()
    assert memory() is not None
    let_go.set()
    _until(lambda: gc.collect() >= 0 and memory() is None)
    for link in (sender, receiver):
        link.close()


def test_operation_completes_when_the_device_is_done(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enqueueing is not completion: the payload is in use until the device is done."""

    class DoneWhenSaid(FakeMark):
        is_done = threading.Event()
        was_asked = threading.Event()

        @property
        def is_over(self) -> bool:  # type: ignore[override]
            self.was_asked.set()
            return self.is_done.is_set()

    sender, receiver = _pair(tmp_path / "store", fakes(), fakes())
    monkeypatch.setattr(nccl_module, "StreamEvent", DoneWhenSaid)
    with ThreadPoolExecutor(1) as pool:
        operations = receiver.recv(_payload()), sender.send(_payload())
        waits = pool.submit(operations[1].wait, timeout_s=_LONG_S)
        assert DoneWhenSaid.was_asked.wait(5)
        assert not waits.done()
        DoneWhenSaid.is_done.set()
        waits.result(5)
        operations[0].wait(timeout_s=5)
    for link in (sender, receiver):
        link.close()


def test_operation_waits_for_earlier_uses_of_its_payload(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is recorded in the caller's stream, and the link's stream waits for it before NCCL is called."""
    sending = fakes()

    class Noted(FakeMark):
        is_over = True

        def __init__(self, device: torch.device) -> None:
            self._made_on = threading.current_thread().name

        def hold_up(self) -> None:
            sending.called.append((f"behind {self._made_on}", threading.current_thread().name))

    sender, receiver = _pair(tmp_path / "store", sending, fakes())
    monkeypatch.setattr(nccl_module, "StreamEvent", Noted)
    incoming, outgoing = receiver.recv(_payload()), sender.send(_payload())
    for operation in (incoming, outgoing):
        operation.wait(timeout_s=5)
    last_send = len(sending.called) - 1 - sending.called[::-1].index(("send", "kv-nccl"))
    assert (f"behind {threading.current_thread().name}", "kv-nccl") in sending.called[:last_send]
    for link in (sender, receiver):
        link.close()


def test_peer_death_is_detected_while_the_device_waits(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = set[int]()

    class UnderWay(FakeMark):
        @property
        def is_over(self) -> bool:  # type: ignore[override]
            queries.add(threading.get_ident())
            return False

    sender, receiver = _pair(tmp_path / "store", fakes(), receiving := fakes())
    monkeypatch.setattr(nccl_module, "StreamEvent", UnderWay)
    incoming = receiver.recv(_payload())
    sender.send(_payload())
    _until(lambda: len(queries) == 2)  # both are enqueued on the device

    def gone(communicator: int) -> bool:
        raise NcclError("remote process exited")

    monkeypatch.setattr(receiving, "is_ready", gone)
    with pytest.raises(LinkClosed, match="remote process exited"):
        incoming.wait(timeout_s=10)
    for link in (sender, receiver):
        link.close()


def test_first_error_of_a_link_is_kept(fakes: FakeNccls, tmp_path: Path) -> None:
    sender, receiver = _pair(tmp_path / "store", fakes(), fakes())
    with pytest.raises(LinkClosed, match="an operation timed out"):
        receiver.recv(_payload()).wait(timeout_s=_SHORT_S)
    receiver.close()
    with pytest.raises(LinkClosed, match="an operation timed out"):
        receiver.recv(_payload())
    sender.close()


def test_number_of_hanging_links_is_bounded(fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = threading.BoundedSemaphore(2)
    monkeypatch.setattr(nccl_module, "thread_places", lambda: two)
    fake = fakes({"new_id"})
    for i in range(2):
        _say_ready(tmp_path / str(i))
        with pytest.raises(LinkClosed, match="timed out"):
            _link(tmp_path / str(i), fake, is_sender=True, timeout_s=_SHORT_S).meet()
    with pytest.raises(LinkClosed, match="restart this replica"):
        _link(tmp_path / "2", fake, is_sender=True).meet()
    fake.release()
    _until(lambda: not _nccl_threads())

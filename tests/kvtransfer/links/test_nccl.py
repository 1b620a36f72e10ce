"""What a link over NCCL does when NCCL does not come back: every wait ends by its deadline, and nothing is left."""

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
_SHORT_S, _LONG_S = 0.3, 600.0

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def fakes() -> Iterator[FakeNccls]:
    """Makes them. Once they have come back at the end, no thread must be left."""
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
    return NcclLink(end, nccl=fake)


def _pair(store: Path, sending: FakeNccl, receiving: FakeNccl) -> tuple[NcclLink, NcclLink]:
    links = _link(store, sending, is_sender=True), _link(store, receiving, is_sender=False)
    with ThreadPoolExecutor(2) as pool:
        for rendezvous in [pool.submit(link.meet) for link in links]:
            rendezvous.result(10)
    return links


def _payload(num_bytes: int = 1000) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


def _say_ready(store: Path) -> None:
    """As a receiving end does that dies right then."""
    PrefixStore("link/1", FileStore(str(store))).set("ready", "")


class FakeMark:
    """Of a device that does nothing until it is told to."""

    is_over = False

    def __init__(self, device: torch.device) -> None: ...

    def hold_up(self) -> None: ...

    def wait(self) -> None: ...


@pytest.mark.parametrize("hanging", ["new_id", "begin"])
def test_meeting_ends_at_its_deadline_where_nccl_does_not_come_back(
    fakes: FakeNccls, hanging: str, tmp_path: Path
) -> None:
    fake = fakes({hanging})
    _say_ready(tmp_path / "store")
    link = _link(tmp_path / "store", fake, is_sender=True, timeout_s=_SHORT_S)
    with pytest.raises(LinkClosed, match="meeting the peer took longer"):
        link.meet()
    link.close()
    assert fake.hangs.is_set() and len(_nccl_threads()) <= 2
    fake.release()
    _until(lambda: not _nccl_threads())
    assert fake.num_listening == 0


def test_links_have_met_when_the_device_has_carried_a_first_message(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects two ranks, and loads its kernels, in their first operation, which may wait for all that the device
    has under way. That is while the ends meet, before any payload is announced."""

    done, asking = threading.Event(), set[int]()

    class DoneWhenSaid(FakeMark):
        @property
        def is_over(self) -> bool:  # type: ignore[override]
            asking.add(threading.get_ident())
            return done.is_set()

    monkeypatch.setattr(nccl_module, "StreamEvent", DoneWhenSaid)
    sending, receiving = fakes(), fakes()
    links = [_link(tmp_path / "store", fake, is_sender=fake is sending) for fake in (sending, receiving)]
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(link.meet) for link in links]
        _until(lambda: len(asking) == 2)
        assert ("send", "kv-nccl") in sending.called and ("recv", "kv-nccl") in receiving.called
        assert not any(rendezvous.done() for rendezvous in meetings)
        done.set()
        for rendezvous in meetings:
            rendezvous.result(10)
    for link in links:
        link.close()


@pytest.mark.parametrize("hanging", ["send", "recv"])
def test_an_operation_that_does_not_come_back_is_aborted_from_beside(
    fakes: FakeNccls, hanging: str, tmp_path: Path
) -> None:
    sending, receiving = fakes(), fakes()
    links = _pair(tmp_path / "store", sending, receiving)
    fake, link = (sending, links[0]) if hanging == "send" else (receiving, links[1])
    fake.hanging = {hanging}
    operation = link.send(_payload()) if hanging == "send" else link.recv(_payload())
    with pytest.raises(LinkClosed, match="an operation took longer"):
        operation.wait(timeout_s=_SHORT_S)
    assert len(_nccl_threads()) <= 3  # this link's, the one that will abort it, and the other link's
    _until(lambda: ("abort", "kv-nccl-abort") in fake.called)
    for link in links:
        link.close()


def test_nobody_waits_for_an_abort(fakes: FakeNccls, tmp_path: Path) -> None:
    """Neither who closes the link, nor who waits for an operation on it."""
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
def test_closing_a_link_wakes_whoever_meets_there(fakes: FakeNccls, is_sender: bool, tmp_path: Path) -> None:
    """And the communicator that is being made is aborted."""
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


def test_nobody_listens_for_a_peer_that_has_not_come_or_has_gone(fakes: FakeNccls, tmp_path: Path) -> None:
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
def test_a_payload_is_held_until_the_device_lets_go_of_it(
    fakes: FakeNccls, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that was aborted may go on for a moment, and would write into memory that somebody else has. NCCL
    may have begun it before it says that it has."""
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


def test_an_operation_is_over_when_the_device_has_done_it(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when it was given to it: until then its payload is read, or written."""

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


def test_an_operation_comes_behind_what_its_payload_was_used_for(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark is made where it is asked for, and holds up the link's own stream before NCCL is called."""
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


def test_a_peer_that_goes_is_noticed_while_the_device_waits_for_it(
    fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = set[int]()

    class UnderWay(FakeMark):
        @property
        def is_over(self) -> bool:  # type: ignore[override]
            asking.add(threading.get_ident())
            return False

    sender, receiver = _pair(tmp_path / "store", fakes(), receiving := fakes())
    monkeypatch.setattr(nccl_module, "StreamEvent", UnderWay)
    incoming = receiver.recv(_payload())
    sender.send(_payload())
    _until(lambda: len(asking) == 2)  # both have been given to the device

    def gone(communicator: int) -> bool:
        raise NcclError("remote process exited")

    monkeypatch.setattr(receiving, "is_ready", gone)
    with pytest.raises(LinkClosed, match="remote process exited"):
        incoming.wait(timeout_s=10)
    for link in (sender, receiver):
        link.close()


def test_why_a_link_failed_is_said_for_good(fakes: FakeNccls, tmp_path: Path) -> None:
    sender, receiver = _pair(tmp_path / "store", fakes(), fakes())
    with pytest.raises(LinkClosed, match="an operation took longer"):
        receiver.recv(_payload()).wait(timeout_s=_SHORT_S)
    receiver.close()
    with pytest.raises(LinkClosed, match="an operation took longer"):
        receiver.recv(_payload())
    sender.close()


def test_links_that_hang_are_bounded(fakes: FakeNccls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = threading.BoundedSemaphore(2)
    monkeypatch.setattr(nccl_module, "thread_places", lambda: two)
    fake = fakes({"new_id"})
    for i in range(2):
        _say_ready(tmp_path / str(i))
        with pytest.raises(LinkClosed, match="took longer"):
            _link(tmp_path / str(i), fake, is_sender=True, timeout_s=_SHORT_S).meet()
    with pytest.raises(LinkClosed, match="restart this replica"):
        _link(tmp_path / "2", fake, is_sender=True).meet()
    fake.release()
    _until(lambda: not _nccl_threads())

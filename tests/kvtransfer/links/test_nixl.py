"""Choice of the link backend. NIXL links under unfortunate closes and malformed messages, with a fake agent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

from core.types.errors import LinkClosed, SpecError
from kvtransfer.links import nixl as nixl_module
from kvtransfer.links.backends import LINKS, backend_for
from kvtransfer.links.link import LinkEnd, LinkGuard
from kvtransfer.links.nixl import NixlLink

pytestmark = pytest.mark.timeout(30)


class FakeAgent:
    introduction = b"an agent"

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages
        self.has_ended = threading.Event()

    def meet(self, introduction: bytes) -> None: ...

    def messages(self) -> list[bytes]:
        return self._messages

    def offer(self, number: int, payload: torch.Tensor) -> None: ...

    def end(self) -> None:
        self.has_ended.set()


def _link(make: Callable[[], FakeAgent], place: Path, patch: pytest.MonkeyPatch, *, is_sender: bool) -> NixlLink:
    patch.setattr(nixl_module, "check_nixl", lambda: None)
    patch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=SimpleNamespace()))
    patch.setattr(nixl_module, "_errors", nixl_module._errors.__wrapped__)
    patch.setattr(nixl_module, "_Agent", lambda name, device: make())
    store = FileStore(str(place))
    end = LinkEnd(
        store=store,
        prefix="link/1",
        is_sender=is_sender,
        host="127.0.0.1",
        device=torch.device("cpu"),
        timeout_s=600.0,
        guard=LinkGuard(bytes(32)),
    )
    PrefixStore("link/1", store).set("receiver" if is_sender else "sender", "")
    return NixlLink(end)


def test_agent_created_during_close_is_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent([])

    def make() -> FakeAgent:
        link.close()
        for thread in threading.enumerate():
            if thread.name == "kv-nixl-end":  # finds no agent to destroy
                thread.join()
        return agent

    link = _link(make, tmp_path / "store", monkeypatch, is_sender=True)
    with pytest.raises(LinkClosed, match="the link is closed"):
        link.meet()
    assert agent.has_ended.is_set()


@pytest.mark.parametrize("is_sender", [True, False])
def test_malformed_message_closes_the_link(is_sender: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent([b"abc"])
    link = _link(lambda: agent, tmp_path / "store", monkeypatch, is_sender=is_sender)
    with pytest.raises(LinkClosed):
        link.meet()
    assert agent.has_ended.wait(10)


_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_gpus_use_nccl_unless_nixl_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_module, "find_spec", lambda name: object())
    assert {link: backend_for(_CPU, host_link=link) for link in LINKS} == {link: link for link in LINKS}
    assert {link: backend_for(_GPU, host_link=link) for link in LINKS} == {
        link: "nixl" if link == "nixl" else "nccl" for link in LINKS
    }


def test_missing_package_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_module, "find_spec", lambda name: None)
    for device in (_CPU, _GPU):
        with pytest.raises(SpecError, match="pip install nixl") as caught:
            backend_for(device, host_link="nixl")
        assert "\n" not in str(caught.value)

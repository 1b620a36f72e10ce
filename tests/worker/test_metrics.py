"""Metrics of one replica: names, labels, values, and the port that serves them."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import worker.metrics
from core.rpc.worker_pb2 import Drafted, Status, StepTiming, Totals
from core.types.errors import DeployError
from engine.kv.block_manager import BlockManager
from engine.kv.window_manager import WindowManager
from router.telemetry.metrics import Metrics
from tests.support.waiting import WITHIN_S, until
from worker.metrics import MetricsServer, metrics_registry
from worker.worker import add_slots

_LABELS = {"deployment": "c", "model": "m", "replica": "decode-0", "role": "decode"}


class Served:
    def __init__(self) -> None:
        self.status = Status(replica="decode-0")
        self.server = MetricsServer(metrics_registry(lambda: self.status, _LABELS), host="127.0.0.1")

    def scrape(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        answer = httpx.get(f"http://{self.server.address}/metrics", verify=False, timeout=WITHIN_S)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        families = text_string_to_metric_families(answer.text)
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


def test_a_scrape_reads_the_latest_status(served: Served) -> None:
    labels = frozenset(_LABELS.items())
    assert ("xpyd_step_base_seconds", labels) not in served.scrape(), "not learned yet"
    served.status = Status(
        waiting=3,
        draining=True,
        timing=StepTiming(base_s=0.5),
        blocks_total=10,
        blocks_free=4,
        blocks_cached=5,
        states=8,
        checkpoints=2,
        window_parts=7,
        window_parts_cached=6,
        totals=Totals(transfer_bytes=1 << 40, drafted=[Drafted(method="suffix", tokens=[9, 4], accepted=[7, 3])]),
    )
    found = served.scrape()
    assert found["xpyd_sequences_waiting", labels] == 3
    assert found["xpyd_replica_draining", labels] == 1
    assert found["xpyd_step_base_seconds", labels] == 0.5
    assert [found[f"xpyd_kv_blocks{kind}", labels] for kind in ("", "_free", "_cached")] == [10, 4, 5]
    assert [found[f"xpyd_kv_{kind}", labels] for kind in ("states", "checkpoints")] == [8, 2]
    assert [found[f"xpyd_kv_window_parts{kind}", labels] for kind in ("", "_cached")] == [7, 6]
    assert found["xpyd_kv_transfer_bytes_total", labels] == 1 << 40
    drafts = [
        found[f"xpyd_speculation_{kind}_tokens_total", labels | {("method", "suffix"), ("position", position)}]
        for kind in ("drafted", "accepted")
        for position in "01"
    ]
    assert drafts == [9, 4, 7, 3]


def test_status_counts_states_and_parts() -> None:
    status = Status()
    add_slots(status, BlockManager(8))
    assert status == Status()
    with_states = BlockManager(8, num_states=3)
    assert with_states.states
    with_states.states.checkpoint(with_states.states.take(), b"prefix")
    add_slots(status, with_states)
    assert status == Status(states=3, checkpoints=1)
    status = Status()
    with_windows = BlockManager(8, windows=WindowManager(7, num_blocks=8, window=4, block_size=4, max_batch_tokens=4))
    kept = with_windows.allocate([], 1)
    assert kept and with_windows.windows
    with_windows.windows.attach(kept[0])
    with_windows.fill_block(kept[0][0], b"prefix")
    add_slots(status, with_windows)
    assert status == Status(window_parts=6)
    with_windows.windows.drop(kept[0])
    add_slots(status, with_windows)
    assert status == Status(window_parts=6, window_parts_cached=1)


def test_a_silent_client_blocks_no_scrape_and_is_disconnected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.metrics.RequestHandler, "timeout", 0.05)
    host, _, port = served.server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WITHIN_S) as silent:
        assert served.scrape()
        assert silent.recv(1) == b""


def test_the_port_closes(served: Served) -> None:
    served.server.close()
    host, _, port = served.server.address.rpartition(":")

    def is_closed() -> bool:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=WITHIN_S):
            return False
        return True

    until(is_closed)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(DeployError, match=r"192\.0\.2\.1.*router.admin_host"):
        MetricsServer(metrics_registry(Status, _LABELS), host="192.0.2.1")


def test_an_ipv6_address_is_announced_in_brackets() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 on this machine")
    server = MetricsServer(metrics_registry(Status, _LABELS), host="::1")
    assert httpx.get(f"http://{server.address}/metrics", verify=False, timeout=WITHIN_S).status_code == 200
    server.close()


def test_names_follow_the_conventions_of_prometheus() -> None:
    families = [*Metrics().registry.collect(), *metrics_registry(Status, {}).collect()]
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 50, "a router and a worker share no name"
    for family in families:
        assert re.fullmatch(r"xpyd_[a-z_]+", family.name), family.name
        assert re.match(r"[A-Z0-9].*\.$", family.documentation), family.name
        assert family.type != "histogram" or family.name.endswith("_seconds"), family.name
        assert not re.search(r"_(ms|us|kb|kib|mb|mib|gib)(_|$)", family.name), family.name

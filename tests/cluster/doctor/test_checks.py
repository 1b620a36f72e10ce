"""Each fault of a host, told in plain values, is found by its own rule, and a well host by none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.doctor.checks import findings_of
from cluster.doctor.finding import Severity
from cluster.doctor.host_facts import CertificateFacts, DeviceFacts, DirectoryFacts, HostFacts
from core.spec.loader import parse_spec
from core.spec.schema import Spec

_GIB = 1 << 30
_NOW_S = 1_700_000_000.0
_WELL = HostFacts(
    ip="10.0.0.1",
    name="one",
    python="3.11.7",
    packages={"xpyd": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "grpcio": "1.85.1"},
    machine="x86_64",
    time_s=_NOW_S,
    took_s=0.1,
    memory_bytes=64 * _GIB,
    shared_memory_bytes=8 * _GIB,
    max_files=65_536,
    has_compiler=True,
    redis_ms=0.3,
    redis_policy="volatile-lru",
    directories=(DirectoryFacts(path="/blocks", free_bytes=100 * _GIB),),
    certificates=(CertificateFacts(path="/tls.pem", until_s=_NOW_S + 90 * 86_400),),
    devices=(DeviceFacts(name="H100", memory_bytes=80 * _GIB),),
    driver="550.1",
    driver_cuda=13,
    torch_cuda="13.0",
    nccl="2.27.3",
    rdma_ports={"mlx5_0/1": "4: ACTIVE"},
)
_OTHERS = [replace(_WELL, ip=f"10.0.0.{number}") for number in (2, 3)]


def spec(**more: Any) -> Spec:
    pool = {"kv_disk_gib": 10, "kv_disk_path": "/blocks", "kv_memory_gib": 4}
    return parse_spec({"prefill": pool, "decode": {"kv_memory_gib": 4}, **more})


_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "another torch": ("versions", {"packages": {**_WELL.packages, "torch": "2.12.0"}}),
    "another Python": ("versions", {"python": "3.12.1"}),
    "no Ray": ("packages", {"packages": {name: at for name, at in _WELL.packages.items() if name != "ray"}}),
    "no compiler": ("compiler", {"has_compiler": False, "devices": ()}),
    "a clock that is slow": ("clocks", {"time_s": _NOW_S - 30}),
    "a port that is taken": ("ports", {"ports_taken": (("10.0.0.1", 50051),)}),
    "a disk that cannot be written": (
        "disk",
        {"directories": (DirectoryFacts(path="/blocks", problem="/blocks cannot be written"),)},
    ),
    "a disk that is too small": ("disk", {"directories": (DirectoryFacts(path="/blocks", free_bytes=_GIB),)}),
    "a disk that is none": (
        "disk",
        {"directories": (DirectoryFacts(path="/blocks", free_bytes=99 * _GIB, is_memory=True),)},
    ),
    "little memory": ("memory", {"memory_bytes": 2 * _GIB}),
    "little shared memory": ("shared memory", {"shared_memory_bytes": 64 << 20}),
    "few open files": ("open files", {"max_files": 1024}),
    "little locked memory": ("locked memory", {"max_locked_bytes": 64 << 10}),
    "no Redis": ("redis", {"redis_problem": "no Redis answers at redis://10.0.0.9:6379: timed out", "redis_ms": None}),
    "a Redis far away": ("redis", {"redis_ms": 40.0}),
    "a Redis that throws keys away": ("redis", {"redis_policy": "allkeys-lru"}),
    "no model": ("files", {"unreadable": ("/model/config.json: No such file or directory",)}),
    "a certificate of another key": (
        "certificates",
        {"certificates": (CertificateFacts(path="/tls.pem", problem="key values mismatch"),)},
    ),
    "a certificate that has expired": (
        "certificates",
        {"certificates": (CertificateFacts(path="/tls.pem", until_s=_NOW_S - 1),)},
    ),
    "a certificate that soon will": (
        "certificates",
        {"certificates": (CertificateFacts(path="/tls.pem", until_s=_NOW_S + 86_400),)},
    ),
    "a host that is not reached": ("network", {"unreachable": ("10.0.0.2",)}),
    "a name of loopback": ("network", {"name_is_loopback": True}),
    "a proxy": ("proxies", {"proxies": ("http_proxy",)}),
    "another driver": ("gpus", {"driver": "535.0"}),
    "another NCCL": ("gpus", {"nccl": "2.21.5"}),
    "a link that is down": ("rdma", {"rdma_ports": {"mlx5_0/1": "1: DOWN"}}),
}


def test_nothing_is_found_on_well_hosts() -> None:
    assert findings_of(spec(), [_WELL, *_OTHERS]) == []


@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_is_found_on_its_host_and_nothing_else_is(name: str) -> None:
    check, facts = _FAULTS[name]
    ill = replace(_WELL, **facts)
    found = findings_of(spec(), [*_OTHERS, ill])
    assert {finding.check for finding in found} - {"versions"} == {check} - {"versions"}  # what lacks is another, too
    assert check in {finding.check for finding in found}
    assert {finding.host for finding in found} <= {ill.ip, ""}
    assert all(finding.found and finding.fix for finding in found)


_WANTS_GPUS: dict[str, Any] = {role: {"resources": {"gpus": 1}} for role in ("prefill", "decode")}


def test_gpus_that_no_host_has_are_missed() -> None:
    wants = spec(**_WANTS_GPUS)
    bare = replace(_WELL, devices=(), driver="", nccl="", rdma_ports={})
    assert {finding.check for finding in findings_of(wants, [bare])} == {"gpus"}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"torch_cuda": None}, "torch 2.13.0 was built without CUDA"),
        ({"driver_cuda": 12}, "torch was built for CUDA 13.0, and driver 550.1 knows 12.x"),
        ({"driver_cuda": 0}, None),
        ({"torch_cuda": ""}, None),
        ({"torch_cuda": "12.8"}, None),
    ],
    ids=str,
)
def test_a_torch_that_cannot_use_the_gpus(facts: dict[str, Any], said: str | None) -> None:
    host = replace(_WELL, **facts)
    assert [one.found for one in findings_of(spec(**_WANTS_GPUS), [host])] == ([said] if said else [])
    assert not findings_of(spec(), [host])


def test_a_link_whose_package_is_missing_is_told_where_it_is_wanted() -> None:
    having = replace(_WELL, has_nixl=True)
    wants = spec(kv={"host_link": "nixl"})
    assert [(one.check, one.host) for one in findings_of(wants, [having, _OTHERS[0]])] == [("links", _OTHERS[0].ip)]
    assert not findings_of(wants, [having]) and not findings_of(spec(), [having, _OTHERS[0]])


def test_one_promise_of_the_same_bits_on_two_kinds_of_processors() -> None:
    promised = spec(engine={"deterministic": True}, kv={"wire_dtype": "raw"})
    assert {one.check for one in findings_of(promised, [_WELL, replace(_OTHERS[0], machine="aarch64")])} == {
        "processors"
    }


def test_problems_come_first() -> None:
    ill = replace(_WELL, redis_ms=40.0, memory_bytes=_GIB)
    assert [one.severity for one in findings_of(spec(), [ill])] == [Severity.PROBLEM, Severity.WARNING]

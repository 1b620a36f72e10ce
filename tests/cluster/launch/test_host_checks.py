"""Faults injected on this machine and in reports of other hosts, and the findings that `cluster deploy` shows."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.app import run
from cluster.control.placement import Node
from cluster.launch import host_checks
from cluster.launch.host_checks import HostReport, check_hosts, compare, examine, gpu_errors
from core.process.ports import free_port
from core.spec.loader import parse_spec
from core.types.errors import DeployError

_NODE = Node(id="local", name="here", ip="127.0.0.1", total={"CPU": 64.0, "GPU": 8.0})


def _findings(tree: dict[str, Any]) -> list[str]:
    return list(examine(parse_spec(tree), [_NODE]).findings)


def _limited(kind: int, limit: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def plant(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usual = resource.getrlimit
        monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit, limit) if asked == kind else usual(asked))

    return plant


@pytest.mark.parametrize(
    ("pattern", "tree", "plant"),
    [
        (
            "error: 127.0.0.1: kv_disk_path: .*blocks is not a writable directory",
            {"prefill": {"kv_disk_gib": 1, "kv_disk_path": "blocks"}},
            None,
        ),
        (
            "error: 127.0.0.1: kv_disk_gib: .*blocks may take 1e\\+06",
            {"prefill": {"kv_disk_gib": 1_000_000}},
            None,
        ),
        ("error: 127.0.0.1: model .*/no cannot be read", {"model": {"source": "no"}}, None),
        (
            "error: 127.0.0.1: model .*/heads cannot be read",
            {"speculation": {"method": "eagle", "model": "/none/heads"}},
            None,
        ),
        (
            "error: 127.0.0.1: kv.host_link is nixl, which",
            {"kv": {"host_link": "nixl"}},
            lambda path, monkeypatch: monkeypatch.setattr(host_checks, "find_spec", lambda name: None),
        ),
        (
            "error: 127.0.0.1: NVIDIA's driver does not answer",
            {role: {"resources": {"gpus": 1}} for role in ("prefill", "decode")},
            lambda path, monkeypatch: monkeypatch.setattr(host_checks, "driver_version", lambda: ("", 0)),
        ),
        (
            "warning: 127.0.0.1: kv_memory_gib: a replica's KV takes 100000 GiB",
            {role: {"kv_memory_gib": 100_000} for role in ("prefill", "decode")},
            None,
        ),
        ("warning: 127.0.0.1: a process may open 1024 files", {}, _limited(resource.RLIMIT_NOFILE, 1024)),
        ("warning: 127.0.0.1: a process may map 4.0 GiB", {}, _limited(resource.RLIMIT_AS, 4 << 30)),
        (
            "warning: 127.0.0.1: g\\+\\+ is missing",
            {},
            lambda path, monkeypatch: monkeypatch.setenv("PATH", str(path)),
        ),
    ],
)
def test_injected_fault_is_found(
    pattern: str,
    tree: dict[str, Any],
    plant: Callable[[Path, pytest.MonkeyPatch], None] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _findings({})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blocks").touch()  # not a directory
    if plant:
        plant(tmp_path, monkeypatch)
    [finding] = [one for one in _findings(tree) if one not in before and "NCCL" not in one]
    assert re.match(pattern, finding)


def test_model_is_checked_where_a_pool_fits_and_by_either_config(tmp_path: Path) -> None:
    tree = {"model": {"source": str(tmp_path)}}

    def is_missing(node: Node) -> bool:
        return any("cannot be read" in one for one in examine(parse_spec(tree), [node]).findings)

    assert is_missing(_NODE) and not is_missing(replace(_NODE, total={}))
    for name in ("config.json", "params.json"):
        (tmp_path / name).touch()
        assert not is_missing(_NODE)
        (tmp_path / name).unlink()


def test_first_error_stops_and_all_are_shown(tmp_path: Path) -> None:
    tree = {"model": {"source": str(tmp_path / "no")}, "prefill": {"kv_disk_gib": 1_000_000}}
    shown: list[str] = []
    with pytest.raises(DeployError, match=r"^127\.0\.0\.1: model .* cannot be read"):
        check_hosts(parse_spec(tree), [_NODE], shown.append, is_local=True)
    [other] = [line for line in shown if line.startswith("error: ")]
    assert "kv_disk_gib" in other, "the first error is in the exception alone"


@pytest.mark.parametrize(
    ("driver_cuda", "torch_cuda", "finding"),
    [
        (13, "13.0", ""),
        (13, "12.8", ""),
        (13, "", ""),
        (12, "13.0", "torch needs CUDA 13.0, driver 550.1 supports 12.x"),
        (13, None, "torch was built without CUDA"),
        (0, "13.0", "NVIDIA's driver does not answer"),
    ],
)
def test_driver_must_support_the_cuda_of_torch(driver_cuda: int, torch_cuda: str | None, finding: str) -> None:
    found = list(gpu_errors("550.1", driver_cuda, torch_cuda, has_nccl=True))
    assert len(found) == bool(finding) and all(one.startswith(finding) for one in found)


def test_missing_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert [one.partition(";")[0] for one in gpu_errors("580", 13, "13.0", has_nccl=False)] == ["NCCL is missing"]


@pytest.mark.parametrize(("text", "cuda"), [("cuda: str | None = '13.0'\n", "13.0"), ("cuda = None\n", None), ("", "")])
def test_cuda_of_torch_is_read_from_its_version_file(
    text: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    found = type("Found", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(host_checks, "find_spec", lambda name: found)
    assert host_checks.torch_cuda_version() == cuda


def _report(number: int, *, time_s: float = 1e9, **versions: str) -> HostReport:
    return HostReport(ip=f"10.0.0.{number}", versions={"torch": "2.9", **versions}, time_s=time_s)


def test_version_that_differs_is_named_on_its_host() -> None:
    other = _report(3, torch="2.8")
    assert list(compare([_report(1), _report(2), other], begin_s=1e9, end_s=1e9)) == [
        "warning: 10.0.0.3: torch is 2.8, on other hosts 2.9; use the same on all"
    ]


@given(time_s=st.floats(-1e5, 1e5), begin_s=st.floats(-1e5, 1e5), took_s=st.floats(0, 60))
def test_clock_skew_is_reported_beyond_the_limit(time_s: float, begin_s: float, took_s: float) -> None:
    found = list(compare([_report(1, time_s=time_s)], begin_s=begin_s, end_s=begin_s + took_s))
    is_off = time_s < begin_s - 2.0 or time_s > begin_s + took_s + 2.0
    distance_s = max(begin_s - time_s, time_s - begin_s - took_s)
    assert bool(found) is is_off or abs(distance_s - 2.0) < 1e-6


def test_dry_run_checks_and_starts_nothing(
    state_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2_dir: Path
) -> None:
    for variable in ("RAY_ADDRESS", "CLUSTER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    ports = ["--grpc-port", str(free_port()), "--http-port", str(http := free_port())]
    command = ["deploy", "1P1D", "--dry-run", "--model", str(smollm2_dir), *ports]
    assert run(command) == 0
    assert capsys.readouterr().out == "cluster: every check passed, nothing was started\n"
    assert run(["status"]) == 3, "nothing is deployed"
    with socket.create_server(("127.0.0.1", http)):
        assert run(command) == 2
    assert f"HTTP port {http} on 127.0.0.1 is in use" in capsys.readouterr().err

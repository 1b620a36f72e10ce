"""NCCL's network interface and host id."""

from __future__ import annotations

import pytest

from kvtransfer.links.interface import addresses_here, guide_nccl, interface_for

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
    assert interface_for(host, _HERE, configured=None) == interface


@pytest.mark.parametrize("said", ["ib0", "^docker", ""])
def test_configured_interface_is_kept(said: str) -> None:
    assert interface_for("10.0.0.5", _HERE, configured=said) is None
    environment = {"NCCL_SOCKET_IFNAME": said}
    guide_nccl(environment, host="127.0.0.1")
    assert environment == {"NCCL_SOCKET_IFNAME": said}


def test_this_hosts_interfaces_are_found() -> None:
    assert addresses_here()["127.0.0.1"] == "lo"
    environment: dict[str, str] = {}
    guide_nccl(environment, host="127.0.0.1")
    assert environment == {"NCCL_SOCKET_IFNAME": "=lo"}


def test_processes_sharing_a_gpu_get_distinct_nccl_host_ids() -> None:
    environment: dict[str, str] = {}
    guide_nccl(environment, host="node-3", rank_on_shared_gpu="node-3/17")
    assert environment == {"NCCL_HOSTID": "node-3/17"}
    guide_nccl(environment, host="node-3", rank_on_shared_gpu="node-3/18")
    assert environment == {"NCCL_HOSTID": "node-3/17"}, "a value set before must be kept"

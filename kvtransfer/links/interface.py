"""Selection of NCCL's network interface: the one with this host's address.

By default NCCL picks the first usable interface, which may be on another network, such as a container bridge. A value
of NCCL_SOCKET_IFNAME set by the operator is kept.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

_NAME = "NCCL_SOCKET_IFNAME"
_HOST = "NCCL_HOSTID"
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def guide_nccl(environment: MutableMapping[str, str], *, host: str, rank_on_shared_gpu: str = "") -> None:
    """Set NCCL's environment variables. Call this before the first use of NCCL, which reads them once.

    rank_on_shared_gpu: name of a process that shares its GPU; empty if it has whole GPUs. NCCL rejects two ranks of one
    communicator on one GPU unless their host ids differ; they then communicate over sockets.
    """
    if interface := interface_for(host, addresses_here(), configured=environment.get(_NAME)):
        environment[_NAME] = interface
    if rank_on_shared_gpu:
        environment.setdefault(_HOST, rank_on_shared_gpu)


def interface_for(host: str, addresses: Mapping[str, str], *, configured: str | None) -> str | None:
    """Return the value for NCCL_SOCKET_IFNAME, or None to leave it unchanged. Pure.

    addresses: interface names by address. configured: the variable's current value.
    """
    if configured is not None:
        return None
    with suppress(ValueError):  # a host name, which NCCL resolves itself
        address = ip_address(host.partition("%")[0])
        found = next(
            (name for interface_address, name in addresses.items() if ip_address(interface_address) == address), None
        )
        return f"={found}" if found else None  # "=" requests an exact match instead of a prefix match
    return None


def addresses_here() -> dict[str, str]:
    """Return this host's interface names by address."""
    return dict([*_ipv4_addresses(), *_ipv6_addresses()])


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24]), name


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            address, *_, name = line.split()
            yield str(IPv6Address(int(address, 16))), name

"""The network interface by which NCCL is to find its peers: the one that has this host's own address.

NCCL takes the first interface that it likes, which need not be on the network that the deployment uses: a container's
bridge is up, has an address, and leads nowhere. An operator's word (NCCL_SOCKET_IFNAME) stands.
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
    """Before NCCL is used in this process for the first time: it reads its variables once.

    rank_on_shared_gpu: the name of a process that has a part of a GPU. Two of one communicator on one GPU are a mistake
    to NCCL, unless they are said to be on two hosts; they then speak by sockets. Empty: it has whole GPUs.
    """
    if interface := interface_for(host, addresses_here(), said=environment.get(_NAME)):
        environment[_NAME] = interface
    if rank_on_shared_gpu:
        environment.setdefault(_HOST, rank_on_shared_gpu)


def interface_for(host: str, addresses: Mapping[str, str], *, said: str | None) -> str | None:
    """What NCCL_SOCKET_IFNAME should be; None: as it is. `addresses`: interfaces by address. Pure."""
    if said is not None:
        return None
    with suppress(ValueError):  # a name, which NCCL must find its own way to
        address = ip_address(host.partition("%")[0])
        found = next((name for known, name in addresses.items() if ip_address(known) == address), None)
        return f"={found}" if found else None  # = is "exactly this one", and not "whatever begins so"
    return None


def addresses_here() -> dict[str, str]:
    """The interfaces of this host, by address."""
    return dict([*_ipv4_addresses(), *_ipv6_addresses()])


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24]), name


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            address, *_, name = line.split()
            yield str(IPv6Address(int(address, 16))), name

"""Network partition between processes of this machine: packets are dropped silently.

Rules in our own nftables table, which vanishes with its owner, drop packets on TCP connections between two groups of
processes. Connections to other processes, such as Redis and Ray, are not affected.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Collection

from core.types.errors import SpecError

_IPV4_AND_IPV6 = 1  # NFPROTO_INET
# NFT_TABLE_F_OWNER: the kernel removes the table when our socket closes, however we end.
_OURS = 2
_ACCEPT, _DROP = 1, 0
_TRANSPORT_HEADER = 2
# Interval of the search for new connections between the groups.
_LOOK_S = 0.05

# Source and destination port, which identify a connection on one machine.
Ends = tuple[int, int]


def check_may_partition() -> None:
    """Raise SpecError with the missing requirement if partitions are not possible."""
    try:
        import psutil  # noqa: F401
        import pyroute2  # noqa: F401
    except ImportError as error:
        raise SpecError(f"a partition needs {error.name}: pip install 'xpyd[chaos]'") from None
    if os.geteuid() != 0:
        raise SpecError("a partition sets rules of nftables: run as root")


def partition(some: Collection[int], others: Collection[int], *, ended: threading.Event, within_s: float) -> None:
    """Drop all packets between two groups of pids, until `ended` is set or `within_s` has passed.

    New connections are found within 50 ms. Blocks, and must not run on an event loop's thread, because pyroute2 has its
    own loop. Raises SpecError if it is not permitted.
    """
    check_may_partition()
    from pyroute2.nftables.main import NFTables

    deadline = time.monotonic() + within_s
    table = f"xpyd_chaos_{os.getpid()}"
    cut: set[Ends] = set()
    with NFTables(nfgen_family=_IPV4_AND_IPV6) as nft:
        nft.table("add", name=table, flags=_OURS)
        nft.chain("add", table=table, name="in", hook="input", type="filter", policy=_ACCEPT, priority=0)
        while True:
            for ends in _between(some, others) - cut:
                cut.add(ends)
                nft.rule("add", table=table, chain="in", expressions=_drop(ends))
            if ended.wait(_LOOK_S) or time.monotonic() > deadline:
                break
        nft.table("del", name=table)


def _between(some: Collection[int], others: Collection[int]) -> set[Ends]:
    """Return both directions of every TCP connection between the two groups."""
    import psutil

    owners: dict[Ends, int] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.raddr and connection.pid:
            owners[connection.laddr.port, connection.raddr.port] = connection.pid
    found: set[Ends] = set()
    for (near, far), pid in owners.items():
        if pid in some and owners.get((far, near), 0) in others:
            found |= {(near, far), (far, near)}
    return found


def _drop(ends: Ends) -> tuple[list[dict[str, object]], ...]:
    """Return a rule that drops packets from one port to the other."""
    from pyroute2.nftables.expressions import Cmp, Regs, genex, verdict

    ports = {"dreg": Regs.NFT_REG_1, "base": _TRANSPORT_HEADER, "offset": 0, "len": 4}
    value = {"attrs": [("NFTA_DATA_VALUE", struct.pack(">HH", *ends))]}
    are_these = {"sreg": Regs.NFT_REG_1, "op": Cmp.NFT_CMP_EQ, "data": value}
    return [genex("payload", ports), genex("cmp", are_these)], verdict(_DROP)

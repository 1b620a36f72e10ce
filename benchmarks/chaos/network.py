"""Silence between processes of this machine, as a broken network makes it: packets vanish, and nobody is told.

Rules of nftables, in a table of our own that goes when its owner does, drop what travels on the TCP connections between
two groups of processes. Connections to anybody else, Redis and Ray say, are left alone.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Collection

from core.types.errors import SpecError

_IPV4_AND_IPV6 = 1  # NFPROTO_INET
_OURS = 2  # NFT_TABLE_F_OWNER: the kernel removes the table when our socket closes, however we end
_ACCEPT, _DROP = 1, 0
_TRANSPORT_HEADER = 2
_LOOK_S = 0.05  # how long a new connection between them may live

Ends = tuple[int, int]  # source and destination port: on one machine they name a connection


def check_may_partition() -> None:
    """Raises SpecError, which says what is missing."""
    try:
        import psutil  # noqa: F401
        import pyroute2  # noqa: F401
    except ImportError as error:
        raise SpecError(f"a partition needs {error.name}: pip install 'xpyd[chaos]'") from None
    if os.geteuid() != 0:
        raise SpecError("a partition sets rules of nftables: run as root")


def partition(some: Collection[int], others: Collection[int], *, ended: threading.Event, within_s: float) -> None:
    """No packet passes between the processes `some` and the processes `others` (pids) until `ended`, or for so long.

    A connection that is opened meanwhile is found within 50 ms. Blocks; not for a thread that runs an event loop, for
    pyroute2 has one of its own. Raises SpecError where this may not be done.
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
    """Both directions of every TCP connection between the two groups."""
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
    """A rule: what comes from the one port and goes to the other is dropped."""
    from pyroute2.nftables.expressions import Cmp, Regs, genex, verdict

    ports = {"dreg": Regs.NFT_REG_1, "base": _TRANSPORT_HEADER, "offset": 0, "len": 4}
    value = {"attrs": [("NFTA_DATA_VALUE", struct.pack(">HH", *ends))]}
    are_these = {"sreg": Regs.NFT_REG_1, "op": Cmp.NFT_CMP_EQ, "data": value}
    return [genex("payload", ports), genex("cmp", are_these)], verdict(_DROP)

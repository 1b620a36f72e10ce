"""`cluster scale`, `switch`, `drain` and `logs`: operate a running deployment."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cluster.cli.connection import ask, find_state, join_controller
from cluster.cli.console import reporter
from cluster.cli.options import Name, WaitForNodes
from cluster.control.replica import ControllerReport, Pools, number_of
from core.process.log import LogPart
from core.types.errors import SpecError

_FOLLOW_S = 0.5
_SIZE = re.compile(r"(prefill|decode)=([0-9]+)")
_Timeout = Annotated[
    float | None, typer.Option(help="Deadline in seconds; default: timeouts.start_s + timeouts.drain_s.")
]


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N", help="New number of replicas.")],
    name: Name = None,
    timeout: _Timeout = None,
    wait_for_nodes: WaitForNodes = False,
) -> None:
    """Change the size of one pool or both, and return when it is done.

    A leaving replica takes no new requests: a prefill replica finishes its requests, a decode replica hands them over.
    The other pool is not touched. If one pool shrinks and the other grows, replicas switch their role instead, as with
    `cluster switch`, where the spec allows it.
    """
    new_sizes = _parse_sizes(sizes)
    change = _change(name, "scale", new_sizes, roles=new_sizes, timeout=timeout, wait_for_nodes=wait_for_nodes)
    sizes_text = ", ".join(f"{role} {before} -> {after}" for role, (before, after) in change.answer.items())
    switched = "".join(f"; {was} became {replica}" for was, replica in change.switched.items())
    print(f"scaled {sizes_text} in {change.seconds:.1f} s{switched}")


def switch(
    replica: Annotated[str, typer.Argument(help="Replica id, such as decode-1; see `cluster status`.")],
    name: Name = None,
    timeout: _Timeout = None,
) -> None:
    """Turn a replica into one of the other pool, under a new id; its weights and cached blocks stay.

    It takes no new requests, hands over its sequences or finishes its prompts, and serves in its new role. The sizes of
    both pools follow. Returns when that is done.
    """
    change = _change(name, "switch", replica, roles=("prefill", "decode"), timeout=timeout)
    sizes = " ".join(f"{role}={pool['desired']}" for role, pool in change.pools.items())
    if change.switched.get(replica) == change.answer:
        print(f"{replica} became {change.answer} after {change.seconds:.1f} s: {sizes}")
    else:
        print(f"{replica} was lost during the switch and replaced after {change.seconds:.1f} s: {sizes}")


def drain(
    replica: Annotated[str, typer.Argument(help="Replica id, such as decode-1; see `cluster status`.")],
    name: Name = None,
    timeout: _Timeout = None,
) -> None:
    """Let one replica finish or hand over its requests and leave; a new one replaces it.

    Returns when both are done. The pool keeps its size; use `cluster scale` to shrink it.
    """
    role = replica.partition("-")[0]
    change = _change(name, "drain", replica, roles=[role], timeout=timeout)
    ids = (entry["id"] for entry in change.pools[role]["replicas"])
    newest = max(ids, key=number_of, default="none")
    print(f"{replica} has left, {newest} replaced it after {change.seconds:.1f} s")


def logs(
    replica: Annotated[
        str, typer.Argument(help="Replica id, such as decode-1, also of one that has left; or router, or controller.")
    ],
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Number of lines per rank.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until Ctrl-C.")] = False,
    name: Name = None,
) -> None:
    """Show the last log lines of a replica, the routers or the controller."""
    state = find_state(name)
    if state.endpoints and replica == "router":
        raise SpecError(f"it uses the routers of {state.endpoints}; run `cluster logs router --name {state.endpoints}`")
    controller = join_controller(state)
    parts: dict[int, LogPart] = ask(controller, "logs", replica, lines=lines)
    # Includes ranks that cannot be read right now.
    ends: dict[int, int] = {}
    while True:
        for rank, part in sorted(parts.items()):
            prefix = f"{rank}| " if len(parts) > 1 else ""
            for line in part.text.splitlines():
                print(prefix + line, flush=True)
        if not follow:
            return
        ends |= {rank: part.end for rank, part in parts.items()}
        time.sleep(_FOLLOW_S)
        parts = ask(controller, "logs", replica, starts=ends)


@dataclass(frozen=True)
class _Change:
    """Result of a change to the pools."""

    # Replicas before the change.
    known: set[str]
    answer: Any  # the controller's return value
    pools: Pools
    seconds: float

    @property
    def switched(self) -> dict[str, str]:
        """Role switches since the change: old id to new id."""
        replicas = [replica for pool in self.pools.values() for replica in pool["replicas"]]
        return {was: replica["id"] for replica in replicas if (was := replica["was"]) in self.known}


def _change(
    name: str | None, method: str, *args: Any, roles: Iterable[str], timeout: float | None, **kw: Any
) -> _Change:
    """Call a controller method, and return once the pools have settled and the routers see them."""
    begin = time.monotonic()
    state = find_state(name)
    controller = join_controller(state)
    from cluster.launch.status import await_serving

    before: ControllerReport = ask(controller, "status")
    known_failures = {failure["replica"] for pool in before["pools"].values() for failure in pool["failures"]}
    known = {replica["id"] for pool in before["pools"].values() for replica in pool["replicas"]}
    result = ask(controller, method, *args, **kw)
    timeouts = before["spec"]["timeouts"]
    deadline = begin + (timeout or timeouts["start_s"] + timeouts["drain_s"])
    with reporter(is_new=False) as report:
        pools = await_serving(
            controller, state, roles, deadline=deadline, reporter=report, known_failures=known_failures
        )
    return _Change(known, result, pools, time.monotonic() - begin)


def _parse_sizes(sizes: list[str]) -> dict[str, int]:
    new_sizes: dict[str, int] = {}
    for size in sizes:
        match = _SIZE.fullmatch(size)
        if match is None or match[1] in new_sizes:
            raise SpecError(f"scale {' '.join(sizes)}: write prefill=N, decode=N or both")
        new_sizes[match[1]] = int(match[2])
    return new_sizes

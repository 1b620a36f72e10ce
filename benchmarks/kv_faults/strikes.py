"""The fault cases, applied to our protocol.

In this protocol, a reference to KV is a ticket (a handoff), which the receiver of the KV issues to the sender. A ticket
names positions, never blocks, and only routers handle it, not clients. A fetched prefix is named by its hashes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from benchmarks.kv_faults.link import mark_of
from benchmarks.kv_faults.stage import PROMPT, Stage, resume
from core.rpc import transfer_pb2 as pb
from core.types.failpoint import FailpointStage
from core.types.request import Role
from tests.support.local_cluster import LocalReplica
from tests.support.rank_in_process import Fault
from tests.support.waiting import becomes

_FAR = 1 << 20  # positions beyond every pool here
_SALT = "5a" * 16

Strike = Callable[[Stage], Awaitable[None]]


async def _undisturbed(stage: Stage) -> None:
    held = await stage.hold()
    await stage.strike(held)
    await stage.ended(held)
    await stage.again(await stage.newcomer())


async def _unknown(stage: Stage) -> None:
    held = await stage.hold()
    await stage.strike(held, id=f"{stage.decode.id}/nobody/{'0' * 32}")
    await stage.end(held)


async def _out_of_range(stage: Stage) -> None:
    """A ticket from a router, then frames from another replica's rank; neither may reach beyond the pool."""
    newcomer, held = await stage.newcomer(), await stage.hold()
    await stage.strike(held, first_token=_FAR, num_tokens=_FAR + PROMPT, max_tokens=_FAR + PROMPT)
    first = stage.outcome.seen
    for far in ({"first_token": _FAR}, {"first_layer": _FAR}, {"num_tokens": _FAR}):
        segment = pb.Segment(handoff=held.handoff.id, epoch=1, **far)
        reply = await stage.pending_peer.announce(stage.decode, pb.SenderFrame(segment=segment))
        stage.outcome.num_foreign += reply == "landed"
    stage.outcome.seen = first
    await stage.end(held)
    await stage.again(newcomer)


async def _consumed(stage: Stage) -> None:
    """Reuse a ticket while its request decodes, and again when its blocks belong to another request."""
    held = await stage.hold()
    others = await stage.fill_up()
    await stage.hand.fill(held, stage.prefill, held.handoff)
    await stage.strike(held)
    await stage.ended(held)
    newcomer = await stage.newcomer()
    await stage.strike(held, epoch=7)
    await stage.give_up(*others)
    await stage.again(newcomer)


async def _stale(stage: Stage) -> None:
    held = await stage.hold()
    others = await stage.fill_up()
    held.give_up()
    # Waits for these blocks, because all others are taken.
    newcomer = await stage.newcomer()
    await stage.strike(held)
    await stage.give_up(*others)
    await stage.again(newcomer)


async def _expired(stage: Stage) -> None:
    held = await stage.hold()
    assert held.lease
    # The replica itself ends it.
    await asyncio.wait({held.lease})
    await stage.strike(held)


async def _expired_reused(stage: Stage) -> None:
    """The sender starts in time and is stopped until the lease has ended and the blocks are reused."""
    late = await stage.doomed(Role.PREFILL, Fault(FailpointStage.SENDING, number=signal.SIGSTOP))
    held = await stage.hold()
    filling = asyncio.create_task(stage.hand.fill(held, late, held.handoff))
    await becomes(lambda: late.has_been_hit)
    others = await stage.fill_up()
    # Waits until the lease ends, because all other blocks are taken.
    newcomer = await stage.newcomer()
    assert held.error
    resume(late)
    stage.outcome.seen = (await filling).error or "answered"
    await stage.give_up(*others)
    await stage.again(newcomer)
    await stage.settle()
    await stage.removed(late)


async def _short(stage: Stage) -> None:
    held = await stage.hold()
    few = PROMPT - 32
    fill = await stage.hand.fill(held, stage.prefill, held.handoff, prompt=list(held.request.token_ids)[:few])
    stage.outcome.seen = fill.error or "answered"
    await stage.end(held)


async def _other_prompt(stage: Stage) -> None:
    """A router uses one request's ticket for another one: received KV is never replaced."""
    held, other = await stage.hold(), await stage.prompt()
    await stage.hand.fill(held, stage.prefill, held.handoff)
    fill = await stage.hand.fill(held, stage.prefill, replace(held.handoff, epoch=2), prompt=other)
    held.first.pop(2, None)
    stage.outcome.seen = fill.error or "answered"
    await stage.ended(held)


async def _twice(stage: Stage) -> None:
    held = await stage.hold()
    fills = await asyncio.gather(
        *(stage.hand.fill(held, stage.prefill, replace(held.handoff, epoch=epoch)) for epoch in (1, 1, 2))
    )
    stage.outcome.seen = next((fill.error for fill in fills if fill.error), "answered")
    await stage.ended(held)


async def _forged_peer(stage: Stage) -> None:
    held = await stage.hold()
    await stage.strike(held, replica="decode-999")
    await stage.end(held)


async def _nobody_there(stage: Stage) -> None:
    held = await stage.hold()
    await stage.strike(held, ranks=("127.0.0.1:1",))
    await stage.end(held)


async def _unwritten(stage: Stage) -> None:
    held = await stage.hold()
    stage.outcome.seen = await stage.pending_peer.ship(held.handoff, has_payload=False)
    stage.outcome.num_wrong += held.has_started.is_set()
    await stage.end(held)


async def _forged_sender(stage: Stage) -> None:
    """The requested sender has sent its payload and is stopped before it reports that."""
    requested = await stage.doomed(Role.PREFILL, Fault(FailpointStage.COMMITTING, number=signal.SIGSTOP))
    held = await stage.hold()
    filling = asyncio.create_task(stage.hand.fill(held, requested, held.handoff))
    await becomes(lambda: requested.has_been_hit)
    stage.outcome.seen = await stage.pending_peer.ship(held.handoff)
    stage.outcome.num_foreign += stage.outcome.seen == "landed"
    resume(requested)
    await filling
    await stage.end(held)
    await stage.settle()
    await stage.removed(requested)


async def _damaged(stage: Stage) -> None:
    """After a damaged payload, the router asks another prefill replica, unnoticed by the client."""
    bad = await stage.doomed(Role.PREFILL)
    mark = mark_of(bad.ranks[0].pid)
    mark.touch()
    try:
        prompt = await stage.prompt(PROMPT + 10)
        stage.direct(prompt, (bad, stage.decode), (stage.prefill, stage.decode))
        held = await stage.hold()
        fill = await stage.hand.fill(held, bad, held.handoff)
        stage.outcome.seen = fill.error or "answered"
        await stage.end(held)
        await stage.ask(prompt)
    finally:
        mark.unlink()
    await stage.settle()
    await stage.removed(bad)


async def _foreign_prefix(stage: Stage) -> None:
    """A replica requests another tenant's prefix, first without the tenant's salt, then with it, which is permitted."""
    prompt = await stage.prompt()
    await stage.ask(prompt, salt=_SALT)
    num_served = await stage.pending_peer.fetch(stage.prefill, prompt, salt="")
    stage.outcome.num_foreign += num_served > 0
    assert await stage.pending_peer.fetch(stage.prefill, prompt, salt=_SALT) > 0, "the prefix was not cached"
    stage.outcome.seen = f"{num_served} positions served"


async def _evicted(stage: Stage) -> None:
    """The index still lists a replica that has evicted the prefix."""
    prefix_source = await stage.doomed(Role.PREFILL)
    prompt = await stage.prompt(PROMPT + 11)
    stage.direct(prompt, (prefix_source, stage.decode))
    await stage.ask(prompt)
    others = [await stage.prompt(PROMPT + 12 + number) for number in range(9)]
    # More than it has blocks for.
    for other in others:
        stage.direct(other, (prefix_source, stage.decode))
        await stage.ask(other)
    stage.direct(prompt, (stage.prefill, stage.decode), fetch_from=prefix_source.id, fetch_tokens=64)
    await stage.ask(prompt)
    stage.outcome.seen = "fewer positions served, the rest computed"
    await stage.settle()
    await stage.removed(prefix_source)


async def _client_gone(stage: Stage) -> None:
    held = await stage.hold()
    filling = asyncio.create_task(stage.hand.fill(held, stage.prefill, held.handoff))
    await asyncio.sleep(0)
    await stage.give_up(held)
    filling.cancel()
    stage.outcome.seen = "nothing"


async def _struck_sender(stage: Stage, number: signal.Signals) -> None:
    doomed = await stage.doomed(Role.PREFILL, Fault(FailpointStage.SENDING, number=number))
    prompt = await stage.prompt(PROMPT + 22)
    stage.direct(prompt, (doomed, stage.decode), (stage.prefill, stage.decode))
    await stage.ask(prompt)
    await _finish_case(stage, doomed, number)


async def _struck_receiver(stage: Stage, number: signal.Signals) -> None:
    doomed = await stage.doomed(Role.DECODE, Fault(FailpointStage.OPENED, number=number))
    prompt = await stage.prompt(PROMPT + 23)
    stage.direct(prompt, (stage.prefill, doomed), (stage.prefill, stage.decode))
    await stage.ask(prompt)
    await _finish_case(stage, doomed, number)


async def _finish_case(stage: Stage, doomed: LocalReplica, number: signal.Signals) -> None:
    assert doomed.has_been_hit, "the fault was not injected"
    newcomer = await stage.newcomer()
    if number is signal.SIGSTOP:
        resume(doomed)
    else:
        stage.killed.append(doomed)
    stage.outcome.seen = "a pause"
    await stage.again(newcomer)
    await stage.settle()
    await stage.removed(doomed)


async def _restarted(stage: Stage) -> None:
    """A decode replica dies after issuing a ticket, which is then redirected to another replica."""
    doomed = await stage.doomed(Role.DECODE)
    held = await stage.hold(decode=doomed)
    doomed.send(signal.SIGKILL)
    stage.killed.append(doomed)
    assert held.lease
    await asyncio.wait({held.lease})
    newcomer = await stage.newcomer()
    there = stage.cluster.seen(stage.decode).member.address
    await stage.strike(held)
    first_reply = stage.outcome.seen
    await stage.strike(held, replica=stage.decode.id, ranks=(there,), epoch=2)
    stage.outcome.seen = f"{first_reply}; {stage.outcome.seen}"
    await stage.again(newcomer)
    await stage.settle()
    await stage.removed(doomed)


STRIKES: dict[str, Strike] = {
    "undisturbed": _undisturbed,
    "unknown": _unknown,
    "out-of-range": _out_of_range,
    "consumed": _consumed,
    "stale": _stale,
    "expired": _expired,
    "expired-reused": _expired_reused,
    "short": _short,
    "other-prompt": _other_prompt,
    "twice": _twice,
    "forged-peer": _forged_peer,
    "nobody-there": _nobody_there,
    "unwritten": _unwritten,
    "forged-sender": _forged_sender,
    "damaged": _damaged,
    "foreign-prefix": _foreign_prefix,
    "evicted": _evicted,
    "client-gone": _client_gone,
    "sender-killed": partial(_struck_sender, number=signal.SIGKILL),
    "sender-frozen": partial(_struck_sender, number=signal.SIGSTOP),
    "receiver-killed": partial(_struck_receiver, number=signal.SIGKILL),
    "receiver-frozen": partial(_struck_receiver, number=signal.SIGSTOP),
    "restarted": _restarted,
}

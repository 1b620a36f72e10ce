"""The list, played against our own protocol: what a bad reference is here, in the hands of whoever could have one.

A reference to KV is a ticket here, and goes the other way: whoever wants KV gives it to whoever has it, and it names
positions, never blocks. It is a router's; no client can name one. A prefix that is pulled is named by its hashes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from benchmarks.kv_faults.link import mark_of
from benchmarks.kv_faults.stage import PROMPT, Stage, goes_on
from core.rpc import transfer_pb2 as pb
from core.types.failpoint import FailpointStage
from core.types.request import Role
from tests.support.local_cluster import LocalReplica
from tests.support.rank_in_process import Fault
from tests.support.waiting import becomes

_FAR = 1 << 20  # positions that no pool here has
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
    """The ticket of a router, then the announcement of another replica's rank; neither may lead out of the pool."""
    newcomer, held = await stage.newcomer(), await stage.hold()
    await stage.strike(held, first_token=_FAR, num_tokens=_FAR + PROMPT, max_tokens=_FAR + PROMPT)
    first = stage.outcome.seen
    for far in ({"first_token": _FAR}, {"first_layer": _FAR}, {"num_tokens": _FAR}):
        segment = pb.Segment(handoff=held.handoff.id, epoch=1, **far)
        said = await stage.pending_peer.announce(stage.decode, pb.SenderFrame(segment=segment))
        stage.outcome.num_foreign += said == "landed"
    stage.outcome.seen = first
    await stage.end(held)
    await stage.again(newcomer)


async def _consumed(stage: Stage) -> None:
    """Once while its request decodes, and once when its blocks are another request's."""
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
    newcomer = await stage.newcomer()  # waits for these blocks: there are no others
    await stage.strike(held)
    await stage.give_up(*others)
    await stage.again(newcomer)


async def _expired(stage: Stage) -> None:
    held = await stage.hold()
    assert held.lease
    await asyncio.wait({held.lease})  # the replica itself ends it
    await stage.strike(held)


async def _expired_reused(stage: Stage) -> None:
    """The sender has begun in time, and stands still until the lease is over and the blocks are others'."""
    late = await stage.doomed(Role.PREFILL, Fault(FailpointStage.SENDING, number=signal.SIGSTOP))
    held = await stage.hold()
    filling = asyncio.create_task(stage.hand.fill(held, late, held.handoff))
    await becomes(lambda: late.has_been_hit)
    others = await stage.fill_up()
    newcomer = await stage.newcomer()  # waits for its blocks: there are no others before the lease is over
    assert held.error
    goes_on(late)
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
    """A router that takes one request's ticket for another's: where the KV is there, nothing takes its place."""
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
    """The one that was asked has sent its payload and stands still before it says so."""
    asked = await stage.doomed(Role.PREFILL, Fault(FailpointStage.COMMITTING, number=signal.SIGSTOP))
    held = await stage.hold()
    filling = asyncio.create_task(stage.hand.fill(held, asked, held.handoff))
    await becomes(lambda: asked.has_been_hit)
    stage.outcome.seen = await stage.pending_peer.ship(held.handoff)
    stage.outcome.num_foreign += stage.outcome.seen == "landed"
    goes_on(asked)
    await filling
    await stage.end(held)
    await stage.settle()
    await stage.removed(asked)


async def _damaged(stage: Stage) -> None:
    """By the router itself: it asks another prefill replica, and the client hears nothing of it."""
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
    """A replica asks for what another tenant has there, without the tenant's salt; then with it, as one may."""
    prompt = await stage.prompt()
    await stage.ask(prompt, salt=_SALT)
    granted = await stage.pending_peer.fetch(stage.prefill, prompt, salt="")
    stage.outcome.num_foreign += granted > 0
    assert await stage.pending_peer.fetch(stage.prefill, prompt, salt=_SALT) > 0, "it was never there"
    stage.outcome.seen = f"{granted} positions are granted"


async def _evicted(stage: Stage) -> None:
    """The index still says that a replica has the prefix."""
    prefix_source = await stage.doomed(Role.PREFILL)
    prompt = await stage.prompt(PROMPT + 11)
    stage.direct(prompt, (prefix_source, stage.decode))
    await stage.ask(prompt)
    others = [await stage.prompt(PROMPT + 12 + number) for number in range(9)]
    for other in others:  # more than it has blocks for
        stage.direct(other, (prefix_source, stage.decode))
        await stage.ask(other)
    stage.direct(prompt, (stage.prefill, stage.decode), fetch_from=prefix_source.id, fetch_tokens=64)
    await stage.ask(prompt)
    stage.outcome.seen = "less is granted, the rest is computed"
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
    await _after_the_stroke(stage, doomed, number)


async def _struck_receiver(stage: Stage, number: signal.Signals) -> None:
    doomed = await stage.doomed(Role.DECODE, Fault(FailpointStage.OPENED, number=number))
    prompt = await stage.prompt(PROMPT + 23)
    stage.direct(prompt, (stage.prefill, doomed), (stage.prefill, stage.decode))
    await stage.ask(prompt)
    await _after_the_stroke(stage, doomed, number)


async def _after_the_stroke(stage: Stage, doomed: LocalReplica, number: signal.Signals) -> None:
    assert doomed.has_been_hit, "the fault never happened"
    newcomer = await stage.newcomer()
    if number is signal.SIGSTOP:
        goes_on(doomed)
    else:
        stage.killed.append(doomed)
    stage.outcome.seen = "a pause"
    await stage.again(newcomer)
    await stage.settle()
    await stage.removed(doomed)


async def _restarted(stage: Stage) -> None:
    """A decode replica dies with a ticket out; its ticket then comes to another life at another's name and place."""
    doomed = await stage.doomed(Role.DECODE)
    held = await stage.hold(decode=doomed)
    doomed.send(signal.SIGKILL)
    stage.killed.append(doomed)
    assert held.lease
    await asyncio.wait({held.lease})
    newcomer = await stage.newcomer()
    there = stage.cluster.seen(stage.decode).member.address
    await stage.strike(held)
    was_told = stage.outcome.seen
    await stage.strike(held, replica=stage.decode.id, ranks=(there,), epoch=2)
    stage.outcome.seen = f"{was_told}; {stage.outcome.seen}"
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

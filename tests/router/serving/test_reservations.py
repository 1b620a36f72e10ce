"""Reservations at replicas while requests wait, run, fail and move."""

from __future__ import annotations

import asyncio

import pytest

from core.types.errors import ClientTooSlow, ContextLengthExceeded, DeadlineExceeded, ModelUnavailable, RequestError
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import OFFLINE, Role, Sampling, SequenceRequest
from router.serving.replicas import Replica
from tests.router.serving import scenarios
from tests.router.serving.fake_worker import MAX_CONTEXT
from tests.router.serving.serving_model import QUEUE_S, Client, World
from tests.router.serving.virtual_time import pass_time, until


def _seen(world: World, name: str) -> Replica:
    replica = world.replicas.get(name)
    assert replica
    return replica


def _expecting(world: World, client: Client) -> set[str]:
    """Return the replicas that the index expects to hold the prompt's prefix. Fake workers publish no blocks."""
    hashes = block_hashes(root_hash("model"), client.request.token_ids, block_size=4)
    return set(world.replicas.index.depths(hashes))


@scenarios.in_world()
async def test_a_request_older_than_every_decode_replica_reserves_like_others(world: World) -> None:
    prefill = world.add(Role.PREFILL)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=1, max_tokens=300)
    await pass_time(0.1)
    decode = world.add(Role.DECODE)
    await until(lambda: _seen(world, decode.name).promised_streams)
    assert _seen(world, decode.name).promised_blocks == -(-(9 + 64) // 4), "64: default length of an answer"
    assert _expecting(world, client) == {prefill.name}


@scenarios.in_world()
async def test_prefixes_end_at_checkpoints_on_replicas_with_states_only(world: World) -> None:
    mixed = [world.add(Role.PREFILL, has_states=has_states).name for has_states in (True, False, True)]
    assert world.replicas.num_checkpoints == {mixed[0]: 1, mixed[2]: 1}
    world.remove(mixed[0])
    assert world.replicas.num_checkpoints == {mixed[2]: 1}


@scenarios.in_world()
async def test_an_oversized_request_fails_when_the_first_replica_joins(world: World) -> None:
    request = SequenceRequest(id="r", token_ids=(1,) * MAX_CONTEXT, num_prompt_tokens=MAX_CONTEXT)
    asking = asyncio.create_task(world.serve(request))
    await pass_time(0.1)
    world.add(Role.DECODE)
    with pytest.raises(ContextLengthExceeded):
        await asking


@scenarios.in_world()
async def test_a_model_without_a_decode_replica_becomes_unavailable_until_one_joins(world: World) -> None:
    now = asyncio.get_running_loop().time
    request = SequenceRequest(id="r", token_ids=(1, 2, 3), num_prompt_tokens=3, sampling=Sampling(max_tokens=2))
    began_at = now()
    with pytest.raises(ModelUnavailable, match="this model cannot be served at present: it has no decode replica"):
        await world.serve(request)
    assert now() - began_at == pytest.approx(QUEUE_S), "as long as any request waits for room"
    await pass_time(0.1)
    began_at = now()
    with pytest.raises(ModelUnavailable):
        await world.serve(request)
    assert now() == began_at, "unavailable for so long that requests fail at once"
    world.add(Role.DECODE)
    await pass_time(0.1)
    assert await world.serve(request)


@scenarios.in_world()
async def test_requests_fail_when_a_router_leaves_a_model(world: World) -> None:
    for role in Role:
        world.add(role)
    await pass_time(0.1)
    running = world.ask(num_tokens=9, n=1, max_tokens=900)
    await until(lambda: running.received)
    waiting = world.ask(num_tokens=9, n=6, max_tokens=900)
    await until(lambda: world.core.admission.num_waiting)
    world.core.replicas.availability.end()
    await world.replicas.close()
    await pass_time(2)
    for client in (running, waiting):
        assert client.is_over and isinstance(client.error, ModelUnavailable)
        assert str(client.error) == "this model cannot be served at present: this router leaves it"
    client = world.ask(num_tokens=9, n=1, max_tokens=3)
    await pass_time(0.1)
    assert isinstance(client.error, ModelUnavailable)


@scenarios.in_world()
async def test_a_prompt_that_a_decode_replica_computes_is_in_its_queue_until_it_is_computed(world: World) -> None:
    decode = _seen(world, world.add(Role.DECODE).name)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=1, max_tokens=300)
    await until(lambda: decode.promised_streams)
    assert (decode.pending_tokens, decode.load().queued_tokens) == (9, 9)
    assert _expecting(world, client) == {decode.id}
    await until(lambda: client.received)
    assert decode.pending_tokens == 0 and decode.promised_streams == 1
    await pass_time(1.5)
    assert not client.is_over and not _expecting(world, client), "by now the replica itself would have published it"


@scenarios.in_world()
async def test_a_failed_prefill_replica_leaves_no_expected_blocks(world: World) -> None:
    prefills = [world.add(Role.PREFILL) for _ in range(2)]
    world.add(Role.DECODE)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=1, max_tokens=300)
    await until(lambda: any(worker.num_held() for worker in prefills))
    failed, other = sorted(prefills, key=lambda worker: worker.num_held(), reverse=True)
    assert _expecting(world, client) == {failed.name}
    failed.kill()
    await until(lambda: other.num_held())
    assert _expecting(world, client) == {other.name}


@scenarios.in_world()
async def test_a_moving_choice_is_reserved_at_a_target_with_room(world: World) -> None:
    source = world.add(Role.DECODE)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=1, max_tokens=900)
    await until(lambda: client.received)
    full, free = (_seen(world, world.add(Role.DECODE).name) for _ in range(2))
    await pass_time(0.1)
    full.reserve(0, 0, 990, 1)
    free.reserve(1000, 0, 0, 0)  # its queue makes it less attractive
    source.drain()
    await until(lambda: free.promised_streams or full.promised_streams > 1)
    assert (free.promised_streams, full.promised_streams) == (1, 1)
    num_blocks = free.promised_blocks
    assert num_blocks * 4 > len(client.request.token_ids) + len(client.received[0])
    await until(lambda: _seen(world, source.name).promised_streams == 0)
    assert free.promised_streams == 1 and free.promised_blocks >= num_blocks
    full.reserve(0, 0, -990, -1)
    free.reserve(-1000, 0, 0, 0)


@scenarios.in_world()
async def test_cached_prompt_tokens_are_not_in_the_replicas_queue(world: World) -> None:
    decode = _seen(world, world.add(Role.DECODE).name)
    await pass_time(0.1)
    tokens = tuple(range(9))
    world.replicas.index.store(decode.id, block_hashes(root_hash("model"), tokens, block_size=4))
    request = SequenceRequest(id="r", token_ids=tokens, num_prompt_tokens=9, sampling=Sampling(max_tokens=30))
    async with world.core.start(request):
        await until(lambda: decode.promised_streams)
        assert decode.pending_tokens == 1
    await until(lambda: not decode.promised_streams)
    world.replicas.index.drop(decode.id)


def test_a_finished_request_does_not_wait_for_its_transfer() -> None:
    num_under_way = 0

    async def play(world: World) -> None:
        nonlocal num_under_way
        prefill, decode = world.add(Role.PREFILL), world.add(Role.DECODE)
        await pass_time(0.1)
        client = world.ask(num_tokens=9, n=1, max_tokens=300)
        await until(lambda: client.received)
        if not decode.leases[0].has_landed:
            num_under_way += 1
            prefill.fall_silent()
            await world.stop(client, 0)
            await pass_time(0.5)
            assert client.is_over

    for seed in range(8):
        scenarios.play(play, seed)
    assert num_under_way, "the first token never came before the KV"


@scenarios.in_world()
async def test_more_choices_than_a_replica_runs_are_rejected(world: World) -> None:
    world.add(Role.DECODE)
    await pass_time(0.1)
    running = [world.ask(num_tokens=9, n=1, max_tokens=300) for _ in range(2)]
    await until(lambda: all(client.received for client in running))
    request = SequenceRequest(id="r", token_ids=(1, 2), num_prompt_tokens=2, choices=tuple(range(7)))
    with pytest.raises(RequestError, match="at most 6 choices") as rejected:
        await world.serve(request)
    assert rejected.value.param == "n"
    small = world.ask(num_tokens=9, n=1, max_tokens=3)
    await until(lambda: small.is_over)
    assert not any(client.is_over for client in running)


@scenarios.in_world()
async def test_a_tenant_that_asks_for_everything_leaves_room_for_others(world: World) -> None:
    world.tenant_share = 0.75
    decode = _seen(world, world.add(Role.DECODE).name)  # runs six choices
    await pass_time(0.1)
    greedy = [world.ask(num_tokens=9, n=n, max_tokens=300, tenant="greedy") for n in (4, 1, 4, 1)]
    await until(lambda: greedy[0].received)
    assert world.core.admission.held["greedy"].num_streams == decode.promised_streams == 4
    for _ in range(3):
        modest = world.ask(num_tokens=9, n=1, max_tokens=3, tenant="modest")
        await pass_time(1.0)
        assert modest.is_over, "it waits behind requests of tenants at their share"
    assert not any(client.is_over for client in greedy)
    request = SequenceRequest(id="r", token_ids=(1, 2), num_prompt_tokens=2, choices=tuple(range(5)), tenant="greedy")
    with pytest.raises(RequestError, match="at most 4 choices of one tenant"):
        await world.serve(request)
    await pass_time(60)
    assert all(client.is_over for client in greedy)


@pytest.mark.parametrize("tenant_share", [0.75, 1.0])
@scenarios.in_world()
async def test_a_tenant_that_has_little_displaces_answers_that_have_grown_into_everything(
    world: World, tenant_share: float
) -> None:
    """The replica preempts other answers."""
    world.tenant_share = tenant_share
    decode = _seen(world, world.add(Role.DECODE).name)
    await pass_time(0.1)
    decode.reserve(0, 0, 999, 1)
    modest = world.ask(num_tokens=9, n=1, max_tokens=3, tenant="modest")
    await pass_time(5)
    assert modest.is_over == (tenant_share < 1)
    decode.reserve(0, 0, -999, -1)


@scenarios.in_world()
async def test_a_rejected_offline_request_leaves_no_reservation(world: World) -> None:
    offline = world.ask(num_tokens=9, n=7, max_tokens=3, priority=OFFLINE, tenant="a")
    await pass_time(0.1)
    world.add(Role.DECODE)  # runs six choices
    await pass_time(1.0)
    assert offline.task and offline.task.done() and not offline.received
    assert not world.core.admission.held
    offline.was_cancelled = True  # no answer is expected


@scenarios.in_world()
async def test_waiting_requests_survive_the_loss_of_a_replica(world: World) -> None:
    world.tenant_share = 0.75
    replicas = [world.add(Role.DECODE) for _ in range(2)]
    await pass_time(0.1)
    busy = [world.ask(num_tokens=9, n=3, max_tokens=300, tenant=tenant) for tenant in "bc"]
    await until(lambda: all(client.received for client in busy))
    large = world.ask(num_tokens=9, n=6, max_tokens=3, tenant="a")
    await pass_time(0.1)
    replicas[0].kill()
    world.remove(replicas[0].name)
    await pass_time(100)
    assert large.is_over


@scenarios.in_world()
async def test_a_tenant_that_asks_for_little_is_not_rejected_for_anothers_queue(world: World) -> None:
    """The progress of another tenant says nothing about its own turn."""
    world.tenant_share = 0.75
    world.add(Role.DECODE)
    await pass_time(0.1)
    greedy = [world.ask(num_tokens=9, n=1, max_tokens=900, tenant="greedy") for _ in range(40)]
    await pass_time(60)
    assert sum(client.is_over for client in greedy) >= 4, "nothing has been measured"
    modest = world.ask(num_tokens=9, n=1, max_tokens=900, deadline_s=30.0, tenant="modest")
    await until(lambda: modest.received)
    for client in greedy:
        world.cancel(client)


@pytest.mark.parametrize("deadline_s", [5.0, None])
@scenarios.in_world()
async def test_a_failover_waits_no_longer_than_the_deadline(world: World, deadline_s: float | None) -> None:
    request = SequenceRequest(id="r", token_ids=(1, 2), num_prompt_tokens=2, deadline_s=deadline_s)
    choosing = asyncio.create_task(world.core.reservations.next_pair(request, avoid=set(), num_waiting=0))
    await pass_time(20)
    assert choosing.done() == (deadline_s is not None)
    if deadline_s:
        with pytest.raises(DeadlineExceeded):
            await choosing
    choosing.cancel()
    await asyncio.gather(choosing, return_exceptions=True)


@scenarios.in_world()
async def test_a_call_that_ends_before_its_choices_is_a_loss_and_they_continue_elsewhere(world: World) -> None:
    decode = world.add(Role.DECODE)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=2, max_tokens=600)
    await until(lambda: len(client.received) == 2)
    other = world.add(Role.DECODE)
    await pass_time(0.1)
    (lease,) = decode.leases
    lease.running.clear()  # it reports success but sends no more tokens
    lease.call.end()
    await pass_time(2)
    assert not other.running(), "the last frames may still be on their way"
    decode.hits.append(client.request.id)
    await until(lambda: other.running())
    await until(lambda: client.is_over)
    assert client.error is None and client.finished == {0, 1}


@scenarios.in_world()
async def test_tokens_left_unread_are_bounded(world: World) -> None:
    """The client gets the error when it reads again."""
    world.add(Role.DECODE)
    await pass_time(0.1)
    sampling = Sampling(max_tokens=900, num_logprobs=60)
    request = SequenceRequest(id="r", token_ids=(1, 2), num_prompt_tokens=2, sampling=sampling)
    num_tokens = 0
    async with world.core.start(request) as generation:
        await until(lambda: world.core.num_running)
        await until(lambda: not world.core.num_running)
        with pytest.raises(ClientTooSlow):
            async for arrived in generation:
                num_tokens += len(arrived[0])
    assert 100 < num_tokens <= 1 + 16 * 1024 // 61


@scenarios.in_world()
async def test_prompt_logprobs_ignore_caches(world: World) -> None:
    decode = _seen(world, world.add(Role.DECODE).name)
    await pass_time(0.1)
    world.replicas.index.store(decode.id, block_hashes(root_hash("model"), tuple(range(9)), block_size=4))
    client = world.ask(num_tokens=9, n=1, max_tokens=30, num_prompt_logprobs=1)
    await until(lambda: decode.promised_streams)
    assert decode.pending_tokens == 9
    await until(lambda: client.is_over)
    assert client.error is None
    world.replicas.index.drop(decode.id)


@scenarios.in_world()
async def test_offline_requests_do_not_count_as_waiting(world: World) -> None:
    offline = world.ask(num_tokens=9, n=1, max_tokens=4, priority=OFFLINE)
    await pass_time(0.1)
    assert b"\nxpyd_requests_waiting 0.0" in world.metrics.render(), "offline requests are not counted"
    other = world.ask(num_tokens=9, n=1, max_tokens=4, priority=OFFLINE - 1)
    await pass_time(0.1)
    assert b"\nxpyd_requests_waiting 1.0" in world.metrics.render()
    assert b'\nxpyd_usable_replicas{role="decode"} 0.0' in world.metrics.render()
    world.add(Role.DECODE)
    await until(lambda: offline.is_over and other.is_over)
    assert b'\nxpyd_usable_replicas{role="decode"} 1.0' in world.metrics.render()

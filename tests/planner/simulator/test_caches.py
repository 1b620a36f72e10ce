"""Simulated models whose cache does not grow by the same bytes per token: states and attention windows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.trace.trace import TraceRequest
from core.types.request import Role
from planner.simulator.fleet import Fleet
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import FleetSetup, Profile, load_profile
from planner.simulator.run import simulate

_PLAIN = load_profile("h100-llama-3.1-8b")
_SETUP = FleetSetup(num_prefill=1, num_decode=1, block_size=64, kv_tokens=65_536, prefix_fetches=True)


def _profile(**kv: int) -> Profile:
    tokens = {"pool_tokens": 65_536, "bytes_per_token": 1000, "wire_bytes_per_token": 1000}
    return _PLAIN.model_copy(update={"kv": _PLAIN.kv.model_copy(update=tokens | kv)})


_STATES = _profile(state_bytes=300_000, pool_states=64)
_WINDOWS = _profile(window=512, window_wire_bytes_per_token=800, pool_window_tokens=16_384)


def _ask(number: int, ids: tuple[int, ...] | None, num_tokens: int, num_output: int = 2) -> TraceRequest:
    return TraceRequest(number=number, arrival_s=10.0 * number, num_tokens=num_tokens, num_output=num_output, ids=ids)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_a_prefix_with_states_is_reused_up_to_a_checkpoint(num_prefill: int) -> None:
    system, trace = (1, 2), list[TraceRequest]()
    for number, own in enumerate(((3, 4), (5, 6), (7, 8), (3, 4, 9))):
        ids = system + own
        trace.append(_ask(number, ids, 512 * len(ids)))
    # The second prompt finds the blocks of the first two ids without a checkpoint, and makes one behind them. The last
    # one continues the first behind its last full block but one: the last token was computed.
    for profile, reused in ((_STATES, 0 + 0 + 1024 + 1984), (_PLAIN, 0 + 1024 + 1024 + 2048)):
        report = simulate(replace(_SETUP, num_prefill=num_prefill), profile, trace)
        assert round(report["reuse_share"] * report["prompt_tokens"]) == reused


def test_a_next_turn_continues_behind_a_partly_filled_id() -> None:
    trace = [_ask(0, (1, 2), 1000), _ask(1, (1, 3, 4), 1500)]
    for profile, reused in ((_STATES, 960), (_PLAIN, 512)):
        report = simulate(replace(_SETUP, num_prefill=0), profile, trace)
        assert round(report["reuse_share"] * report["prompt_tokens"]) == reused


@pytest.mark.parametrize(
    ("profile", "num_bytes"),
    # A handoff of windows starts at the block of position 4000 - 511.
    [(_STATES, 4000 * 1000 + 300_000), (_WINDOWS, 4000 * 200 + (4000 - 3456) * 800), (_profile(), 4000 * 1000)],
)
def test_a_handoff_ships_what_the_decode_side_needs(profile: Profile, num_bytes: int) -> None:
    assert simulate(_SETUP, profile, [_ask(0, None, 4000)])["transfer_bytes"] == num_bytes


def test_layers_with_a_window_keep_whole_contexts_beside_lower_tiers() -> None:
    setup = replace(_SETUP, host_tokens=65_536)
    assert simulate(setup, _WINDOWS, [_ask(0, None, 4000)])["transfer_bytes"] == 4000 * 1000


@pytest.mark.parametrize("profile", [_STATES, _WINDOWS], ids=["states", "windows"])
def test_an_answer_simulated_in_leaps_keeps_what_single_steps_would(profile: Profile) -> None:
    fleet = Fleet(replace(_SETUP, num_prefill=0), profile, PrefixHashes(64))
    fleet.run([_ask(0, None, 1000, 700)])
    blocks = fleet.decodes["decode-0"].store.blocks
    if states := blocks.states:
        # Behind the prompt's last full block, and behind the last 128 tokens of the answer.
        assert len(states.full_hashes()) == 2
    if windows := blocks.windows:
        assert sum(block in windows for block in range(blocks.num_blocks)) == blocks.num_full == 1699 // 64


def test_replicas_run_as_many_sequences_as_they_have_states() -> None:
    setup = replace(_SETUP, num_prefill=0)
    trace = [replace(_ask(i, None, 100, 200), arrival_s=0.0) for i in range(12)]
    four = _profile(state_bytes=300_000, pool_states=4)
    assert Fleet(setup, four, PrefixHashes(64)).decodes["decode-0"].max_running == 4
    few = simulate(setup, four, trace)
    assert few["completed"] == 12 and few["duration_s"] > 2.5 * simulate(setup, _STATES, trace)["duration_s"]


@pytest.mark.parametrize("profile", [_STATES, _WINDOWS], ids=["states", "windows"])
def test_a_fetched_prefix_is_reusable(profile: Profile) -> None:
    store = Fleet(_SETUP, profile, PrefixHashes(64)).prefills["prefill-0"].store
    hashes = [bytes([i]) * 16 for i in range(20)]
    store.blocks.free(store.restore(hashes))
    assert store.num_fetchable(hashes) == store.blocks.match_reusable(hashes) == 20
    store.blocks.check_integrity()


@pytest.mark.parametrize(("profile", "host_tokens"), [(_STATES, 0), (_STATES, 65_536), (_WINDOWS, 0)])
def test_nothing_is_lost_when_pools_are_full_and_replicas_leave(profile: Profile, host_tokens: int) -> None:
    draw, trace = random.Random(5), list[TraceRequest]()
    for number in range(40):
        ids = (draw.randrange(3), *range(10 + 10 * draw.randrange(6), 10 + 70)[: draw.randint(1, 6)])
        trace.append(replace(_ask(number, ids, 512 * len(ids) - draw.randrange(64), 150), arrival_s=number * 0.05))
    setup = replace(
        _SETUP, num_prefill=2, num_decode=3, kv_tokens=16_384, host_tokens=host_tokens, prefill_batch_tokens=1024
    )
    fleet = Fleet(setup, profile, PrefixHashes(64))
    replicas = [*fleet.prefills.values(), *fleet.decodes.values()]
    for role in (Role.DECODE, Role.PREFILL):
        fleet.clock.at(1.5, lambda role=role: fleet.retire(role, lambda: None))
    fleet.run(trace)
    assert all(flight.ended_at for flight in fleet.flights) and fleet.fetched_bytes > 0
    assert any(flight.num_cached for flight in fleet.flights)
    for replica in replicas:
        blocks = replica.store.blocks
        blocks.check_integrity()
        assert blocks.num_usable == blocks.num_blocks
        assert blocks.states is None or blocks.states.num_available == blocks.states.num_slots
        assert blocks.windows is None or blocks.windows.num_reserved == 0

"""Stateful test of the router's serving core under random faults.

Under any sequence of kills, moves, rejections, delays and copies, each choice gets the model's tokens once, in order,
with one end. A request fails only if no replica could have answered it, or if its deadline has passed. At the end, no
leases, streams, reservations or tasks are left.
"""

from __future__ import annotations

from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.types.request import Role
from tests.router.serving.fake_worker import FakeWorker
from tests.router.serving.serving_model import Client, World
from tests.router.serving.virtual_time import VirtualTimeLoop, pass_time

_RANDOM = st.randoms(use_true_random=False)


class Serving(RuleBasedStateMachine):
    """State machine of clients, time and faults."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()

    @initialize(
        random=_RANDOM,
        num_prefill=st.integers(0, 2),
        num_decode=st.integers(1, 3),
        local_decode_share=st.sampled_from([0.0, 0.5]),
    )
    def deploy(self, random: Random, num_prefill: int, num_decode: int, local_decode_share: float) -> None:
        async def make() -> None:
            self.world = World(random)
            self.world.local_decode_share = local_decode_share
            for role, number in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
                for _ in range(number):
                    self.world.add(role)

        self.do(make())
        self.pass_time(0.1)

    @rule(
        num_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        max_tokens=st.sampled_from([1, 30, 300]),
        num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def ask(self, num_tokens: int, n: int, max_tokens: int, num_prompt_logprobs: int | None) -> None:
        self.do(self._ask(num_tokens=num_tokens, n=n, max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs))

    @rule(num_tokens=st.integers(1, 12), deadline_s=st.sampled_from([0.01, 0.3, 3.0]))
    def ask_for_soon(self, num_tokens: int, deadline_s: float) -> None:
        self.do(self._ask(num_tokens=num_tokens, n=1, max_tokens=300, deadline_s=deadline_s))

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.7]))
    def pass_time(self, seconds: float) -> None:
        self.do(pass_time(seconds))

    @rule()
    def pass_much_time(self) -> None:
        self.do(pass_time(4.0))

    @precondition(lambda self: self._asking())
    @rule(random=_RANDOM)
    def stop_a_choice(self, random: Random) -> None:
        client = random.choice(self._asking())
        self.do(self.world.stop(client, random.choice(client.request.choices)))

    @precondition(lambda self: self._asking())
    @rule(random=_RANDOM)
    def cancel(self, random: Random) -> None:
        self.world.cancel(random.choice(self._asking()))
        self.pass_time(0.0)

    @rule(role=st.sampled_from(Role))
    def add(self, role: Role) -> None:
        if len(self._well(role)) < 4:
            self.do(self._add(role))

    @precondition(lambda self: self._well())
    @rule(random=_RANDOM, how=st.sampled_from(["kill", "fall_silent", "drain", "drain"]))
    def lose(self, random: Random, how: str) -> None:
        worker = random.choice(self._well())
        self.do(self._to(worker, how))

    @precondition(lambda self: self._well())
    @rule(random=_RANDOM, how=st.sampled_from(["refuse", "slow", "repeat", "lose"]))
    def disturb(self, random: Random, how: str) -> None:
        worker = random.choice(self._well())
        worker.num_refusals += how == "refuse"
        worker.is_slow ^= how == "slow"
        worker.repeats |= how == "repeat"
        worker.loses |= how == "lose"

    @precondition(lambda self: self._lost())
    @rule(random=_RANDOM)
    def forget(self, random: Random) -> None:
        self.do(self._forget(random.choice(self._lost()).name))

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                try:
                    self.do(self.world.settle())
                    self.do(self._check_empty())
                finally:
                    self.do(self.world.close())
        finally:
            self.loop.close()

    def do(self, work: Any) -> None:
        self.loop.run_until_complete(work)

    async def _ask(self, **asked: Any) -> None:
        self.world.ask(**asked)

    async def _add(self, role: Role) -> None:
        self.world.add(role)

    async def _to(self, worker: FakeWorker, how: str) -> None:
        getattr(worker, how)()

    async def _forget(self, name: str) -> None:
        self.world.remove(name)

    async def _check_empty(self) -> None:
        self.world.check_empty()

    def _asking(self) -> list[Client]:
        return [client for client in self.world.clients if not client.is_over]

    def _well(self, role: Role | None = None) -> list[FakeWorker]:
        return [w for w in self.world.workers.values() if w.is_well and (role is None or w.role is role)]

    def _lost(self) -> list[FakeWorker]:
        known = [self.world.workers[replica.id] for replica in self.world.replicas if not replica.is_alive]
        return [worker for worker in known if not worker.is_well]


SETTINGS = settings(suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.timeout(300)  # about 15 s of computing on an idle machine
def test_every_choice_gets_its_tokens_despite_faults() -> None:
    run_state_machine_as_test(Serving, settings=settings(SETTINGS, max_examples=15, stateful_step_count=40))


@pytest.mark.slow
def test_every_choice_gets_its_tokens_despite_faults_for_long() -> None:
    run_state_machine_as_test(Serving, settings=settings(SETTINGS, max_examples=3000, stateful_step_count=80))

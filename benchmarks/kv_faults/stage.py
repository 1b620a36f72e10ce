"""Deployment of real processes on this machine for the fault cases, with checks of its answers and blocks."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kv_faults.hand import Fill, HandRouter, HeldRequest
from benchmarks.kv_faults.link import DAMAGING_LINK
from benchmarks.kv_faults.names import CaseOutcome
from benchmarks.kv_faults.stranger import Stranger
from core.model import config as model_config
from core.types.errors import ClusterError
from core.types.handoff import Handoff
from core.types.request import Role, Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from router.routing.candidates import CandidateReplica, Option, RoutingRequest
from tests.support.local_cluster import LocalCluster, LocalReplica, local_cluster
from tests.support.rank_in_process import Fault

PROMPT = 70  # tokens of a prompt under test
_ANSWER = 24
_OTHERS = 6  # prompts of five blocks each
# Blocks of these prompts and of one more, with a block for its answer.
_BLOCKS = 36
# Prompts that a case may need.
_STOCK = _OTHERS + 3
_DEADLINE_S = 60.0
_BLOCKS_BACK_S = 8.0  # as in chaos
_LOOK_S = 0.05


class DirectedPolicy:
    """Policy that routes a prompt where its case directs it, and others to the available replicas."""

    def __init__(self) -> None:
        self.routes: dict[int, list[Option]] = {}  # by the prompt's length

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        there = {view.replica for view in (*prefills, *decodes)}
        directed = [way for way in self.routes.get(demand.num_tokens, ()) if {way.prefill, way.decode} <= there]
        return directed or [Option(prefill=p.replica, decode=d.replica) for p in prefills for d in decodes]


class Stage:
    """One prefill and one decode replica, to which cases may add others. Every request has exactly one correct answer.

    The correct answers come from a single process without transfers.
    """

    def __init__(self, cluster: LocalCluster, policy: DirectedPolicy, runner: ModelRunner, hand: HandRouter) -> None:
        self.cluster = cluster
        self.policy = policy
        self.hand = hand
        self.pending_peer = Stranger(cluster, runner.layout)
        self.outcome = CaseOutcome("", "")
        self.greedy = Sampling(max_tokens=_ANSWER, temperature=0.0)
        self._runner = runner
        self._random = random.Random(20)
        self.killed: list[LocalReplica] = []  # on purpose
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._stock: list[list[int]] = []
        self._num_asked = 0

    @property
    def prefill(self) -> LocalReplica:
        return self._living(Role.PREFILL)

    @property
    def decode(self) -> LocalReplica:
        return self._living(Role.DECODE)

    async def begin(self, case: str) -> CaseOutcome:
        """Compute correct answers in advance, so that no lease runs meanwhile; then start counting for this case."""
        while len(self._stock) < _STOCK:
            self._stock.append(await self._draw(PROMPT))
        self.outcome = CaseOutcome(case, "")
        return self.outcome

    async def prompt(self, length: int = PROMPT) -> list[int]:
        """Return an unused prompt with a unique answer."""
        return self._stock.pop() if self._stock and length == PROMPT else await self._draw(length)

    async def _draw(self, length: int) -> list[int]:
        while True:
            drawn = self._random.choices(range(3, self._runner.config.vocab_size), k=length)
            if await self._note(drawn):
                return drawn

    # Requests, whose answers are checked.

    async def ask(self, prompt: list[int], *, salt: str = "") -> list[int]:
        """Send a prompt through the router, and count its answer."""
        self._num_asked += 1
        try:
            async with asyncio.timeout(_DEADLINE_S):
                answer = await self.cluster.generate(prompt, self.greedy, id=f"asked-{self._num_asked}", salt=salt)
        except TimeoutError:
            self.outcome.num_hung += 1
            return []
        except ClusterError as error:
            self.outcome.num_failed += 1
            self.outcome.seen = self.outcome.seen or str(error)
            return []
        self.count(prompt, answer.ids)
        return answer.ids

    async def fill_up(self) -> list[HeldRequest]:
        """Hold requests that take all blocks but one prompt's and one more, so that the next request gets those."""
        return [await self.hold() for _ in range(_OTHERS)]

    async def newcomer(self) -> list[int]:
        """Send a new request. Its KV stays in the decode replica's cache."""
        prompt = await self.prompt()
        await self.ask(prompt)
        return prompt

    async def again(self, prompt: list[int]) -> None:
        """Continue a newcomer's answer, reading its cached KV."""
        longer = [*prompt, *self._answers[tuple(prompt)]]
        await self._note(longer)
        await self.ask(longer)

    async def end(self, held: HeldRequest) -> None:
        """Fill a ticket correctly, as the router would after a failure, and check the answer."""
        epoch = max([held.handoff.epoch, *held.first]) + 1
        await self.hand.fill(held, self.prefill, replace(held.handoff, epoch=epoch))
        await self.ended(held)

    async def ended(self, held: HeldRequest) -> None:
        assert held.lease
        done, _ = await asyncio.wait({held.lease}, timeout=_DEADLINE_S)
        if not done:
            self.outcome.num_hung += 1
        elif not held.error:
            self.count(list(held.request.token_ids), held.answer)
        else:
            self.outcome.num_failed += 1
            self.outcome.seen = self.outcome.seen or held.error

    async def give_up(self, *held: HeldRequest) -> None:
        """End these leases, and wait until they have ended."""
        for one in held:
            one.give_up()
            assert one.lease
            await asyncio.wait({one.lease})

    def count(self, prompt: list[int], answer: list[int]) -> None:
        self.outcome.num_answers += 1
        right = self._answers[tuple(prompt)]
        if answer != right:
            self.outcome.num_wrong += 1
            self.outcome.differs = f"{answer} instead of {right}"
            self.outcome.num_foreign += answer in self._answers.values()

    async def strike(self, held: HeldRequest, **changes: Any) -> Fill:
        """Fill a ticket with some fields changed, and record the result in the case's outcome."""
        fill = await self.hand.fill(held, self.prefill, replace(held.handoff, **changes))
        self.outcome.seen = fill.error or "answered"
        return fill

    async def hold(self, prompt: list[int] | None = None, *, decode: LocalReplica | None = None) -> HeldRequest:
        return await self.hand.hold(prompt or await self.prompt(), decode or self.decode)

    def ticket(self, held: HeldRequest, **changes: Any) -> Handoff:
        return replace(held.handoff, **changes)

    # Targets of faults.

    async def doomed(self, role: Role, *faults: Fault) -> LocalReplica:
        return await self.cluster.add(role, *faults)

    def direct(self, prompt: list[int], *routes: tuple[LocalReplica, LocalReplica], **fetch: Any) -> None:
        self.policy.routes[len(prompt)] = [Option(prefill=p.id, decode=d.id, **fetch) for p, d in routes]

    async def removed(self, replica: LocalReplica) -> None:
        """Stop a replica that is no longer needed."""
        for rank in replica.ranks:
            await asyncio.to_thread(rank.stop)
        pool = next(pool for pool in self.cluster.pools.values() if replica in pool)
        pool.remove(replica)

    async def settle(self, *, within_s: float = _BLOCKS_BACK_S) -> None:
        """Wait until all live replicas have freed their blocks."""
        begin, replicas = time.monotonic(), [replica for pool in self.cluster.pools.values() for replica in pool]
        self.outcome.num_dead = sum(not replica.is_alive and replica not in self.killed for replica in replicas)
        while (num_lost := sum(map(_held, self._alive()))) and time.monotonic() < begin + within_s:
            await asyncio.sleep(_LOOK_S)
        self.outcome.num_lost, self.outcome.back_s = num_lost, round(time.monotonic() - begin, 2)

    async def _note(self, prompt: list[int]) -> bool:
        """Compute the correct answer. Returns False if another prompt has the same one.

        Runs in a thread, because peers need heartbeats from the event loop.
        """
        [tokens] = await asyncio.to_thread(generate, self._runner, [prompt], self.greedy)
        answer = [token.token_id for token in tokens]
        is_new = answer not in self._answers.values()
        self._answers[tuple(prompt)] = answer
        return is_new

    def _alive(self) -> list[LocalReplica]:
        return [replica for pool in self.cluster.pools.values() for replica in pool if replica.is_alive]

    def _living(self, role: Role) -> LocalReplica:
        return self.cluster.pools[role][0]


def _held(replica: LocalReplica) -> int:
    """Return the number of blocks that an idle replica still holds."""
    blocks = replica.blocks
    return blocks["total"] - blocks["free"] - blocks["cached"]


@asynccontextmanager
async def stage(model_dir: Path, redis_url: str, *, lease_s: float) -> AsyncIterator[Stage]:
    """Deploy the stage. lease_s: lease of a ticket. The decode replica has so few blocks that each is reused soon."""
    policy, config = DirectedPolicy(), model_config.load(model_dir)
    block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * 16
    pool = {"kv_memory_gib": (_BLOCKS + 0.5) * block_bytes / 2**30, "resources": {"cpus": 1}}
    tree: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw", "host_link": DAMAGING_LINK},
        "prefill": {**pool, "max_batch_tokens": 32},
        "decode": pool,
        "router": {"max_local_prefill": 0},
        "timeouts": {"handoff_s": lease_s},
    }
    runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1))
    async with local_cluster(model_dir, redis_url, processes=True, policy=policy, **tree) as cluster:
        sampling = Sampling(max_tokens=_ANSWER, temperature=0.0)
        async with HandRouter(cluster, sampling, deadline_s=_DEADLINE_S) as hand:
            yield Stage(cluster, policy, runner, hand)


def pause(replica: LocalReplica) -> None:
    replica.send(signal.SIGSTOP)


def resume(replica: LocalReplica) -> None:
    replica.send(signal.SIGCONT)

"""Router core on top of fake workers, with clients that know the expected tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from weakref import ref

from core.index.membership import Member
from core.types.errors import CapacityError, ClusterError, DeadlineExceeded
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import Role, Sampling, SequenceRequest
from router.generation import Arrived, Generation
from router.routing.chooser import Chooser
from router.routing.policies import CostPolicy
from router.serving.core import RouterCore
from router.serving.replicas import Replicas
from router.telemetry.metrics import Metrics
from tests.router.serving.fake_worker import MAX_CONTEXT, VOCAB_SIZE, FakeWorker, next_token, prompt_logprobs_of
from tests.router.serving.virtual_time import pass_time

_BLOCK = 4
_STOP_TOKENS = (7,)
_ENOUGH_BLOWS = 5  # as router.serving.core._MAX_FRUITLESS
QUEUE_S = 1_000.0


@dataclass(eq=False)
class Client:
    """Request with its progress and outcome."""

    request: SequenceRequest
    expected: dict[int, list[int]]
    began_at: float
    received: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    stopped: dict[int, float] = field(default_factory=dict)  # time of the stop
    error: ClusterError | None = None
    usable: frozenset[str] = frozenset()  # decode replicas known to the router when the request failed
    was_cancelled: bool = False
    generation: Generation | None = None
    task: asyncio.Task[None] | None = None
    random: Random | None = None  # decides when it reads slowly; None: never

    @property
    def is_over(self) -> bool:
        assert self.task
        return self.task.done()

    async def run(self, core: RouterCore, replicas: Replicas) -> None:
        try:
            async with core.start(self.request) as self.generation:
                async for arrived in self.generation:
                    self._take_all(arrived)
                    if self.random and self.random.random() < 0.2:  # a slow reader
                        await pass_time(self.random.choice([0.0, 0.01, 0.1]))
        except ClusterError as error:
            self.error = error
            self.usable = frozenset(replica.id for replica in replicas.usable(Role.DECODE))

    def _take_all(self, arrived: Arrived) -> None:
        assert self.generation
        self._check_prompt_logprobs(self.generation)
        for choice, tokens in arrived.items():
            for token in tokens:
                self._take(choice, token.token_id, is_last=token.finish_reason is not None)

    def _check_prompt_logprobs(self, generation: Generation) -> None:
        actual, expected = generation.prompt_logprobs, prompt_logprobs_of(self.request)
        assert (actual is None) == (expected is None), (
            f"{self.request.id}: tokens before the log-probabilities of its prompt"
        )
        if actual and expected:
            for column, expected_column in zip(actual.columns, expected.columns, strict=True):
                assert column.tolist() == expected_column.tolist(), (
                    f"{self.request.id}: its prompt has {expected_column}, not {column}"
                )

    def _take(self, choice: int, token_id: int, *, is_last: bool) -> None:
        tokens, expected = self.received.setdefault(choice, []), self.expected[choice]
        assert choice not in self.finished, f"{self.request.id}: choice {choice} continues after its end"
        tokens.append(token_id)
        assert tokens == expected[: len(tokens)], f"{self.request.id}: choice {choice} got {tokens}, not {expected}"
        assert is_last == (len(tokens) == len(expected)), f"{self.request.id}: choice {choice} ends at the wrong token"
        if is_last:
            self.finished.add(choice)


class World:
    """Simulated cluster with its clients. random: source of all durations."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.workers: dict[str, FakeWorker] = {}
        self.clients: list[Client] = []
        self.born_at: dict[str, float] = {}
        self.tenant_share = 1.0
        self.answers_overflow = True  # applies to prefill replicas added from now on
        self.local_decode_share = 0.0  # applies to prefill replicas added from now on
        self._gone: list[FakeWorker] = []
        self._num_made = 0
        self._loop = asyncio.get_running_loop()
        self.replicas = Replicas(lambda member: self.workers[member.replica])
        self.metrics = Metrics()
        self.core = RouterCore(
            self.replicas,
            Chooser(CostPolicy(prefix_fetches=True), max_local_tokens=2),
            model="model",
            block_size=_BLOCK,
            vocab_size=VOCAB_SIZE,
            queue_s=QUEUE_S,
            max_waiting=1000,
            metrics=self.metrics,
            tenant_share=lambda: self.tenant_share,
        )
        self._loops = [
            asyncio.create_task(self.core.rebalance_forever()),
            asyncio.create_task(self.core.back_up_forever(every=4)),
        ]

    # Events

    def add(
        self,
        role: Role,
        *,
        max_tokens: int = MAX_CONTEXT,
        announced: int | None = None,
        has_states: bool = False,
        layout: str = "",
    ) -> FakeWorker:
        """max_tokens: of a sequence. announced: the same in its member record, if different."""
        name = f"{role}-{self._num_made}"
        self._num_made += 1
        worker = self.workers[name] = FakeWorker(name, role, self.workers, self.random)
        worker.max_tokens = max_tokens
        self.born_at[name] = self._loop.time()
        member = Member(
            replica=name,
            role=role,
            address=name,
            frames_address=name,
            layout=layout,
            num_blocks=1000 if max_tokens == MAX_CONTEXT else max_tokens // _BLOCK,
            block_size=_BLOCK,
            bytes_per_token=1,
            max_tokens=announced or max_tokens,
            max_running=6,
            local_decode_share=self.local_decode_share if role is Role.PREFILL else 0.0,
            answers_overflow=self.answers_overflow,
            state_bytes=int(has_states),
        )
        self.replicas.add(member)
        return worker

    def remove(self, name: str) -> None:
        """Remove a worker from the membership."""
        self.replicas.remove(name)
        self._gone.append(self.workers[name])

    def ask(
        self,
        *,
        num_tokens: int,
        n: int,
        max_tokens: int,
        deadline_s: float | None = None,
        num_prompt_logprobs: int | None = None,
        tenant: str = "",
        priority: int = 0,
    ) -> Client:
        number = len(self.clients)
        prompt = tuple(range(100 * number, 100 * number + num_tokens))
        request = SequenceRequest(
            id=f"r{number}",
            token_ids=prompt,
            num_prompt_tokens=num_tokens,
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=_STOP_TOKENS),
            choices=tuple(range(n)),
            deadline_s=deadline_s,
            num_prompt_logprobs=num_prompt_logprobs,
            tenant=tenant,
            priority=priority,
        )
        client = Client(
            request, {choice: _expected_tokens(request, choice) for choice in request.choices}, self._loop.time()
        )
        client.random = self.random.choice([None, self.random])
        client.task = asyncio.create_task(client.run(self.core, self.replicas))
        self.clients.append(client)
        return client

    async def serve(self, request: SequenceRequest) -> int:
        """Serve a request without a client; return the number of its first choice's tokens."""
        async with self.core.start(request) as generation:
            return sum([len(arrived.get(0, ())) async for arrived in generation])

    def cancel(self, client: Client) -> None:
        assert client.task
        client.was_cancelled = True
        client.task.cancel()

    async def stop(self, client: Client, choice: int) -> None:
        if client.generation and not client.is_over:
            await client.generation.stop(choice)
            client.stopped[choice] = self._loop.time()

    async def settle(self) -> None:
        """Add missing replicas, stop all faults, and let every request end."""
        for worker in self.workers.values():
            worker.num_refusals, worker.is_slow, worker.loses, worker.repeats = 0, False, False, False
        for name in [replica.id for replica in self.replicas if not self.workers[replica.id].is_well]:
            self.remove(name)
        for role in Role:
            for _ in range(2):
                self.add(role)
        for _ in range(60):
            if all(client.is_over for client in self.clients):
                break
            await pass_time(10)
        await pass_time(15)  # unanswered copies and calls time out

    # Invariants

    def check(self) -> None:
        """Check the invariants that always hold."""
        for worker in self.workers.values():
            assert not worker.broken, worker.broken
        for client in self.clients:
            if client.is_over and client.task and not client.was_cancelled:
                client.task.result()
                self._check_answer(client)
            for choice, at in client.stopped.items():
                if self._loop.time() - at > 0.5:
                    running = [w.name for w in self._well() if (client.request.id, choice) in w.running()]
                    assert not running, f"{client.request.id}: choice {choice} was stopped, and runs on {running}"

    def check_empty(self) -> None:
        """Check that no state is left after `settle`."""
        self.check()
        assert all(client.is_over for client in self.clients), "a request that never ends"
        assert self.core.num_running == 0
        assert not self.core.admission.held, f"{self.core.admission.held} are still held"
        for replica in self.replicas:
            reserved = replica.pending_tokens, replica.num_requests, replica.promised_blocks, replica.promised_streams
            assert reserved == (0, 0, 0, 0), f"{replica.id}: {reserved} still reserved"
            assert replica.num_subscribed == 0, f"{replica.id}: a stream is still subscribed"
        for worker in self._well():
            assert worker.num_held() == 0, f"{worker.name}: an open call is left"
        for client in self.clients:
            tokens = [*client.request.token_ids, *client.received.get(0, [])]
            hashes = block_hashes(root_hash("model"), tokens, block_size=_BLOCK)
            assert not self.replicas.index.depths(hashes), f"{client.request.id}: a prefix that is still expected"
        left = {name for task in asyncio.all_tasks() if (name := _name(task)).split(".")[0] in _REQUEST_TYPES}
        assert not left, f"tasks without a request: {left}"

    def check_forgotten(self) -> None:
        """Check that served requests are freed without the garbage collector, hence without reference cycles.

        Call after `check_empty`.
        """
        served = [(client.request.id, ref(client.generation.route)) for client in self.clients if client.generation]
        for client in self.clients:
            client.task = client.generation = client.error = None
        kept = [id for id, route in served if route() is not None]
        assert not kept, f"what served {kept} waits for the collector of circles"

    async def close(self) -> None:
        for client in self.clients:
            if client.task:
                client.task.cancel()
        for task in self._loops:
            task.cancel()
        tasks = [client.task for client in self.clients if client.task]
        await asyncio.gather(*self._loops, *tasks, return_exceptions=True)
        await self.replicas.close()
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))

    def _well(self) -> list[FakeWorker]:
        return [worker for worker in self.workers.values() if worker.is_well]

    def _check_answer(self, client: Client) -> None:
        if client.error is None:
            expected_column = set(client.request.choices) - client.stopped.keys()
            assert expected_column <= client.finished, (
                f"{client.request.id}: {expected_column - client.finished} have no end"
            )
        elif isinstance(client.error, DeadlineExceeded):
            assert client.request.deadline_s is not None, client.error
        elif not (isinstance(client.error, CapacityError) and client.request.deadline_s is not None):
            assert self._could_not_be_served(client), f"{client.request.id} failed without need: {client.error}"

    def _could_not_be_served(self, client: Client) -> bool:
        """Return whether the failure was justified: too many failures, or rejection by all replicas known in time.

        A replica whose frames have just ended is unknown until its next frame.
        """
        id = client.request.id
        num_hits = sum(worker.hits.count(id) for worker in self.workers.values())
        if not isinstance(client.error, CapacityError):
            return num_hits >= _ENOUGH_BLOWS
        innocent = [
            worker
            for worker in self._well()
            if worker.name in client.usable and not worker.is_draining and self.born_at[worker.name] <= client.began_at
        ]
        # When a pair fails, both replicas are suspects.
        return num_hits >= min(_ENOUGH_BLOWS, len(innocent))


_REQUEST_TYPES = {"Relay", "Attempt", "Places", "FakeCall"}


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


def _expected_tokens(request: SequenceRequest, choice: int) -> list[int]:
    tokens: list[int] = list(request.token_ids)
    while True:
        token = next_token(request, choice, tokens)
        tokens.append(token.token_id)
        if token.finish_reason:
            return tokens[len(request.token_ids) :]

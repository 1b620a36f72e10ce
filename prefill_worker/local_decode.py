"""Local decodes: requests that a prefill replica decodes itself while decode replicas have no room.

Routers use the calls, frames and migrations of a decode replica. Only incoming KV is not supported: a local decode
computes its own prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from core.rpc import worker_pb2 as pb
from core.types.errors import CapacityError, ClusterError
from core.types.handoff import Handoff, HandoffKey, PrefixSource
from core.types.step_timing import PromptSpent
from core.wire.frames import StreamToken
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import StepResult
from engine.scheduler.step_commands import Orders
from kvtransfer.protocol.rank_transfer import Shipment
from worker.answers import Answers, RequestListener
from worker.migrations import MoveListener, Moves
from worker.replica_engine import EngineParts, ReplicaEngine


class LocalDecoding:
    """Local decodes of a prefill replica. Implements worker.answer_server.AnsweringWorker.

    All methods but the constructor run on the step thread.
    """

    def __init__(self, replica: ReplicaEngine, parts: EngineParts, *, is_taken: Callable[[HandoffKey], bool]) -> None:
        """is_taken: returns whether a handoff is or was used by another transfer."""
        self._replica = replica
        self._is_taken = is_taken
        engine, rate = replica.engine, replica.link_rate
        self._moves = Moves(parts.gang, parts.blocks, engine, rate, leave=lambda sequence: self._answers.end(sequence))
        self._answers = Answers(replica, self._moves)
        self._unseen: set[Prompt] = set()  # admission not yet reported

    def __len__(self) -> int:
        """Return the number of requests and of migrations that are still being sent."""
        return len(self._answers) + len(self._moves)

    # Requests from the event loop.

    def submit(
        self, prompt: Prompt, router: str, listener: RequestListener, *, prefix_source: PrefixSource | None = None
    ) -> None:
        """Queue a request. `prefix_source` may have a longer cached prefix. Errors go to the listener."""
        prompt.is_local_decode = True
        try:
            if prompt.is_received or not self._replica.engine.local_decodes.may_ever_fit(prompt):
                raise CapacityError(f"{prompt.id}: request exceeds the local decode capacity of this prefill replica")
            self._replica.add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(error)
            return
        self._answers.add(prompt, router, listener)
        self._unseen.add(prompt)

    def cancel(self, prompt: Prompt) -> None:
        """Free a request whose lease has ended. Does nothing if it is unknown."""
        self._unseen.discard(prompt)
        self._replica.totals.cancelled += self._answers.remove(prompt) is not None

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """Stop these choices."""
        self._answers.stop_streams(router, streams)

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Migrate a choice to the decode replica that issued the handoff, if that is faster than decoding it here."""
        if self._is_taken(handoff.key):
            listener.stays("handoff was used before")
        else:
            self._answers.migrate(router, stream, handoff, listener)

    def knows(self, key: HandoffKey) -> bool:
        """Return whether a handoff is or was used for a migration."""
        return self._moves.knows(key)

    def cancel_move(self, router: str, stream: int) -> None:
        """Cancel the migration of a choice."""
        self._answers.cancel_move(router, stream)

    def shipped(self, rank: int, shipment: Shipment) -> Shipment | None:
        """Record that one rank has ended its part. Returns the combined shipment once a choice has moved."""
        moved = self._moves.shipped(rank, shipment)
        self._replica.totals.migrations += moved is not None
        return moved

    # Steps.

    def begin_step(self, admitted: Seq[Prompt], orders: Orders) -> None:
        """Prepare a step. Called before its rows are chosen, because migrations may pause sequences."""
        self.computing(admitted)
        self._moves.add_to(orders)

    def computing(self, prompts: Iterable[Prompt]) -> None:
        """Report the admission of prompts, which have their blocks now."""
        for prompt in self._unseen.intersection(prompts) if self._unseen else ():
            self._unseen.remove(prompt)
            prompt.spent = PromptSpent(waited_s=self._replica.clock.waited_s(prompt))
            self._answers.listener(prompt).reserved(None, None, prompt.num_cached)

    def take(self, result: StepResult) -> None:
        """Distribute the results of a step."""
        local_decodes = [prefilled for prefilled in result.prefilled if prefilled.prompt.is_local_decode]
        self._answers.take(replace(result, prefilled=local_decodes))

    # Results for the event loop.

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        return self._answers.take_tokens()

    def add_to(self, status: pb.Status) -> None:
        """Add the fields by which routers decide whether to send another local decode."""
        engine = self._replica.engine
        running = engine.local_decodes.num_choices + self._moves.num_paused
        status.running += self._moves.num_paused
        if running or engine.local_decodes.num_waiting:
            status.local_decodes.running = running
            status.local_decodes.waiting = engine.local_decodes.num_waiting
            status.local_decodes.blocks = engine.local_decodes.num_blocks
            status.context_tokens = sum(len(sequence.tokens) for sequence in engine.decoding.running)
            status.decode_step_s = self._replica.pace.decode_step_s

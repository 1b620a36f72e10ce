"""The guests of a prefill replica: answers that it computes and finishes itself while decode replicas have no room.

For a router it is a decode replica that computes the prompt, too: the same calls, the same frames, the same moves. What
is not there is a way in for KV: nothing is shipped to a guest.
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
    """Implements worker.answer_server.AnsweringWorker. Everything but the constructor runs on the step
    thread."""

    def __init__(self, replica: ReplicaEngine, parts: EngineParts, *, is_taken: Callable[[HandoffKey], bool]) -> None:
        """is_taken: whether a handoff serves, or has served, for something else."""
        self._replica = replica
        self._is_taken = is_taken
        engine, rate = replica.engine, replica.link_rate
        self._moves = Moves(parts.gang, parts.blocks, engine, rate, leave=lambda sequence: self._answers.end(sequence))
        self._answers = Answers(replica, self._moves)
        self._unseen: set[Prompt] = set()  # of whose admission nobody has been told

    def __len__(self) -> int:
        """Requests that live here, and what is still being sent of those that have left."""
        return len(self._answers) + len(self._moves)

    # What the world asks for.

    def submit(
        self, prompt: Prompt, router: str, listener: RequestListener, *, prefix_source: PrefixSource | None = None
    ) -> None:
        """Queue a request, of whose prompt `prefix_source` may hold more than is here. An error goes to the
        listener."""
        prompt.is_local_decode = True
        try:
            if prompt.is_received or not self._replica.engine.local_decodes.may_ever_fit(prompt):
                raise CapacityError(f"{prompt.id}: this prefill replica has no room for an answer like that")
            self._replica.add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(error)
            return
        self._answers.add(prompt, router, listener)
        self._unseen.add(prompt)

    def cancel(self, prompt: Prompt) -> None:
        """The lease has ended: free everything. It may have ended by itself already."""
        self._unseen.discard(prompt)
        self._replica.totals.cancelled += self._answers.remove(prompt) is not None

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """These choices need no more tokens."""
        self._answers.stop_streams(router, streams)

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Ship a choice to the decode replica that has made this handoff, if it is worth it."""
        if self._is_taken(handoff.key):
            listener.stays("its handoff is under way already, or was")
        else:
            self._answers.migrate(router, stream, handoff, listener)

    def knows(self, key: HandoffKey) -> bool:
        """Whether a handoff serves, or has served, to move a choice."""
        return self._moves.knows(key)

    def keep(self, router: str, stream: int) -> None:
        """Nobody waits any more for this choice to be moved."""
        self._answers.keep(router, stream)

    def shipped(self, rank: int, shipment: Shipment) -> Shipment | None:
        """One of our ranks has nothing more to send for a handoff. The shipment of all, once a choice has moved."""
        moved = self._moves.shipped(rank, shipment)
        self._replica.totals.migrations += moved is not None
        return moved

    # The step.

    def begin_step(self, admitted: Seq[Prompt], orders: Orders) -> None:
        """Before the rows of a step are chosen: moves may take sequences out of it."""
        self.computing(admitted)
        self._moves.add_to(orders)

    def computing(self, prompts: Iterable[Prompt]) -> None:
        """These have their blocks."""
        for prompt in self._unseen.intersection(prompts) if self._unseen else ():
            self._unseen.remove(prompt)
            prompt.spent = PromptSpent(waited_s=self._replica.clock.waited_s(prompt))
            self._answers.listener(prompt).reserved(None, None, prompt.num_cached)

    def take(self, result: StepResult) -> None:
        """Hand on what came of a step."""
        local_decodes = [prefilled for prefilled in result.prefilled if prefilled.prompt.is_local_decode]
        self._answers.take(replace(result, prefilled=local_decodes))

    # What the world is told.

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        return self._answers.take_tokens()

    def add_to(self, status: pb.Status) -> None:
        """What routers need to know before they send another one."""
        engine = self._replica.engine
        running = engine.local_decodes.num_choices + self._moves.num_paused
        status.running += self._moves.num_paused
        if running or engine.local_decodes.num_waiting:
            status.local_decodes.running = running
            status.local_decodes.waiting = engine.local_decodes.num_waiting
            status.local_decodes.blocks = engine.local_decodes.num_blocks
            status.context_tokens = sum(len(sequence.tokens) for sequence in engine.decoding.running)
            status.decode_step_s = self._replica.pace.decode_step_s

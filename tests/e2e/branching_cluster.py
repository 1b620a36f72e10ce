"""`cluster` command with forced branching drafts: forked rows in nearly every step, regardless of their cost."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cluster.cli.app import run
from cluster.control import desired_state
from core.types.launch import Launch

logger = logging.getLogger(__name__)

TORN = "a block table is torn"
_EVERY = 3  # tokens; at every third position the draft is wrong and a branch carries the right token


def make_rank(launch: Launch, **arguments: Any) -> Any:
    """Create a rank of a decode replica with forced branches, in a dedicated process."""
    import decode_worker.actor
    from engine.engine import Engine
    from engine.spec_decode.proposer import ModelProposer
    from engine.spec_decode.speculation import Speculation
    from engine.spec_decode.suffix import Corpus, Suffix
    from engine.timing.pace import Pace
    from tests.engine.spec_decode.proposers import Diverted

    def of(
        method: str,
        *,
        max_tokens: int,
        vocab_size: int,
        corpus: Corpus,
        models: Mapping[str, ModelProposer] = MappingProxyType({}),
    ) -> Speculation:
        looked_up = Diverted(Suffix(corpus), every=_EVERY, vocab_size=vocab_size)
        return Speculation({"suffix": looked_up}, models=models, max_tokens=max_tokens, vocab_size=vocab_size)

    def complete_and_look(self: Engine[Any], step: Any) -> Any:
        result = complete(self, step)
        if step.drafts:
            self.blocks.check_integrity()
            if torn := torn_blocks(list(self.decoding.running)):
                logger.error("%s: %s", TORN, torn)
        return result

    if (
        complete := Engine.complete
    ).__name__ != complete_and_look.__name__:  # a replica that switches its role is created twice
        Engine.complete = complete_and_look
    Speculation.of = of
    Pace.timing = None
    return decode_worker.actor.make_rank(launch, **arguments)


def torn_blocks(running: Sequence[Any]) -> list[int]:
    """Return the blocks that are still written to and shared with another table."""
    places = Counter(block for sequence in running for block in sequence.blocks)
    return [
        block
        for sequence in running
        for block in sequence.blocks[sequence.num_computed // sequence.block_size :]
        if places[block] > 1
    ]


if __name__ == "__main__":
    desired_state.Parts = functools.partial(desired_state.Parts, decode="tests.e2e.branching_cluster:make_rank")  # type: ignore
    sys.exit(run(sys.argv[1:]))

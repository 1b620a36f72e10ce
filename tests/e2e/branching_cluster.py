"""The `cluster` command of deployments whose decode replicas draft whatever is guessed, and whose drafts branch where
they would have been right: forked rows in nearly every step, where prices would choose none."""

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
_EVERY = 3  # tokens: at that place a draft says something else than it would, and a branch goes on as it would have


def make_rank(launch: Launch, **arguments: Any) -> Any:
    """Of a decode replica, in a process that does this and nothing else."""
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

    if (complete := Engine.complete).__name__ != complete_and_look.__name__:  # a switched replica is made twice
        Engine.complete = complete_and_look
    Speculation.of = of
    Pace.timing = None
    return decode_worker.actor.make_rank(launch, **arguments)


def torn_blocks(running: Sequence[Any]) -> list[int]:
    """Blocks that are written to yet, and stand at another place of any table, too."""
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

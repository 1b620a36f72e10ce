"""The smallest engine: one process, no scheduler to speak of. It is what a cluster's answers are compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from cluster.words.errors import ContextLengthExceeded
from cluster.words.request import SampledToken, Sampling, SequenceRequest
from engine.batch.batch import Batch
from engine.kv.block_manager import BlockManager
from engine.runner import ModelRunner
from engine.sampler import SamplingRow, sample
from engine.sequence import Sequence


def generate(
    runner: ModelRunner,
    prompts: Seq[Seq[int]],
    samplings: Sampling | Seq[Sampling],
    *,
    max_batch_tokens: int = 512,
    max_running: int = 64,
) -> list[list[SampledToken]]:
    """Continue each prompt (token ids) until it finishes; the last token of each has its finish_reason.

    Prompts are computed in chunks beside running sequences, `max_batch_tokens` a step. Prefixes are not shared. Under
    tensor parallelism every rank calls this with the same arguments and gets the same tokens.
    """
    if isinstance(samplings, Sampling):
        samplings = [samplings] * len(prompts)
    blocks = BlockManager(runner.pool.num_blocks)
    sequences = [_sequence(runner, i, p, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    outputs: dict[Sequence, list[SampledToken]] = {sequence: [] for sequence in sequences}
    waiting, running = deque(sequences), list[Sequence]()
    while waiting or running:
        while waiting and len(running) < max_running and _admit(waiting[0], blocks):
            running.append(waiting.popleft())
        for sequence, token in _step(runner, blocks, running, max_batch_tokens):
            outputs[sequence].append(token)
            if token.finish_reason:
                running.remove(sequence)
                sequence.release(blocks)
    blocks.check_integrity()
    return list(outputs.values())


def _sequence(runner: ModelRunner, number: int, prompt: Seq[int], sampling: Sampling) -> Sequence:
    request = SequenceRequest(id=str(number), token_ids=tuple(prompt), num_prompt_tokens=len(prompt), sampling=sampling)
    layout = runner.layout
    sequence = Sequence(
        request, 0, model=layout.model, block_size=layout.block_size, max_context=runner.config.max_context
    )
    if sequence.num_blocks_for(_longest(sequence)) > runner.pool.num_blocks:
        raise ContextLengthExceeded(f"prompt {number} and its output do not fit into the pool")
    return sequence


def _longest(sequence: Sequence) -> int:
    return min(len(sequence.tokens) + sequence.request.sampling.max_tokens, sequence.max_context)


def _admit(sequence: Sequence, blocks: BlockManager) -> bool:
    """Set aside all that the sequence can come to need, so that it never has to wait again."""
    taken = blocks.allocate([], sequence.num_blocks_for(_longest(sequence)))
    if taken is None:
        return False
    sequence.blocks, _ = taken
    return True


def _step(
    runner: ModelRunner, blocks: BlockManager, running: list[Sequence], budget: int
) -> list[tuple[Sequence, SampledToken]]:
    chosen: list[tuple[Sequence, int]] = []
    # Shortest first: decoding sequences lack one token each, and none of them waits behind a prompt.
    for sequence in sorted(running, key=lambda s: s.num_missing):
        if num_tokens := min(budget, sequence.num_missing):
            chosen.append((sequence, num_tokens))
            budget -= num_tokens
    rows = [sequence.row(num_tokens) for sequence, num_tokens in chosen]
    logits = runner.forward(Batch.of(rows, block_size=runner.layout.block_size))
    for sequence, num_tokens in chosen:
        sequence.computed(num_tokens, blocks)
    ready = [sequence for (sequence, _), row in zip(chosen, rows, strict=True) if row.wants_logits]
    sampled = sample(logits, [SamplingRow.of(sequence) for sequence in ready]) if ready else []
    return [(sequence, sequence.append(*token)) for sequence, token in zip(ready, sampled, strict=True)]

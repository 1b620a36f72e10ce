"""Single-process engine: the reference that cluster outputs are compared with."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from core.types.errors import ContextLengthExceeded
from core.types.request import SampledToken, Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence


def generate(
    runner: ModelRunner,
    prompts: Seq[Seq[int]],
    samplings: Sampling | Seq[Sampling],
    *,
    max_batch_tokens: int = 512,
    max_running: int = 64,
) -> list[list[SampledToken]]:
    """Continue each prompt (token ids) until it finishes; the last token of each has its finish_reason.

    Prefill is chunked and mixed with running sequences, up to `max_batch_tokens` per step. Prefixes are not shared.
    With tensor parallelism every rank calls this with the same arguments and gets the same tokens.
    """
    if isinstance(samplings, Sampling):
        samplings = [samplings] * len(prompts)
    config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=len(prompts))
    blocks = BlockManager(runner.pool.num_blocks, num_states=runner.pool.num_states)
    engine = Engine(runner, sample, blocks, config, block_size=runner.layout.block_size)
    outputs: dict[Sequence, list[SampledToken]] = {}
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        sequence = _sequence(runner, number, prompt, sampling)
        engine.add(Prompt(sequence))
        outputs[sequence] = []
    while (result := engine.step()).did_work:
        if result.failed:
            raise result.failed[0].failure
        for prefilled in result.prefilled:
            outputs[prefilled.prompt.sequence] += prefilled.tokens
        for sequence, token in result.sampled:
            outputs[sequence].append(token)
    blocks.check_integrity()
    return list(outputs.values())


def _sequence(runner: ModelRunner, number: int, prompt: Seq[int], sampling: Sampling) -> Sequence:
    request = SequenceRequest(
        id=str(number),
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        # Unique salt: prompts do not share prefixes.
        salt=str(number),
    )
    layout, max_context = runner.layout, runner.config.max_context
    sequence = Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=max_context)
    if sequence.num_blocks_for(min(len(prompt) + sampling.max_tokens, max_context)) > runner.pool.num_blocks:
        raise ContextLengthExceeded(f"prompt {number} and its output do not fit into the KV pool")
    return sequence

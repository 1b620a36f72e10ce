"""Engines in this process: the reference that cluster outputs are compared with, and engines for timing steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from core.types.errors import ContextLengthExceeded
from core.types.request import SampledToken, Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import Runner

# Maximum steps per measurement.
MOST_STEPS = 128


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
    engine = _engine(runner, runner, config)
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
    engine.blocks.check_integrity()
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


def decoding_engine(runner: ModelRunner, model: Runner[Tensor], *, batch: int, context: int) -> Engine[Tensor]:
    """Return an engine with `batch` running sequences of random prompts, each one token past its prefill.

    The pool has room for the steps of one measurement. `model` computes the steps.
    """
    engine = _engine(runner, model, SchedulerConfig(max_batch_tokens=context, max_running=batch, max_waiting=1))
    sequences = []
    # Prefill each prompt alone, in one step.
    for seed in range(batch):
        prompt = _random_prompt(runner, context, seed)
        engine.add(prompt)
        engine.step()
        engine.pause(prompt.sequence)
        sequences.append(prompt.sequence)
    for sequence in sequences:
        engine.resume(sequence)
    return engine


def prefilling_engine(runner: ModelRunner, num_tokens: int, *, max_batch_tokens: int) -> Engine[Tensor]:
    """Return an engine with one random prompt queued for prefill."""
    config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_running=1, max_waiting=1, decodes=False)
    engine = _engine(runner, runner, config)
    engine.add(_random_prompt(runner, num_tokens, 0))
    return engine


def _engine(runner: ModelRunner, model: Runner[Tensor], config: SchedulerConfig) -> Engine[Tensor]:
    return Engine(
        model,
        sample,
        BlockManager(runner.pool.num_blocks, num_states=runner.pool.num_states),
        config,
        block_size=runner.layout.block_size,
    )


def _random_prompt(runner: ModelRunner, num_tokens: int, seed: int) -> Prompt:
    token_ids = tuple(np.random.default_rng(seed).integers(0, runner.config.vocab_size, num_tokens).tolist())
    sampling = Sampling(temperature=0.0, max_tokens=MOST_STEPS + 3)
    request = SequenceRequest(id=str(seed), token_ids=token_ids, num_prompt_tokens=num_tokens, sampling=sampling)
    layout, limit = runner.layout, num_tokens + MOST_STEPS + 4
    return Prompt(Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=limit))

"""Engines filled with random prompts, for timing steps."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from core.types.request import Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import Runner

# Maximum steps per measurement.
MOST_STEPS = 128


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

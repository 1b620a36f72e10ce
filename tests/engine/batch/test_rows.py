"""What a row may ask for beside its next token: logits of several positions, an adapter, a mask."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from core.types.errors import RequestError
from core.types.request import Sampling, SequenceRequest
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from tests.engine.steps import VOCAB_SIZE, prompts, step
from tests.engine.tiny_models import MakeModel, MakeRunner


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_logits_of_several_positions_are_those_of_a_step_for_each(
    name: str, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    runner = make_runner(tiny_model(name)[0])
    first, second = prompts(20, 9)
    rows = [
        Row(token_ids=first[12:20], start=12, blocks=range(12), num_logits=5),
        Row(token_ids=second, start=0, blocks=range(12, 24), num_logits=0),
        Row(token_ids=first[11:12], start=11, blocks=range(24, 36), num_logits=1),
    ]
    step(runner, [first], [(0, 0, 12)])
    runner.pool.copy_block(0, 24)
    runner.pool.copy_block(1, 25)
    together = runner.forward(Batch.of(rows, block_size=8)).clone()
    one_by_one = [step(runner, [first], [(0, position, position + 1)])[0].clone() for position in range(11, 20)]
    assert together.shape == (6, VOCAB_SIZE)
    torch.testing.assert_close(together, torch.stack([*one_by_one[4:], one_by_one[0]]), atol=2e-4, rtol=1e-4)


class OneOf:
    """Implements TokenMask: now these, now those."""

    failure = ""

    def __init__(self, *allowed: Seq[int]) -> None:
        self._allowed = allowed

    def may_forbid(self, tokens: Seq[int], start: int, num_in_flight: int, /) -> bool:
        return True

    def allowed(self, tokens: Seq[int], start: int, /) -> NDArray[np.int32]:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
        bits[list(self._allowed[(len(tokens) - start) % len(self._allowed)])] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def only(self, tokens: Seq[int], start: int, /) -> int | None:
        allowed = self._allowed[(len(tokens) - start) % len(self._allowed)]
        return allowed[0] if len(allowed) == 1 else None

    def fork(self) -> OneOf:
        return self


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, max_tokens=9), Sampling(seed=5, max_tokens=9)])
def test_a_mask_restricts_what_a_sequence_says_and_nobody_else(
    sampling: Sampling, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    runner = make_runner(tiny_model("llama")[0])
    config = SchedulerConfig(max_batch_tokens=64, max_running=4, max_waiting=4)

    def said(mask: OneOf | None) -> list[list[int]]:
        engine = Engine(runner, sample, BlockManager(96), config, block_size=8)
        sequences = [_sequence(prompt, sampling) for prompt in prompts(10, 12)]
        sequences[0].sampling_row.mask = mask
        for sequence in sequences:
            engine.add(Prompt(sequence))
        while engine.step().did_work:
            pass
        return [sequence.tokens[sequence.request.num_prompt_tokens :] for sequence in sequences]

    free, masked = said(None), said(OneOf([3, 77], [5], list(range(100, VOCAB_SIZE))))
    assert len(masked[0]) == 9 and masked[1] == free[1]
    assert all(token in ([3, 77], [5], range(100, VOCAB_SIZE))[i % 3] for i, token in enumerate(masked[0]))
    assert said(OneOf(range(VOCAB_SIZE))) == free


def test_a_model_without_adapters_refuses_them(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("llama")[0])
    config = SchedulerConfig(max_batch_tokens=64, max_running=4, max_waiting=4)
    sequence = _sequence([1, 2, 3], Sampling(temperature=0.0), adapter="polite")
    engine = Engine(runner, sample, BlockManager(96), config, block_size=8)
    with pytest.raises(RequestError, match="the model has no adapter 'polite'"):
        engine.add(Prompt(sequence))
    assert engine.num_waiting == 0
    engine = Engine(runner, sample, BlockManager(96), config, block_size=8, adapters={"polite": 4})
    engine.add(Prompt(sequence))
    with pytest.raises(RequestError, match="the model has no adapter 4"):
        engine.step()


def _sequence(tokens: list[int], sampling: Sampling, *, adapter: str = "") -> Sequence:
    request = SequenceRequest(
        id="r", token_ids=tuple(tokens), num_prompt_tokens=len(tokens), sampling=sampling, adapter=adapter
    )
    return Sequence(request, 0, model="m", block_size=8, max_context=96)

"""Single-process engine: outputs do not depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.types.errors import ContextLengthExceeded
from core.types.request import FinishReason, SampledToken, Sampling
from engine.tools.offline import generate
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

GREEDY = Sampling(temperature=0.0, max_tokens=12)
MIXED = [
    GREEDY,
    Sampling(seed=1, max_tokens=9, num_logprobs=3),
    Sampling(seed=2, temperature=0.7, top_p=0.8, max_tokens=15),
    Sampling(seed=3, top_k=5, min_p=0.1, repetition_penalty=1.2, max_tokens=6),
]


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_equal_transformers(family: str, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, model = tiny_model(family)
    (prompt,) = prompts(20)
    (tokens,) = generate(make_runner(directory), [prompt], GREEDY)
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
    assert ids(tokens) == theirs[0, 20:].tolist()
    assert [token.finish_reason for token in tokens] == [None] * 11 + [FinishReason.LENGTH]


@pytest.mark.parametrize(
    "limits", [{"max_batch_tokens": 7}, {"max_running": 1}, {"max_running": 2, "max_batch_tokens": 16}]
)
def test_tokens_do_not_depend_on_batching(
    limits: dict[str, Any], tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    directory, _ = tiny_model("llama")
    token_ids = prompts(30, 3, 17, 8)
    alone = [generate(make_runner(directory), [p], s)[0] for p, s in zip(token_ids, MIXED, strict=True)]
    together = generate(make_runner(directory), token_ids, MIXED, **limits)
    assert [ids(tokens) for tokens in together] == [ids(tokens) for tokens in alone]
    assert [len(tokens) for tokens in together] == [12, 9, 15, 6]
    assert all(token.logprob and len(token.logprob.top) == 3 for token in together[1])


def test_small_pool_gives_the_same_tokens(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, _ = tiny_model("llama")
    token_ids = prompts(30, 30, 30)
    roomy = generate(make_runner(directory), token_ids, GREEDY)
    assert [ids(t) for t in generate(make_runner(directory, num_blocks=6), token_ids, GREEDY)] == [
        ids(t) for t in roomy
    ]
    with pytest.raises(ContextLengthExceeded):
        generate(make_runner(directory, num_blocks=5), token_ids, GREEDY)


def test_finish_reasons(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, _ = tiny_model("llama")
    runner = make_runner(directory)
    (prompt,) = prompts(20)
    (whole,) = generate(runner, [prompt], GREEDY)
    stop = whole[3].token_id
    first = ids(whole).index(stop)
    (stopped,) = generate(runner, [prompt], Sampling(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)))
    assert ids(stopped) == ids(whole)[: first + 1] and stopped[-1].finish_reason is FinishReason.STOP
    (late,) = generate(
        runner, [prompt], Sampling(temperature=0.0, max_tokens=12, stop_token_ids=(stop,), min_tokens=first + 2)
    )
    assert stop not in ids(late)[: first + 2]
    (until_full,) = generate(runner, prompts(125, vocab_size=VOCAB_SIZE), GREEDY)
    # The model's context is 128.
    assert len(until_full) == 3 and until_full[-1].finish_reason is FinishReason.LENGTH

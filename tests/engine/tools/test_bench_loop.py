"""Steps that are timed are steps: nothing has ended before the last of them."""

from __future__ import annotations

import pytest

from cluster.words.request import Sampling
from engine.speculation.speculation import Speculation
from engine.tools.bench_loop import running_engine
from engine.tools.random_models import random_runner

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_STEPS, _CONTEXT = 67, 32
_SMALL = {"vocab_size": 256, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_every_step_chooses_a_token_of_each_row(runs_ahead: bool, drafts: bool) -> None:
    changes = _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    runner = random_runner("llama-8b", num_blocks=64, device="cpu", dtype="float32", changes=changes)
    speculation = Speculation.of("ngram", max_tokens=0, vocab_size=256) if drafts else None
    engine, sequences = running_engine(
        runner, 2, _CONTEXT, Sampling(temperature=0.0), runs_ahead=runs_ahead, speculation=speculation
    )
    for _ in range(_NUM_STEPS):
        assert engine.step().did_work
    assert [len(sequence.tokens) for sequence in sequences] == [_CONTEXT + _NUM_STEPS] * 2

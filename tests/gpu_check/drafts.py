"""Cost of drafts beside a large model with random weights: python -m tests.gpu_check.drafts SHAPE

For a step that verifies drafts, device time relative to a step without. For an EAGLE-3 head of the model's size, which
is nearly never right, the whole overhead of a step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine.gpu_steps import BLOCK_SIZE, decode_batch, step_seconds
from benchmarks.engine.loop import running_engine
from benchmarks.engine.random_models import SHAPES, random_runner
from core.model.draft_heads import HeadsPlace
from core.types.request import Sampling
from engine.runner.runner import ModelRunner
from engine.spec_decode.draft_models.draft_model import HeadProposer
from engine.spec_decode.speculation import Speculation
from tests.engine.spec_decode.heads.head_files import write_eagle_beside
from tests.gpu_check.rows import tell

_BATCHES, _CONTEXT = (1, 8, 32), 2048
_DRAFTED, _ASKED = (1, 3, 7), 3  # tokens per row
_DRAFT_VOCAB = 32000
_NUM_STEPS = 25


def main() -> None:
    (shape,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        write_eagle_beside(SHAPES[shape], Path(directory), draft_vocab=_DRAFT_VOCAB, dtype=torch.bfloat16)
        runner = random_runner(
            shape,
            num_blocks=max(_BATCHES) * (_CONTEXT // BLOCK_SIZE + 16),
            recorded_rows=max(_BATCHES) * (1 + max(_DRAFTED)),
            heads=HeadsPlace("eagle", Path(directory)),
        )
    with torch.inference_mode():
        for batch in _BATCHES:
            plain_s = _forward_s(runner, batch, 1)
            tell(f"{batch} x {_CONTEXT}: a step of the device", plain_s * 1e3, "ms")
            for drafted in _DRAFTED:
                longer = _forward_s(runner, batch, 1 + drafted) / plain_s - 1
                tell(f"{batch} x {_CONTEXT}: longer with {drafted} drafted tokens a row", longer)
            plain_s, asking_s = (_step_s(runner, batch, asks=asks) for asks in (False, True))
            tell(f"{batch} x {_CONTEXT}: a step that waits", plain_s * 1e3, "ms")
            tell(f"{batch} x {_CONTEXT}: one that asks a head for {_ASKED} tokens a row", asking_s * 1e3, "ms")


def _forward_s(runner: ModelRunner, num_rows: int, num_tokens: int) -> float:
    batch = decode_batch(num_rows, num_tokens=num_tokens, context=_CONTEXT)
    return step_seconds(partial(runner.forward, batch))


def _step_s(runner: ModelRunner, num_rows: int, *, asks: bool) -> float:
    speculation = None
    if asks:
        heads = HeadProposer(runner)
        speculation = Speculation(
            {"eagle": heads},
            max_tokens=_ASKED,
            vocab_size=runner.config.vocab_size,
            backs_off=False,
        )
    engine, sequences = running_engine(runner, num_rows, _CONTEXT, Sampling(temperature=0.0), speculation=speculation)
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_NUM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    took_s = time.perf_counter() - begin
    assert all(sequence.finish_reason() is None for sequence in sequences), "some have ended before"
    return took_s / _NUM_STEPS


if __name__ == "__main__":
    main()

"""Steps, recorded or not, on a device whose streams are ordered by events only."""

from __future__ import annotations

from typing import Any

import pytest

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.cpu import library
from engine.runner import streams
from engine.runner.runner import ModelRunner
from tests.engine.fake_capture import FakeCapture
from tests.engine.tiny_models import MakeModel
from tests.support.fake_streams import FakeStreams


def races(tiny_model: MakeModel, **options: Any) -> list[str]:
    """Return the unordered accesses of recorded, replayed and plain steps, over blocks that a link's thread reads,
    too. options: of FakeCapture."""
    with pytest.MonkeyPatch.context() as patch:
        device = FakeStreams()
        patch.setattr(streams, "streams_of", device.streams_of)
        patch.setattr(library, "load_kernels", lambda: None)
        directory, _ = tiny_model("llama", num_hidden_layers=1)
        config = EngineConfig(
            model_dir=directory, dtype="float32", block_size=8, num_blocks=4, max_context=16, recorded_rows=2
        )
        with device.watched("compute"):
            runner = ModelRunner(config, capture=FakeCapture(device, **options))
            for start, count in ((0, 5), (5, 1), (6, 1)):
                rows = [Row(token_ids=[3] * count, start=start, blocks=[row], num_logits=1) for row in range(2)]
                runner.forward(Batch.of(rows, block_size=8)).argmax(dim=-1)
            computed = device.mark()
        with device.watched("link"):
            computed.hold_up()
            runner.pool.copy_out([0, 1])
        return device.races


def test_steps_are_in_order(tiny_model: MakeModel) -> None:
    assert races(tiny_model) == []


@pytest.mark.parametrize("fault", [{"replays_on": "another"}, {"waits": False}], ids=str)
def test_a_fault_is_found(fault: dict[str, Any], tiny_model: MakeModel) -> None:
    assert races(tiny_model, **fault)

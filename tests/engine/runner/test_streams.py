"""Steps, recorded or not, on a device whose streams are ordered by events only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.cpu import library
from engine.runner import streams
from engine.runner.runner import ModelRunner
from tests.engine.fake_capture import FakeCapture
from tests.engine.tiny_models import MakeModel
from tests.support.fake_streams import FakeStreams

Mutate = Callable[[pytest.MonkeyPatch, FakeStreams], FakeCapture]


def races(tiny_model: MakeModel, make_capture: Mutate) -> list[str]:
    """Return the unordered accesses of recorded, replayed and plain steps, over blocks that a link's thread reads,
    too."""
    with pytest.MonkeyPatch.context() as patch:
        device = FakeStreams()
        patch.setattr(streams, "streams_of", device.streams_of)
        patch.setattr(library, "load_kernels", lambda: None)
        directory, _ = tiny_model("llama", num_hidden_layers=1)
        config = EngineConfig(
            model_dir=directory, dtype="float32", block_size=8, num_blocks=4, max_context=16, recorded_rows=2
        )
        with device.watched("compute"):
            runner = ModelRunner(config, capture=make_capture(patch, device))
            for start, count in ((0, 5), (5, 1), (6, 1)):
                rows = [Row(token_ids=[3] * count, start=start, blocks=[row], num_logits=1) for row in range(2)]
                runner.forward(Batch.of(rows, block_size=8)).argmax(dim=-1)
            computed = device.mark()
        with device.watched("link"):
            computed.hold_up()
            runner.pool.copy_out([0, 1])
        return device.races


def test_steps_are_in_order(tiny_model: MakeModel) -> None:
    assert races(tiny_model, lambda patch, device: FakeCapture(device)) == []


# Faults that the test must find.


def replay_on_another_stream(patch: pytest.MonkeyPatch, device: FakeStreams) -> FakeCapture:
    return FakeCapture(device, replays_on="another")


def record_without_waiting_for_the_inputs(patch: pytest.MonkeyPatch, device: FakeStreams) -> FakeCapture:
    return FakeCapture(device, waits=False)


def upload_from_memory_that_is_still_read(patch: pytest.MonkeyPatch, device: FakeStreams) -> FakeCapture:
    page_locked, memory = device.page_locked, dict[Any, Tensor]()

    def the_same(size: int, dtype: torch.dtype) -> Tensor:
        return memory.setdefault((size, dtype), page_locked(size, dtype))

    patch.setattr(device, "page_locked", the_same)
    return FakeCapture(device)


def upload_on_another_stream(patch: pytest.MonkeyPatch, device: FakeStreams) -> FakeCapture:
    upload = device.upload

    def elsewhere(host: Tensor) -> Tensor:
        with device.watched("another"):
            return upload(host)

    patch.setattr(device, "upload", elsewhere)
    return FakeCapture(device)


MUTATIONS: list[Mutate] = [
    replay_on_another_stream,
    record_without_waiting_for_the_inputs,
    upload_from_memory_that_is_still_read,
    upload_on_another_stream,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_fault_is_found(mutate: Mutate, tiny_model: MakeModel) -> None:
    assert races(tiny_model, mutate)

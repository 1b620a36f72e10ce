"""Async scheduling, recorded steps, sampling and downloads on a device whose streams are ordered by events only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.types.request import Sampling
from engine.batch.batch import DeviceTokens
from engine.config import EngineConfig
from engine.cpu import library
from engine.runner import streams
from engine.runner.runner import ModelRunner
from engine.sampling import sampler
from tests.engine.engine_requests import Asked, answers
from tests.engine.fake_capture import FakeCapture
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel
from tests.support.fake_streams import FakeLane, FakeStreams

pytestmark = pytest.mark.usefixtures("one_thread")

Mutate = Callable[[pytest.MonkeyPatch, FakeStreams, FakeLane], None]


def likeliest(logits_RV: Tensor, rows: Any) -> Tensor:
    """Choose like a GPU kernel: the host does not wait."""
    return logits_RV.argmax(dim=-1).to(torch.int32)


def races(
    tiny_model: MakeModel,
    asks: list[tuple[int, int, int | None]],
    mutate: Mutate = lambda patch, device, copies: None,
    **capture: Any,
) -> list[str]:
    """Run requests and return the unordered accesses. asks: per prompt its tokens, the answer's length, and
    num_logprobs. capture: of FakeCapture."""
    with pytest.MonkeyPatch.context() as patch:
        device = FakeStreams()
        copies = device.device_stream()
        patch.setattr(streams, "streams_of", device.streams_of)
        patch.setattr(library, "load_kernels", lambda: None)
        patch.setattr(sampler, "copy_stream", lambda device: copies)
        patch.setattr(sampler, "choose_by_torch", likeliest)
        patch.setattr(DeviceTokens, "fill", lambda device_tokens, token_ids_T: None)  # the host does not know them
        mutate(patch, device, copies)
        directory, _ = tiny_model("llama", num_hidden_layers=1)
        config = EngineConfig(
            model_dir=directory, dtype="float32", block_size=8, num_blocks=16, max_context=32, recorded_rows=4
        )
        asked = [
            Asked(prompt, Sampling(temperature=0.0, max_tokens=num_tokens, num_logprobs=num_logprobs))
            for prompt, (_, num_tokens, num_logprobs) in zip(prompts(*(ask[0] for ask in asks)), asks, strict=True)
        ]
        with device.watched("compute"):
            runner = ModelRunner(config, capture=FakeCapture(device, **capture))
            outputs = answers(runner, asked, num_blocks=16, is_async=True)
            computed = device.mark()
        with device.watched("link"):
            computed.hold_up()
            runner.pool.copy_out([0, 1])
        assert outputs.num_device_tokens or all(num_tokens < 3 for _, num_tokens, _ in asks)
        return device.races


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asks=st.lists(st.tuples(st.integers(2, 10), st.integers(1, 7), st.sampled_from([None, 2])), min_size=1, max_size=3)
)
def test_async_loop_orders_all_accesses(asks: list[tuple[int, int, int | None]], tiny_model: MakeModel) -> None:
    assert races(tiny_model, asks) == []


# Faults that the test must find.


def read_ids_before_they_have_come(patch: pytest.MonkeyPatch, device: FakeStreams, copies: FakeLane) -> None:
    begun, mark = device.mark(), device.mark
    patch.setattr(device, "mark", lambda: begun if device.current == copies.name else mark())


def choose_on_another_stream(patch: pytest.MonkeyPatch, device: FakeStreams, copies: FakeLane) -> None:
    def elsewhere(logits_RV: Tensor, rows: Any) -> Tensor:
        with device.watched("another"):
            return likeliest(logits_RV, rows)

    patch.setattr(sampler, "choose_by_torch", elsewhere)


@pytest.mark.parametrize(
    "fault",
    [
        *({"mutate": mutate} for mutate in (read_ids_before_they_have_come, choose_on_another_stream)),
        *({"replays_on": "another"}, {"waits": False}),
    ],
)
def test_planted_fault_is_found(fault: dict[str, Any], tiny_model: MakeModel) -> None:
    assert races(tiny_model, [(5, 6, None), (9, 4, 2)], **fault)

"""Predicted cost of waiting for a decode replica, compared with a local decode."""

from __future__ import annotations

from core.types.step_timing import StepTiming
from router.routing.chooser import cheapest, guest_wait_s
from router.routing.policy import CandidateReplica, Option


def _view(*, num_streams: int) -> CandidateReplica:
    return CandidateReplica(
        replica="decode-0",
        cached_tokens=0,
        stored_tokens=0,
        queue_s=0.0,
        num_streams=num_streams,
        num_blocks=100,
        available_blocks=0,
        timing=StepTiming(base_s=0.01, token_s=0.001),
        max_batch_tokens=512,
        link_bytes_per_s=1e9,
    )


def _wait_s(*views: CandidateReplica, num_ends: int = 1) -> float:
    return guest_wait_s(views, num_tokens=100, answer_tokens=50, num_ends=num_ends)


def test_wait_is_predicted_from_the_rate_of_ending_answers() -> None:
    """Ten streams of fifty 20 ms steps: one ends every 0.1 s."""
    assert abs(_wait_s(_view(num_streams=10)) - 0.1) < 1e-9
    assert abs(_wait_s(_view(num_streams=10), num_ends=7) - 0.7) < 1e-9
    assert abs(_wait_s(_view(num_streams=10), _view(num_streams=10)) - 0.05) < 1e-9


def test_wait_without_ending_answers_is_an_hour() -> None:
    assert _wait_s() == _wait_s(_view(num_streams=0)) == 3600.0


def test_at_equal_cost_the_pair_wins_and_options_are_not_modified() -> None:
    alone, pair = Option(prefill=None, decode="p", compute_s=1.0), Option(prefill="p", decode="d", compute_s=0.5)
    assert [option.decode for option in cheapest([alone], [pair], wait_s=0.5)] == ["d", "p"]
    assert [option.decode for option in cheapest([alone], [pair], wait_s=0.6)] == ["p", "d"]
    assert pair.wait_s == 0.0

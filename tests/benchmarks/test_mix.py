"""Mixed traffic of two kinds."""

from __future__ import annotations

import pytest

from benchmarks.autoscaler.mix import MixRates, constant, mix, spike, steps, turning
from core.trace.trace import TraceRequest, read_trace, write_trace
from core.types.errors import SpecError


def _requests(lengths: list[tuple[int, int]], *, ids: bool = True) -> list[TraceRequest]:
    return [
        TraceRequest(
            number=i, arrival_s=float(i), num_tokens=p, num_output=a, ids=(i,) * (-(-p // 512)) if ids else None
        )
        for i, (p, a) in enumerate(lengths)
    ]


_PROMPTS = _requests([(4000, 20), (6000, 30), (300, 299)])
_ANSWERS = _requests([(100, 500), (900, 100)], ids=False)
_RATES = MixRates(prompt_heavy=2.0, answer_heavy=6.0)


def test_each_kind_arrives_at_its_rate_during_its_phase() -> None:
    wave, swell = steps([0.0, 1.0], each_s=500.0), constant(1.0)
    trace = mix([_PROMPTS, _ANSWERS], rates=_RATES, wave=wave, swell=swell, duration_s=1000.0, seed=3)
    first, second = ([r for r in trace if low <= r.arrival_s < low + 490] for low in (0.0, 505.0))
    assert {(r.num_tokens, r.num_output) for r in first} == {(4000, 20), (6000, 30)}
    assert {(r.num_tokens, r.num_output) for r in second} == {(300, 299), (100, 500)}
    assert len(first) == pytest.approx(980, rel=0.1) and len(second) == pytest.approx(2940, rel=0.1)
    assert [r.number for r in trace] == [*range(len(trace))]


def test_repeated_requests_share_no_prefix() -> None:
    trace = mix([_PROMPTS], rates=_RATES, wave=constant(0.0), swell=constant(1.0), duration_s=10.0, seed=1)
    ids = [id for request in trace for id in set(request.ids or ())]
    assert len(trace) > 4 and len(ids) == len(set(ids))


def test_same_seed_gives_same_trace_also_through_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one, two = (
        mix([_PROMPTS, _ANSWERS], rates=_RATES, wave=turning(60.0), swell=constant(1.0), duration_s=60.0, seed=5)
        for _ in range(2)
    )
    assert one == two
    write_trace(one, tmp_path / "trace.jsonl")
    read = read_trace(tmp_path / "trace.jsonl")
    assert [(r.num_tokens, r.num_output) for r in read] == [(r.num_tokens, r.num_output) for r in one]
    assert [r.arrival_s for r in read] == pytest.approx([r.arrival_s for r in one], abs=0.002)


def test_waves() -> None:
    turn = turning(100.0)
    assert turn(0.0) == turn(5.0) == 0.0 and turn(50.0) == turn(55.0) == 1.0 and turn(100.0) == 0.0
    assert spike(0.2, 1.0, begin_s=3.0, end_s=5.0)(4.0) == 1.0


def test_missing_kind_is_an_error() -> None:
    with pytest.raises(SpecError, match="answer-heavy"):
        mix([_requests([(4000, 20)])], rates=_RATES, wave=constant(0.5), swell=constant(1.0), duration_s=10.0, seed=1)

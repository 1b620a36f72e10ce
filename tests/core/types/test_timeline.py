"""Critical path of overlapping request phases."""

from __future__ import annotations

import pytest

from cluster.cli.trace import picture
from core.types.timeline import RequestPhase, Span, Timeline, critical_path, spans_of

_D, _P = "decode-1", "prefill-0"


def _life() -> Timeline:
    """Timeline of a prompt on two replicas: transfer overlaps computation, and the decode replica waits for both."""
    life = Timeline(began=100.0)
    life.add(RequestPhase.PREPARE, "", 100.0, 100.1)
    life.add(RequestPhase.QUEUE, "", 100.1, 100.3)
    life.add(RequestPhase.ROUTE, _D, 100.3, 100.4)
    life.add(RequestPhase.WAIT, _D, 100.4, 101.2)
    begun = life.add_before(
        101.0, _P, [(RequestPhase.WAIT, 0.1), (RequestPhase.FETCH, 0.2), (RequestPhase.COMPUTE, 0.2)], since=100.4
    )
    life.add(RequestPhase.ROUTE, _P, 100.4, begun)
    life.add_before(101.1, _P, [(RequestPhase.WIRE, 0.25)], since=100.4)
    life.add(RequestPhase.DECODE, _D, 101.2, 103.0)
    life.ended, life.outcome, life.first_s = 103.0, "completed", 1.0
    return life


def test_critical_path_is_the_first_of_overlapping_phases() -> None:
    life = _life()
    path = critical_path(spans_of(life.as_dict()))
    assert [(span.state, span.replica) for span in path] == [
        (RequestPhase.PREPARE, ""),
        (RequestPhase.QUEUE, ""),
        (RequestPhase.ROUTE, _D),
        (RequestPhase.ROUTE, _P),
        (RequestPhase.WAIT, _P),
        (RequestPhase.FETCH, _P),
        (RequestPhase.COMPUTE, _P),
        (RequestPhase.WIRE, _P),
        (RequestPhase.WAIT, _D),
        (RequestPhase.DECODE, _D),
    ]
    assert path[0].start_s == 0.0 and path[-1].end_s == pytest.approx(3.0)
    assert sum(span.end_s - span.start_s for span in path) == pytest.approx(3.0), "no overlap and no gap"
    shares = {state: sum(one.end_s - one.start_s for one in path if one.state is state) for state in RequestPhase}
    assert shares[RequestPhase.COMPUTE] == pytest.approx(0.2) and shares[RequestPhase.FETCH] == pytest.approx(0.2)
    assert shares[RequestPhase.WIRE] == pytest.approx(0.1), "the part of the transfer that computation did not hide"


def test_remote_durations_start_no_earlier_than_the_call() -> None:
    life = Timeline(began=0.0)
    begun = life.add_before(5.0, _P, [(RequestPhase.WAIT, 1.0), (RequestPhase.COMPUTE, 100.0)], since=4.0)
    assert begun == 4.0 and life.told() == [Span(RequestPhase.COMPUTE, _P, 4.0, 5.0)]
    assert life.add_before(5.0, _P, [(RequestPhase.WIRE, -3.0)], since=4.0) == 5.0 and len(life.spans) == 1


def test_number_of_spans_is_bounded() -> None:
    life = Timeline(began=0.0)
    for number in range(1000):
        life.add(RequestPhase.QUEUE, "", number, number + 0.5)
    assert len(life.spans) == 256


def test_chart_of_a_timeline() -> None:
    lines = picture("r-1", _life().as_dict())
    assert lines[0] == "request r-1: completed after 3000.0 ms, first token after 1000.0 ms"
    rows = {tuple(line.split()[:2]): line.partition("|")[2] for line in lines[2:-1]}
    assert set(rows["decode", _D]) == {" ", "#", "|"} and rows["decode", _D].count("#") == 36
    assert "-" in rows["wire", _P] and "#" in rows["wire", _P], "first hidden by the computation, then critical"
    assert lines[-1].startswith("critical path: prepare 100.0 ms (3%) > queue 200.0 ms (7%)")
    assert lines[-1].endswith(f"decode {_D} 1800.0 ms (60%)")


def test_waiting_request_has_no_spans() -> None:
    assert picture("r", Timeline().as_dict())[-1] == "critical path: nothing yet"

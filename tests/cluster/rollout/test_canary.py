"""Bounds on the error rate and the latency of a new revision."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.rollout.update_plan import MIN_REQUESTS, problem_of
from core.types.revisions import RevisionCounts


def _problem(old: RevisionCounts | None, new: RevisionCounts | None, *, latency: float | None = 2.0) -> str:
    return problem_of(old, new, max_error_increase=0.1, max_latency_factor=latency)


@st.composite
def _counts(draw: st.DrawFn, *, least: int = 0) -> RevisionCounts:
    attempts, answered = draw(st.integers(least, 500)), draw(st.integers(least, 500))
    ttft_s, itl_s = (answered * draw(st.floats(1e-3, 10)) for _ in range(2))
    failed = draw(st.integers(0, attempts))
    return RevisionCounts(attempts=attempts, failed=failed, answered=answered, ttft_s=ttft_s, itl_s=itl_s)


def test_more_errors_than_the_margin() -> None:
    old, bad = RevisionCounts(attempts=90, failed=9), RevisionCounts(attempts=20, failed=5)
    assert _problem(old, bad) == "5 of 20 attempts failed on the new revision, 9 of 90 on the old one"
    assert _problem(old, RevisionCounts(attempts=20, failed=4)) == "", "exactly the margin"
    assert _problem(bad, old) == _problem(None, None) == ""


def test_slower_than_the_factor() -> None:
    old = RevisionCounts(answered=100, ttft_s=10.0, itl_s=2.0)
    slow_start = RevisionCounts(answered=50, ttft_s=11.0, itl_s=1.0)
    slow_tokens = RevisionCounts(answered=50, ttft_s=5.0, itl_s=2.5)
    assert _problem(old, slow_start).startswith("mean TTFT is 220.0 ms on the new revision and 100.0 ms on the old one")
    assert _problem(old, slow_tokens).startswith("mean ITL is 50.0 ms on the new revision and 20.0 ms on the old one")
    assert _problem(old, slow_start, latency=None) == "", "latency is compared only if an operator asks for it"


@given(old=_counts(), new=_counts())
def test_few_requests_are_not_significant(old: RevisionCounts, new: RevisionCounts) -> None:
    new.attempts, new.answered = new.attempts % MIN_REQUESTS, new.answered % MIN_REQUESTS
    new.failed = min(new.failed, new.attempts)
    assert _problem(old, new) == ""


@given(counts=_counts())
def test_revision_is_not_worse_than_itself(counts: RevisionCounts) -> None:
    assert _problem(counts, counts, latency=1.0) == ""


@given(old=_counts(), new=_counts(least=MIN_REQUESTS))
def test_problem_is_monotonic_in_failures_and_delay(old: RevisionCounts, new: RevisionCounts) -> None:
    before = _problem(old, new)
    new.failed = min(new.attempts, new.failed + 1)
    new.ttft_s *= 1.1
    assert _problem(old, new) or not before

"""What speaks against a new revision, and what proves nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.rollout.canary import problem_of, share_between
from core.types.revisions import RevisionCounts, Slo

SLO = Slo(ttft_ms=500, itl_ms=50)


def test_nothing_speaks_against_it_before_anything_was_asked() -> None:
    assert problem_of(None, None, slo=SLO) == ""
    assert problem_of(RevisionCounts(attempts=9), RevisionCounts(attempts=2, failed=2), slo=SLO) == ""


def test_more_failures_than_the_old_one_has() -> None:
    well, ill = RevisionCounts(attempts=90, failed=1), RevisionCounts(attempts=10, failed=6)
    assert problem_of(well, ill, slo=SLO) == "6 of 10 attempts failed on it, 1 of 90 on the old one"
    assert problem_of(ill, well, slo=SLO) == ""
    assert problem_of(ill, ill, slo=SLO) == ""  # as where a network fails both


def test_other_answers_than_the_old_one_gives_of_itself() -> None:
    exact, rounding = RevisionCounts(replayed=8), RevisionCounts(replayed=8, other_tokens=2)
    assert "8 of 8 answers were others" in problem_of(exact, RevisionCounts(replayed=8, other_tokens=8), slo=SLO)
    assert problem_of(rounding, RevisionCounts(replayed=8, other_tokens=3), slo=SLO) == ""


def test_a_missed_slo_counts_where_the_old_one_misses_it_less() -> None:
    slow, quick = RevisionCounts(answered=20, slow=12), RevisionCounts(answered=200, slow=2)
    assert problem_of(quick, slow, slo=SLO).startswith("12 of 20 requests missed the SLO (ttft 500 ms, itl 50 ms)")
    assert problem_of(slow, slow, slo=SLO) == "" == problem_of(slow, quick, slo=SLO)


def test_a_few_slow_ones_of_many_are_within_the_slo() -> None:
    assert problem_of(RevisionCounts(answered=100), RevisionCounts(answered=100, slow=5), slo=SLO) == ""


@given(total=st.integers(1, 10_000), share=st.floats(0, 1))
def test_the_bounds_hold_the_share_and_come_together(total: int, share: float) -> None:
    bad = round(total * share)
    low, high = share_between(bad, total)
    assert 0 <= low <= bad / total + 1e-9 and bad / total - 1e-9 <= high <= 1
    wider_low, wider_high = share_between(bad, total), share_between(bad * 10, total * 10)
    assert wider_high[1] - wider_high[0] < wider_low[1] - wider_low[0]

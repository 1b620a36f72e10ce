"""Comparison of answers, and the report of mismatches."""

from __future__ import annotations

from benchmarks.chaos.question import Reply, compare, questions
from benchmarks.chaos.site import leaked_blocks
from benchmarks.chaos.tally import FaultWindow, Tally


def _answer(*token_ids: int, text: str = "", reason: str = "length") -> Reply:
    return Reply(list(token_ids), [0.5] * len(token_ids), text, reason)


def test_questions_differ_and_are_deterministic() -> None:
    all_questions = questions(12, max_tokens=32)
    assert len({question.message.prompt for question in all_questions}) == 12
    assert len({question.is_greedy for question in all_questions}) == 2
    assert all(question.is_greedy or question.message.sampling.HasField("seed") for question in all_questions)
    assert [q.number for q in all_questions if q.message.sampling.stop] == [3, 7, 11]


def test_equal_answers_match() -> None:
    question = questions(1, max_tokens=8)[0]
    assert compare(question, _answer(1, 2, 3), _answer(1, 2, 3)) is None


def test_mismatch_reports_first_different_token_and_gap() -> None:
    question = questions(1, max_tokens=8)[0]
    undisturbed = _answer(1, 2, 3)
    undisturbed.gaps[1] = 0.001
    mismatch = compare(question, _answer(1, 9, 3), undisturbed)
    assert mismatch and (mismatch.position, mismatch.gap, mismatch.was_greedy) == (1, 0.001, True)


def test_duplicate_missing_and_final_differences_are_mismatches() -> None:
    question = questions(1, max_tokens=8)[0]
    for answer in (_answer(1, 1, 2, 3), _answer(1, 2), _answer(1, 2, 3, reason="stop"), _answer(1, 2, 3, text="x")):
        assert compare(question, answer, _answer(1, 2, 3)) is not None


def test_leaked_blocks_are_neither_free_nor_cached() -> None:
    def replica(id: str, total: int, free: int, cached: int) -> dict[str, object]:
        return {"id": id, "blocks": {"total": total, "free": free, "cached": cached}}

    pools = {"prefill": {"replicas": [replica("prefill-0", 10, 4, 6)]}, "decode": {"replicas": [replica("d", 9, 4, 3)]}}
    assert leaked_blocks(pools) == {"d": 2}


def test_run_is_clean_until_a_failure_mismatch_or_leak() -> None:
    tally = Tally()
    tally.counts["aborted"] = tally.counts["refused"] = tally.counts["migrated"] = 3
    assert tally.is_clean
    tally.blocks_leaked = {"decode-0": 1}
    assert not tally.is_clean
    other = Tally()
    other.failed("gone")
    assert not other.is_clean and other.as_dict()["failed"] == 1


def test_pause_counts_for_the_last_fault() -> None:
    tally = Tally()
    tally.paused(0.2)
    tally.strokes += [FaultWindow("kill-decode", "decode-0/0", 1.0), FaultWindow("controller", "controller", 2.0)]
    tally.paused(0.1)
    assert [stroke.worst_pause_s for stroke in tally.strokes] == [0.0, 0.1]
    assert tally.worst_pause_s == 0.2

"""What counts as the same answer, and what chaos makes of one that is not."""

from __future__ import annotations

from benchmarks.chaos.question import Reply, compare, questions
from benchmarks.chaos.site import leaked_blocks
from benchmarks.chaos.tally import FaultWindow, Tally


def _answer(*token_ids: int, text: str = "", reason: str = "length") -> Reply:
    return Reply(list(token_ids), [0.5] * len(token_ids), text, reason)


def test_questions_differ_and_each_has_one_answer() -> None:
    asked = questions(12, max_tokens=32)
    assert len({question.message.prompt for question in asked}) == 12
    assert len({question.is_greedy for question in asked}) == 2
    assert all(question.is_greedy or question.message.sampling.HasField("seed") for question in asked)
    assert [q.number for q in asked if q.message.sampling.stop] == [3, 7, 11]


def test_the_same_answer_is_no_mismatch() -> None:
    question = questions(1, max_tokens=8)[0]
    assert compare(question, _answer(1, 2, 3), _answer(1, 2, 3)) is None


def test_a_mismatch_names_the_first_token_that_differs_and_the_gap_there() -> None:
    question = questions(1, max_tokens=8)[0]
    undisturbed = _answer(1, 2, 3)
    undisturbed.gaps[1] = 0.001
    mismatch = compare(question, _answer(1, 9, 3), undisturbed)
    assert mismatch and (mismatch.position, mismatch.gap, mismatch.was_greedy) == (1, 0.001, True)


def test_a_token_twice_a_token_less_and_another_end_are_mismatches() -> None:
    question = questions(1, max_tokens=8)[0]
    for answer in (_answer(1, 1, 2, 3), _answer(1, 2), _answer(1, 2, 3, reason="stop"), _answer(1, 2, 3, text="x")):
        assert compare(question, answer, _answer(1, 2, 3)) is not None


def test_only_blocks_that_nobody_could_use_are_leaked() -> None:
    def replica(id: str, total: int, free: int, cached: int) -> dict[str, object]:
        return {"id": id, "blocks": {"total": total, "free": free, "cached": cached}}

    pools = {"prefill": {"replicas": [replica("prefill-0", 10, 4, 6)]}, "decode": {"replicas": [replica("d", 9, 4, 3)]}}
    assert leaked_blocks(pools) == {"d": 2}


def test_a_run_is_clean_until_something_fails_differs_or_leaks() -> None:
    tally = Tally()
    tally.counts["aborted"] = tally.counts["refused"] = tally.counts["migrated"] = 3
    assert tally.is_clean
    tally.blocks_leaked = {"decode-0": 1}
    assert not tally.is_clean
    other = Tally()
    other.failed("gone")
    assert not other.is_clean and other.as_dict()["failed"] == 1


def test_a_pause_belongs_to_the_last_stroke() -> None:
    tally = Tally()
    tally.paused(0.2)
    tally.strokes += [FaultWindow("kill-decode", "decode-0/0", 1.0), FaultWindow("controller", "controller", 2.0)]
    tally.paused(0.1)
    assert [stroke.worst_pause_s for stroke in tally.strokes] == [0.0, 0.1]
    assert tally.worst_pause_s == 0.2

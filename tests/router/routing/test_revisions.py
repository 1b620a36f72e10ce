"""Choice of the revision for a request, and the separation of revisions."""

from __future__ import annotations

from collections import Counter

from core.types.request import SequenceRequest
from core.types.revisions import Revision, RevisionCounts, RevisionTable
from router.routing.revisions import Revisions

OLD = frozenset({"prefill-0", "decode-0"})
NEW = frozenset({"prefill-1", "decode-1"})


def request(id: str, user: str = "") -> SequenceRequest:
    return SequenceRequest(id=id, token_ids=(1,), num_prompt_tokens=1, user=user)


def revisions(share: float, *, takes_more: bool = False, kinds: tuple[str, str] = ("a", "a")) -> Revisions:
    made = Revisions()
    made.take(_table(share, takes_more=takes_more, kinds=kinds))
    return made


def numbers(ways: object) -> list[int]:
    return [one.number for one in ways]  # type: ignore[attr-defined]


def test_a_single_revision_needs_no_distinction() -> None:
    alone = Revisions()
    assert (
        alone.for_new_request(request("r"), usable=["decode-0"])
        == [None]
        == alone.for_continuation(None, untried=set())
    )
    assert alone.in_one_revision("prefill-0", "decode-9") and alone.may_move("decode-0", "decode-9")
    assert alone.group(["decode-0", "decode-9"]) == [["decode-0", "decode-9"]]


def test_a_canary_has_its_share_and_no_more() -> None:
    canary = revisions(0.1)
    ways = [numbers(canary.for_new_request(request(str(i)), usable=["decode-0", "decode-1"])) for i in range(4000)]
    first = Counter(way[0] for way in ways)
    assert 0.07 < first[2] / 4000 < 0.13
    assert all(way in ([1], [2, 1]) for way in ways)  # overflow of the old revision waits for it


def test_requests_stay_on_the_new_revision_as_its_share_grows() -> None:
    before, after = revisions(0.2), revisions(0.6)
    for i in range(500):
        one = request(str(i))
        if numbers(before.for_new_request(one, usable=["decode-0", "decode-1"]))[0] == 2:
            assert numbers(after.for_new_request(one, usable=["decode-0", "decode-1"]))[0] == 2


def test_a_user_stays_with_one_revision() -> None:
    half = revisions(0.5)
    ways = [numbers(half.for_new_request(request(str(i), "ann"), usable=["decode-0", "decode-1"])) for i in range(50)]
    assert len({way[0] for way in ways}) == 1


def test_rolling_revisions_take_each_others_overflow() -> None:
    rolling = revisions(0.5, takes_more=True)
    ways = [numbers(rolling.for_new_request(request(str(i)), usable=["decode-0", "decode-1"])) for i in range(50)]
    assert {tuple(way) for way in ways} == {(1, 2), (2, 1)}


def test_a_revision_without_a_decode_replica_is_skipped() -> None:
    canary = revisions(0.1)
    for i in range(50):
        assert numbers(canary.for_new_request(request(str(i)), usable=["decode-1"])) == [2]
        assert numbers(canary.for_new_request(request(str(i)), usable=["decode-0"])) == [1]


def test_a_request_stays_on_its_revision_unless_all_replicas_failed() -> None:
    unlike = revisions(0.5, kinds=("a", "b"))
    assert numbers(unlike.for_continuation(1, untried={"decode-0", "decode-1"})) == [1, 2]
    assert numbers(unlike.for_continuation(2, untried={"decode-0", "decode-1"})) == [2, 1]
    assert numbers(unlike.for_continuation(2, untried={"decode-0"})) == [1, 2]
    assert numbers(unlike.for_continuation(None, untried={"decode-0", "decode-1"})) == [1, 2]  # from before the update


def test_pairs_stay_within_a_revision_and_moves_within_a_kind() -> None:
    unlike, alike = revisions(0.5, kinds=("a", "b")), revisions(0.5)
    for some in (unlike, alike):
        assert some.in_one_revision("prefill-1", "decode-1") and not some.in_one_revision("prefill-0", "decode-1")
        assert some.group(["decode-0", "decode-1"]) == [["decode-0"], ["decode-1"]]
    assert alike.may_move("decode-0", "decode-1") and not unlike.may_move("decode-0", "decode-1")
    assert not alike.may_move("decode-0", "decode-7")  # unknown replica


def test_counts_restart_with_each_update() -> None:
    some = revisions(0.5)
    some.count(2).attempts += 1
    some.take(_table(0.7))
    assert some.counts[2] == RevisionCounts(attempts=1)
    some.take(RevisionTable(version=9))
    some.count(2).attempts += 1  # dropped: only one revision
    some.take(_table(0.1))
    assert some.counts == {1: RevisionCounts(), 2: RevisionCounts()}


def _table(share: float, *, takes_more: bool = False, kinds: tuple[str, str] = ("a", "a")) -> RevisionTable:
    old = Revision(number=1, share=1 - share, takes_more=True, tokens=kinds[0], kind=kinds[0], replicas=OLD)
    new = Revision(number=2, share=share, takes_more=takes_more, tokens=kinds[1], kind=kinds[1], replicas=NEW)
    return RevisionTable(version=1, revisions=(old, new))

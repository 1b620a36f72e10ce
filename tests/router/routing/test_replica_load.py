"""What one tenant may have of a replica, whoever else asks, and through however many routers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.index.membership import Member
from cluster.words.request import Role
from router.routing.replica_load import ReplicaLoad, most_choices

_BLOCKS = 100


def _load(promised_to: dict[str, tuple[int, int]], *, told: int = 0, max_running: int = 8) -> ReplicaLoad:
    """told: streams of all routers."""
    blocks, streams = (sum(amounts) for amounts in zip((0, 0), *promised_to.values(), strict=True))
    return ReplicaLoad(
        member=Member(
            replica="decode-0",
            role=Role.DECODE,
            address="",
            layout="",
            num_blocks=_BLOCKS,
            block_size=4,
            bytes_per_token=1,
            max_tokens=100,
            max_running=max_running,
        ),
        available_blocks=_BLOCKS - blocks,
        promised_blocks=blocks,
        promised_streams=streams,
        promised_to=promised_to,
        num_streams=max(told, streams),
        num_told_streams=told,
        num_waiting=0,
        queued_tokens=0,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        link_bytes_per_s=0.0,
        host_bytes_per_s=0.0,
        disk_bytes_per_s=0.0,
        timing=None,
    )


def _takes(load: ReplicaLoad, tenant: str, *, blocks: int, streams: int, share: float) -> bool:
    return load.has_room_to_decode(num_blocks=blocks, num_streams=streams) and load.is_within_share(
        tenant, num_blocks=blocks, num_streams=streams, share=share
    )


_arrivals = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from("ab"), st.integers(1, 20), st.integers(1, 9), st.sampled_from([0, 1, 2])
    ),
    max_size=40,
)


@given(_arrivals, st.integers(1, 16), st.sampled_from([0.25, 0.5, 0.75, 0.9]))
def test_who_has_more_than_one_choice_leaves_others_their_part(
    arrivals: list[tuple[int, str, int, int, int]], max_running: int, share: float
) -> None:
    """Of three routers, which know of each other's streams only by what the replica says."""
    routers: list[dict[str, tuple[int, int]]] = [{}, {}, {}]
    for number, tenant, blocks, streams, ending in arrivals:
        if ending == 0:
            routers[number].pop(tenant, None)
            continue
        told = sum(held for router in routers for _, held in router.values())
        load = _load(routers[number], told=told, max_running=max_running)
        if not _takes(load, tenant, blocks=blocks, streams=streams, share=share):
            continue
        held_blocks, held = routers[number].get(tenant, (0, 0))
        routers[number][tenant] = (held_blocks + blocks, held + streams)
        free = max_running - told - streams
        assert free >= 0
        if (own := held + streams) > 1:
            assert own <= share * (own + free), "it leaves no room for others"


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([0.25, 0.75]))
def test_one_who_is_alone_gets_its_share_whole(max_running: int, streams: int, share: float) -> None:
    load = _load({}, max_running=max_running)
    most = most_choices(max_running, share=share)
    assert _takes(load, "a", blocks=1, streams=streams, share=share) == (streams <= most)


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 30), st.integers(1, 4)), max_size=3))
def test_with_all_of_it_for_everybody_room_is_all_that_counts(promised_to: dict[str, tuple[int, int]]) -> None:
    load = _load(promised_to, max_running=12)
    for tenant in "abcd":
        for blocks, streams in ((1, 1), (40, 1), (1, 5)):
            if load.has_room_to_decode(num_blocks=blocks, num_streams=streams):
                assert load.is_within_share(tenant, num_blocks=blocks, num_streams=streams, share=1.0)


def test_blocks_have_shares_too_but_for_the_first_request() -> None:
    """A long prompt may need more than any share."""
    assert _takes(_load({}), "a", blocks=_BLOCKS, streams=1, share=0.75)
    load = _load({"a": (60, 1)})
    assert _takes(load, "a", blocks=15, streams=1, share=0.75)
    assert not _takes(load, "a", blocks=16, streams=1, share=0.75)
    assert _takes(load, "b", blocks=40, streams=1, share=0.75)

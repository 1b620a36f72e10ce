"""Share of one tenant, for any number of other tenants and routers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.admission_queue import is_within_share, most_choices
from router.routing.fair_queue import NO_PLACES, Places

_shares = st.sampled_from([0.25, 0.5, 0.75, 0.9])
_arrivals = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 9), st.sampled_from([0, 1, 2])
    ),
    max_size=60,
)


@given(_arrivals, st.integers(1, 32), _shares)
def test_a_tenant_with_places_leaves_others_their_share(
    arrivals: list[tuple[int, str, int, int, int]], num_places: int, share: float
) -> None:
    """Three routers know each other's load only from the free places."""
    all_places = Places(num_places, 100)
    routers: list[dict[str, Places]] = [{}, {}, {}]
    for number, tenant, blocks, streams, ending in arrivals:
        held, more = routers[number], Places(streams, blocks)
        if ending == 0:
            held.pop(tenant, None)
            continue
        taken = NO_PLACES
        for router in routers:
            for places in router.values():
                taken = taken.plus(places)
        free = all_places.less(taken)
        if more.num_streams > free.num_streams or more.num_blocks > free.num_blocks:
            continue  # no room for any tenant
        own = held.get(tenant, NO_PLACES)
        if is_within_share(own, more, free, share=share):
            held[tenant] = own.plus(more)
            left = free.less(more)
            assert (
                not own.num_streams
                or own.num_streams + streams <= share * (own.num_streams + streams + left.num_streams) + 1e-9
            )


@given(st.integers(1, 10), st.integers(20, 400), _shares)
def test_saturating_tenants_leave_the_documented_part_free(num_tenants: int, num_places: int, share: float) -> None:
    """Every tenant takes as much as it may."""
    held, free = [NO_PLACES] * num_tenants, Places(num_places, 10**6)
    has_changed = True
    while has_changed:
        has_changed = False
        for tenant, own in enumerate(held):
            one = Places(1, 1)
            if free.num_streams and is_within_share(own, one, free, share=share):
                held[tenant], free, has_changed = own.plus(one), free.less(one), True
    part = num_places * (1 - share) / (1 - share + num_tenants * share)
    assert free.num_streams >= int(part) - num_tenants, "fewer free places than the rule leaves"
    assert max(own.num_streams for own in held) - min(own.num_streams for own in held) <= 1


def test_a_tenant_without_places_waits_for_room_only() -> None:
    assert is_within_share(NO_PLACES, Places(48, 100), Places(1, 0), share=0.75)


def test_a_prompt_larger_than_the_share_is_admitted_beside_small_ones() -> None:
    own, free = Places(1, 5), Places(7, 95)
    assert is_within_share(own, Places(1, 70), free, share=0.75)
    assert is_within_share(own, Places(1, 80), free, share=0.75), "it never could"
    own, free = Places(2, 70), Places(6, 30)
    assert not is_within_share(own, Places(1, 20), free, share=0.75)


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 8))
def test_a_share_of_one_limits_by_room_only(own: int, free: int, more: int) -> None:
    if more <= free:
        assert is_within_share(Places(own, own), Places(more, more), Places(free, free), share=1.0)


def test_most_choices_by_places_and_share() -> None:
    assert [most_choices(places, share=0.75) for places in (1, 2, 6, 64)] == [1, 1, 4, 48]

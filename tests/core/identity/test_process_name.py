"""Conversion of process names to URIs in certificates and back."""

from __future__ import annotations

import pytest

from core.identity.process_name import ProcessName
from tests.support.identities import rank, router


@pytest.mark.parametrize("name", [rank("decode-12", 3), router("router-0a1b2c3d")], ids=str)
def test_name_round_trips_through_its_uri(name: ProcessName) -> None:
    assert ProcessName.parse(name.uri) == name


def test_names_of_a_rank_and_a_router() -> None:
    one = rank("decode-12", 3, deployment="blue")
    assert (one.uri, one.host) == ("xpyd://blue/decode-12/3", "3.decode-12.blue.xpyd")
    assert one.is_rank and not one.is_router
    assert (one.replica, one.rank) == ("decode-12", 3)
    assert router().is_router and not router().is_rank
    assert router("router-1a").router == "router-1a"


@pytest.mark.parametrize(("group", "member"), [("decode-12", "03"), ("decode-12", "three"), ("operator", "3")])
def test_similar_names_are_not_ranks(group: str, member: str) -> None:
    assert not ProcessName("blue", group, member).is_rank


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://blue/decode-12/3",
        "xpyd://blue/decode-12",
        "xpyd://blue/decode-12/3/4",
        "xpyd://blue/decode-12/3\n",
        "xpyd://blue/../3",
        "xpyd://blue/decode.12/3",
        "XPYD://blue/decode-12/3",
        "xpyd://-blue/decode-12/3",
    ],
)
def test_other_uris_are_not_names(uri: str) -> None:
    assert ProcessName.parse(uri) is None

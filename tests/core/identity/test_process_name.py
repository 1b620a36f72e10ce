"""Names of processes in certificates, and the rendezvous keys that they own."""

from __future__ import annotations

import pytest

from core.identity.process_name import ProcessName
from core.identity.rules import GANG, is_of_gang, is_of_link, key_of_link
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
        *("", "spiffe://blue/decode-12/3", "xpyd://blue/decode-12", "xpyd://blue/decode-12/3/4"),
        *("xpyd://blue/decode-12/3\n", "xpyd://blue/../3", "xpyd://blue/decode.12/3", "XPYD://blue/decode-12/3"),
        "xpyd://-blue/decode-12/3",
    ],
)
def test_other_uris_are_not_names(uri: str) -> None:
    assert ProcessName.parse(uri) is None


_SENDER = rank("prefill-1", 1)
_OF_LINK = key_of_link(str(_SENDER), receiver=1, epoch=3, unique="f00") + "/place"


def test_link_keys_belong_to_both_ends() -> None:
    assert is_of_link(_OF_LINK, sender=_SENDER, receiver=1)
    assert not is_of_gang(_OF_LINK)
    assert is_of_gang(f"{GANG}/come/1") and not is_of_gang(f"{GANG}ster/1")


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(rank("prefill-1", 0), 1), (rank("prefill-1", 11), 1), (rank("prefill-11", 1), 1), (_SENDER, 0), (_SENDER, 11)],
    ids=str,
)
def test_link_keys_belong_to_no_other_pair(sender: ProcessName, receiver: int) -> None:
    other = key_of_link(str(sender), receiver=receiver, epoch=3, unique="f00") + "/place"
    assert not is_of_link(_OF_LINK, sender=sender, receiver=receiver)
    assert not is_of_link(other, sender=_SENDER, receiver=1)

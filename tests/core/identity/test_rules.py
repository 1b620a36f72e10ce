"""Ownership of rendezvous keys."""

from __future__ import annotations

import pytest

from core.identity.process_name import ProcessName
from core.identity.rules import GANG, is_of_gang, is_of_link, key_of_link
from tests.support.identities import rank

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

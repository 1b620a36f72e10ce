"""The keys under which ranks leave word for each other at a meeting, and by which it is known whose word it is.

gang/...                             of the ranks of one replica among themselves
SENDER>RECEIVER#EPOCH/UNIQUE/...     of one link: the sending rank's name, the number of the receiving one
"""

from __future__ import annotations

from core.identity.process_name import ProcessName

GANG = "gang"


def key_of_link(sender: str, *, receiver: int, epoch: int, unique: str) -> str:
    """What all keys of one link begin with; two links that differ in any of these share no key.

    sender: str() of its ProcessName. unique: no other link to this receiver has had it.
    """
    return f"{_of_pair(sender, receiver)}{epoch}/{unique}"


def is_of_gang(key: str) -> bool:
    return key.startswith(f"{GANG}/")


def is_of_link(key: str, *, sender: ProcessName, receiver: int) -> bool:
    """Whether it belongs to a link from `sender` to this rank."""
    return key.startswith(_of_pair(str(sender), receiver))


def _of_pair(sender: str, receiver: int) -> str:
    return f"{sender}>{receiver}#"

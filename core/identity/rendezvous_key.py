"""Keys of the rendezvous store, by which a receiver can verify who may write them.

gang/...                             among the ranks of one replica
SENDER>RECEIVER#EPOCH/UNIQUE/...     of one link: the sending rank's name, the receiving rank's number
"""

from __future__ import annotations

from core.identity.process_name import ProcessName

GANG = "gang"


def key_of_link(sender: str, *, receiver: int, epoch: int, unique: str) -> str:
    """Return the prefix of all keys of one link; links that differ in any argument share no key.

    sender: str() of its ProcessName. unique: never used before for a link to this receiver.
    """
    return f"{_of_pair(sender, receiver)}{epoch}/{unique}"


def is_of_gang(key: str) -> bool:
    return key.startswith(f"{GANG}/")


def is_of_link(key: str, *, sender: ProcessName, receiver: int) -> bool:
    """Return whether the key belongs to a link from `sender` to this rank."""
    return key.startswith(_of_pair(str(sender), receiver))


def _of_pair(sender: str, receiver: int) -> str:
    return f"{sender}>{receiver}#"

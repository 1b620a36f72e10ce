"""Dataclasses as protobuf messages whose fields have the same names, and back."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from core.types.json_records import Record

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Record)


def to_message(kind: type[M], record: Record, **given: object) -> M:
    """Every field of the message is `given`, or the record's of that name."""
    return kind(
        **{name: getattr(record, name) for name, _, _ in _described(kind.DESCRIPTOR) if name not in given}, **given
    )


def from_message(kind: type[R], message: Message, **given: object) -> R:
    """Every field of the record is `given`, or the message's of that name, or else has its default.

    What repeats becomes a tuple; what the message may leave out, and does, None.
    """
    for name, is_repeated, may_be_missing in _described(message.DESCRIPTOR):
        if name in given or name not in kind.__dataclass_fields__:
            continue
        value = getattr(message, name)
        if is_repeated:
            value = tuple(value)
        elif may_be_missing and not message.HasField(name):
            value = None
        given[name] = value
    return kind(**given)


@cache
def _described(kind: Descriptor) -> list[tuple[str, bool, bool]]:
    """Of each field: its name, whether it repeats, and whether a message can be without it."""
    return [(field.name, field.is_repeated, field.has_presence) for field in kind.fields]

"""Conversion between dataclasses and protobuf messages with equal field names."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from core.types.json_records import Record

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Record)


def to_message(kind: type[M], record: Record, **given: object) -> M:
    """Fill every field of the message from `given`, or else from the record's attribute of the same name."""
    return kind(
        **{name: getattr(record, name) for name, _, _ in _described(kind.DESCRIPTOR) if name not in given}, **given
    )


def from_message(kind: type[R], message: Message, **given: object) -> R:
    """Fill every field of the record from `given`, or else from the message; other fields keep their defaults.

    Repeated fields become tuples. An unset optional field becomes None.
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
    """Return (name, is repeated, has presence) of each field."""
    return [(field.name, field.is_repeated, field.has_presence) for field in kind.fields]

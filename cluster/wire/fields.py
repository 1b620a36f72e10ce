"""Dataclasses as protobuf messages whose fields have the same names, and back."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar

from google.protobuf.message import Message


class Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Record)


def to_message(kind: type[M], record: Record, **given: object) -> M:
    """Every field of the message is `given`, or the record's of that name."""
    names = (field.name for field in kind.DESCRIPTOR.fields if field.name not in given)
    return kind(**{name: getattr(record, name) for name in names}, **given)


def from_message(kind: type[R], message: Message, **given: object) -> R:
    """Every field of the record is `given`, or the message's of that name, or else has its default.

    What repeats becomes a tuple; what the message may leave out, and does, None.
    """
    described = message.DESCRIPTOR.fields_by_name
    for name in kind.__dataclass_fields__.keys() & described.keys() - given.keys():
        value = getattr(message, name)
        if described[name].is_repeated:
            value = tuple(value)
        elif described[name].has_presence and not message.HasField(name):
            value = None
        given[name] = value
    return kind(**given)

"""Fields added by a newer version, at any level of messages and records, do not change what is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from core.index.membership import Member
from core.rpc import transfer_pb2, worker_pb2
from core.types.api_key import KeyRegistry, new_key, new_secret
from core.types.errors import RequestError
from core.types.handoff import Handoff, PrefixSource
from core.types.step_timing import StepTiming
from core.wire import messages
from core.wire.messages import make_plausible
from kvtransfer.transfer.wire_messages import frame_from_proto, part_from_report
from tests.support.members import make_member

_KINDS: list[type[Message]] = [
    getattr(module, name)
    for module in (worker_pb2, transfer_pb2)
    for name in sorted(module.DESCRIPTOR.message_types_by_name)
]
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.text(max_size=4),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=4),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_FLOAT: st.floats(allow_nan=False, width=32),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_SINT32: st.integers(-(2**31), 2**31 - 1),
}
# Encoded by protobuf: field 10,000 (varint), field 10,001 (four bytes), field 10,002 (a message with one field).
_UNKNOWN = bytes.fromhex("80f10407" "8af10404deadbeef" "92f104020801")  # fmt: skip


def _status(message: Any) -> object:
    return make_plausible(message), _known(message)


def _known(message: Any) -> object:
    """Return a message's known fields, for messages without a reader."""
    message.DiscardUnknownFields()
    return message


# Readers of messages that become dataclasses. Each must give the same result with and without unknown fields.
_READERS: dict[str, Callable[[Any], object]] = {
    "Sequence": messages.sequence_from_proto,
    "Handoff": partial(messages.from_message, Handoff),
    "PrefixSource": partial(messages.from_message, PrefixSource),
    "StepTiming": partial(messages.from_message, StepTiming),
    "StreamTokens": lambda message: messages.tokens_from_proto(message.tokens),
    "Status": _status,
    "SenderFrame": frame_from_proto,
    "ReportRequest": part_from_report,
}


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.DESCRIPTOR.name)
@settings(max_examples=settings().max_examples // 4)
@given(st.data())
def test_unknown_message_fields_are_ignored_at_every_level(kind: type[Message], data: st.DataObject) -> None:
    sent = data.draw(_filled(kind.DESCRIPTOR))
    newer = kind.FromString(sent.SerializeToString())
    for message in list(_levels(newer)):
        message.MergeFromString(_UNKNOWN)
    newer = kind.FromString(newer.SerializeToString())
    assert newer.ByteSize() > sent.ByteSize(), "the unknown fields are missing"
    read = _READERS.get(kind.DESCRIPTOR.name, _known)
    assert _outcome(read, newer) == _outcome(read, sent)


def test_every_reader_has_its_message() -> None:
    assert _READERS.keys() <= {kind.DESCRIPTOR.name for kind in _KINDS}


def test_unknown_record_fields_are_ignored_at_every_level() -> None:
    assert Member.from_json(_with_more(asdict(make_member()))) == make_member()
    key = new_key("a", new_secret(), rpm=7, priorities=(1, 2))
    book = KeyRegistry().with_key(key)
    assert KeyRegistry.from_json(_with_more(json.loads(book.to_json()))) == book


def _filled(kind: Descriptor) -> st.SearchStrategy[Message]:
    """Messages of a kind, with arbitrary fields at every level."""

    @st.composite
    def fill(draw: st.DrawFn) -> Message:
        message = GetMessageClass(kind)()
        for field in kind.fields:
            if draw(st.booleans()):
                _fill_in(draw, message, field)
        return message

    return fill()


def _fill_in(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    there, inner = getattr(message, field.name), field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = (_SCALARS[inner.fields_by_name[part].type] for part in ("key", "value"))
        there.update(draw(st.dictionaries(key, value, max_size=2)))
    elif field.is_repeated:
        there.extend(draw(st.lists(_filled(inner) if inner else _SCALARS[field.type], min_size=1, max_size=2)))
    elif inner is not None:
        there.CopyFrom(draw(_filled(inner)))
        there.SetInParent()
    else:
        setattr(message, field.name, draw(_SCALARS[field.type]))


def _levels(message: Message) -> Iterator[Message]:
    """Yield the message and all its nested messages."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                yield from _levels(inner)


def _outcome(read: Callable[[Any], object], message: Message) -> str:
    try:
        return repr(read(message))
    except RequestError as error:
        return repr(error)


def _with_more(tree: Any) -> str:
    def more(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: more(value) for name, value in node.items()} | {"of a newer version": {"a": [1]}}
        return [more(each) for each in node] if isinstance(node, (list, tuple)) else node

    return json.dumps(more(tree))

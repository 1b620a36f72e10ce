from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: str
    def __init__(self, report: _Optional[str] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("replica", "lines", "starts")
    class StartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    lines: int
    starts: _containers.ScalarMap[int, int]
    def __init__(self, replica: _Optional[str] = ..., lines: _Optional[int] = ..., starts: _Optional[_Mapping[int, int]] = ...) -> None: ...

class LogsReply(_message.Message):
    __slots__ = ("ranks",)
    class RanksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: RankLog
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[RankLog, _Mapping]] = ...) -> None: ...
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.MessageMap[int, RankLog]
    def __init__(self, ranks: _Optional[_Mapping[int, RankLog]] = ...) -> None: ...

class RankLog(_message.Message):
    __slots__ = ("text", "end")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    text: str
    end: int
    def __init__(self, text: _Optional[str] = ..., end: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("replicas", "wait_for_nodes")
    class ReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_NODES_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.ScalarMap[str, int]
    wait_for_nodes: bool
    def __init__(self, replicas: _Optional[_Mapping[str, int]] = ..., wait_for_nodes: bool = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("before",)
    class BeforeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    before: _containers.ScalarMap[str, int]
    def __init__(self, before: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: str
    def __init__(self, replica: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: str
    def __init__(self, replica: _Optional[str] = ...) -> None: ...

class SwitchReply(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: str
    def __init__(self, replica: _Optional[str] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysReply(_message.Message):
    __slots__ = ("book",)
    BOOK_FIELD_NUMBER: _ClassVar[int]
    book: str
    def __init__(self, book: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("name", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ChangeKeyReply(_message.Message):
    __slots__ = ("key", "is_told", "problem")
    KEY_FIELD_NUMBER: _ClassVar[int]
    IS_TOLD_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    key: str
    is_told: bool
    problem: str
    def __init__(self, key: _Optional[str] = ..., is_told: bool = ..., problem: _Optional[str] = ...) -> None: ...

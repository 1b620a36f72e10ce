from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SenderFrame(_message.Message):
    __slots__ = ("hello", "segment", "commit")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    segment: Segment
    commit: Commit
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class ReceiverFrame(_message.Message):
    __slots__ = ("welcome", "landed", "rejected")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    landed: Landed
    rejected: Rejected
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("wire_version", "layout", "sender", "epoch", "backend", "wire_dtype", "sender_rank", "sender_ranks")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SENDER_RANK_FIELD_NUMBER: _ClassVar[int]
    SENDER_RANKS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    layout: str
    sender: str
    epoch: int
    backend: str
    wire_dtype: str
    sender_rank: int
    sender_ranks: int
    def __init__(self, wire_version: _Optional[int] = ..., layout: _Optional[str] = ..., sender: _Optional[str] = ..., epoch: _Optional[int] = ..., backend: _Optional[str] = ..., wire_dtype: _Optional[str] = ..., sender_rank: _Optional[int] = ..., sender_ranks: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("handoff", "epoch", "number", "first_layer", "num_layers", "first_token", "num_tokens", "num_bytes", "checksum", "window_start")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_START_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    epoch: int
    number: int
    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    num_bytes: int
    checksum: int
    window_start: int
    def __init__(self, handoff: _Optional[str] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., window_start: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("handoff", "epoch", "num_segments", "checksum", "next_tokens", "num_tokens", "features")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    epoch: int
    num_segments: int
    checksum: int
    next_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    features: bytes
    def __init__(self, handoff: _Optional[str] = ..., epoch: _Optional[int] = ..., num_segments: _Optional[int] = ..., checksum: _Optional[int] = ..., next_tokens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("handoff", "epoch")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    epoch: int
    def __init__(self, handoff: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handoff", "epoch", "reason")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    epoch: int
    reason: str
    def __init__(self, handoff: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("handoff", "first_token", "num_tokens", "block_ids", "max_tokens", "sender", "after_steps", "state_slots")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    first_token: int
    num_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sender: str
    after_steps: int
    state_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handoff: _Optional[str] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sender: _Optional[str] = ..., after_steps: _Optional[int] = ..., state_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("handoff",)
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    def __init__(self, handoff: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("rank", "landed", "shipped", "loaded")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    landed: LandedPart
    shipped: ShippedPart
    loaded: LoadedPart
    def __init__(self, rank: _Optional[int] = ..., landed: _Optional[_Union[LandedPart, _Mapping]] = ..., shipped: _Optional[_Union[ShippedPart, _Mapping]] = ..., loaded: _Optional[_Union[LoadedPart, _Mapping]] = ...) -> None: ...

class LandedPart(_message.Message):
    __slots__ = ("handoff", "epoch", "num_tokens")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    epoch: int
    num_tokens: int
    def __init__(self, handoff: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ShippedPart(_message.Message):
    __slots__ = ("handoff", "epoch", "wire_bytes", "seconds", "error", "link_s")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LINK_S_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    epoch: int
    wire_bytes: int
    seconds: float
    error: str
    link_s: float
    def __init__(self, handoff: _Optional[str] = ..., epoch: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., error: _Optional[str] = ..., link_s: _Optional[float] = ...) -> None: ...

class LoadedPart(_message.Message):
    __slots__ = ("id", "num_blocks", "num_bytes", "seconds")
    class NumBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    num_blocks: int
    num_bytes: _containers.ScalarMap[int, int]
    seconds: _containers.ScalarMap[int, float]
    def __init__(self, id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[_Mapping[int, int]] = ..., seconds: _Optional[_Mapping[int, float]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TellRequest(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class TellReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class AskReply(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

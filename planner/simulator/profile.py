"""Input of a simulation: a deployment's setup, and the performance profile of a machine and a model.

A profile is a JSON file with step times, KV sizes and transfer rates. The shipped ones, beside this file, are *derived*
from data sheets, as their `derivation` explains. `cluster profile` measures one on the local machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.model.kv_memory import CacheShape, PoolSizes, least_parts
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.step_timing import StepTiming

DEFAULT = "h100-llama-3.1-8b"
MAX_DRAFT_TOKENS = 64
_SHIPPED = Path(__file__).parent

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Steps(_Section):
    """Coefficients of a StepTiming."""

    base_s: NotNegative
    token_s: NotNegative
    pair_s: NotNegative
    context_s: NotNegative

    @property
    def timing(self) -> StepTiming:
        return StepTiming(**self.model_dump())


class WiderSteps(_Section):
    """Step times of a replica with `width` times the compute threads of the profile's replica."""

    width: Annotated[int, Field(ge=2)]
    steps: Steps
    decode_steps: Steps


class KV(_Section):
    bytes_per_token: Annotated[int, Field(gt=0)]  # in the pool, all ranks
    wire_bytes_per_token: Annotated[int, Field(gt=0)]
    num_layers: Annotated[int, Field(gt=0)]  # a layer's transfer overlaps the compute of the next one
    pool_tokens: Annotated[int, Field(gt=0)]  # default capacity of a replica
    # Layers with a window that free what no later query sees; 0: none.
    window: Count = 0  # tokens
    window_wire_bytes_per_token: Count = 0  # the part of wire_bytes_per_token in layers with a window
    pool_window_tokens: Count = 0  # capacity of layers with a window beside pool_tokens
    # Recurrent layers.
    state_bytes: Count = 0  # of one sequence, all ranks
    pool_states: Count = 0  # state slots beside pool_tokens

    @model_validator(mode="after")
    def _has_states_or_windows(self) -> KV:
        if self.window and self.state_bytes:
            raise ValueError("window and state_bytes exclude each other: models with recurrent layers keep every block")
        return self

    def wire_cache(self, block_size: int) -> CacheShape:
        """Return the bytes that a handoff ships."""
        return CacheShape(
            block_size=block_size,
            token_bytes=self.wire_bytes_per_token,
            window_token_bytes=self.window_wire_bytes_per_token,
            window=self.window,
            state_bytes=self.state_bytes,
        )

    def pool_cache(self, block_size: int) -> CacheShape:
        """Return the bytes that a replica's pool holds."""
        return replace(self.wire_cache(block_size), token_bytes=self.bytes_per_token)

    def pool_sizes(self, kv_tokens: int, *, block_size: int, max_batch_tokens: int) -> PoolSizes:
        """Return the sizes of a pool of `kv_tokens`, with its share of window tokens and states.

        max_batch_tokens: limit of a step. The pool has parts for the largest step at least, and two states.
        """
        num_blocks, scale, num_parts = kv_tokens // block_size, kv_tokens / self.pool_tokens, None
        if self.window:
            least = least_parts(window=self.window, block_size=block_size, max_batch_tokens=max_batch_tokens)
            num_parts = 1 + min(num_blocks, max(least, round(self.pool_window_tokens * scale) // block_size))
        return PoolSizes(num_blocks, max(2, round(self.pool_states * scale)) if self.state_bytes else 0, num_parts)


class LinkProfile(_Section):
    latency_s: NotNegative
    bytes_per_s: Positive  # per replica and direction


class Drafts(_Section):
    """Speculative decoding of decode replicas: acceptance rates and costs of a draft method."""

    # By draft position: probability of acceptance if all earlier tokens are accepted.
    accepted: Annotated[list[Share], Field(min_length=1, max_length=MAX_DRAFT_TOKENS)]
    guessed: Share = 1.0  # share of a row's steps that have a proposal
    ask_s: NotNegative = 0.0  # fixed cost of a proposer call per step; 0 for lookup methods
    ask_place_s: NotNegative = 0.0  # cost per draft position, usually one pass of a smaller model

    @property
    def is_computed(self) -> bool:
        return bool(self.ask_s or self.ask_place_s)


class Profile(_Section):
    name: str
    origin: Literal["derived", "measured"]
    derivation: list[str]  # where each figure comes from
    steps: Steps
    decode_steps: Steps | None = None  # decode-only steps; None: as `steps`
    threads: Annotated[int, Field(ge=1)] = 1  # per replica, on a CPU
    wider: list[WiderSteps] = []  # step times with more threads; empty: unknown, or on a GPU
    # Slowdown factors of steps while 1, 2, 3, … replicas step concurrently; empty: every replica has its own device.
    slowdown: list[Positive] = []
    request_s: NotNegative = 0.0  # overhead of a request outside its steps, from the client to its first token
    drafts: Drafts | None = None  # None: no speculative decoding
    kv: KV
    link: LinkProfile
    weight_bytes: Positive | None = None  # of a replica, in the format of the steps; None: unknown
    host_bytes_per_s: Positive  # between a replica's device and its host memory
    usd_per_hour: Positive  # per replica

    def timing(self, width: int = 1) -> StepTiming:
        """Return the step timing of a replica with `width` times the profile's threads."""
        return (self._wider(width).steps if width > 1 else self.steps).timing

    def decode_timing(self, width: int = 1) -> StepTiming:
        """Return the timing of decode-only steps."""
        return (self._wider(width).decode_steps if width > 1 else self.decode_steps or self.steps).timing

    def _wider(self, width: int) -> WiderSteps:
        return next(wider for wider in self.wider if wider.width == width)


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """Simulated deployment. With num_prefill = 0 each decode replica computes its prompts itself."""

    num_prefill: int
    num_decode: int
    policy: str = "cost"
    block_size: int
    kv_tokens: int  # per replica
    host_tokens: int = 0  # per replica
    prefill_width: int = 1  # multiple of the compute threads of the profile's replica
    decode_width: int = 1
    prefix_fetches: bool = False
    eviction: str = "reuse_value"  # as kv.eviction
    prefill_batch_tokens: int = 8192
    decode_batch_tokens: int = 2048
    max_running: int = 256
    max_local_tokens: int = 16  # as router.max_local_prefill
    checkpoint_tokens: int = 128  # as kv.checkpoint_tokens
    waits_in_router: bool = False  # requests queue in the router until replicas have room, as in the live router

    @classmethod
    def of(cls, spec: Spec, **more: Any) -> FleetSetup:
        """Return the setup of a spec. more: fields that the spec does not determine."""
        fields = {
            "num_prefill": spec.prefill.replicas,
            "num_decode": spec.decode.replicas,
            "prefill_batch_tokens": spec.prefill.max_batch_tokens,
            "decode_batch_tokens": spec.decode.max_batch_tokens,
            "max_running": spec.decode.max_running,
            "max_local_tokens": spec.router.max_local_prefill,
            "checkpoint_tokens": spec.kv.checkpoint_tokens,
        }
        return cls(**(fields | more))


def load_profile(name: str) -> Profile:
    """Load a profile from a .json path, or a shipped one by name. Raises SpecError."""
    path = Path(name) if name.endswith(".json") else _SHIPPED / f"{name}.json"
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; shipped profiles: {', '.join(shipped_profiles())}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise SpecError(f"{path}: {wrong}") from None


def shipped_profiles() -> list[str]:
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))

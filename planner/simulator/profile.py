"""Performance profile of a machine and a model for the simulator: step times, KV sizes and transfer rates.

A profile is a JSON file. The shipped ones, beside this file, are *derived* from data sheets, as their `derivation`
explains. `cluster profile` measures one on the local machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.model.kv_memory import CacheShape, PoolSizes, least_parts
from core.types.errors import SpecError
from core.types.step_timing import StepTiming
from planner.simulator.drafts import DraftRates

DEFAULT = "h100-llama-3.1-8b"

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Steps(_Section):
    """Coefficients of core.types.step_timing.StepTiming."""

    base_s: NotNegative
    token_s: NotNegative
    pair_s: NotNegative
    context_s: NotNegative


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
    # Layers with a window that free what no coming query sees; 0: none.
    window: Count = 0  # tokens
    window_wire_bytes_per_token: Count = 0  # the part of wire_bytes_per_token in these layers
    pool_window_tokens: Count = 0  # capacity of these layers beside pool_tokens
    # Recurrent layers.
    state_bytes: Count = 0  # of one sequence, all ranks
    pool_states: Count = 0  # state slots beside pool_tokens

    def wire_cache(self, block_size: int) -> CacheShape:
        """Return the bytes that a handoff ships."""
        return CacheShape(
            block_size=block_size,
            token_bytes=self.wire_bytes_per_token,
            window_token_bytes=self.window_wire_bytes_per_token,
            window=self.window,
            state_bytes=self.state_bytes,
        )

    def pool_sizes(self, kv_tokens: int, *, block_size: int, max_batch_tokens: int) -> PoolSizes:
        """Return the sizes of a pool of `kv_tokens`, with its share of window tokens and states.

        max_batch_tokens: of a step. The pool has parts for the largest step at least, and two states.
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
    """Speculative decoding of decode replicas; see planner.simulator.drafts.DraftRates."""

    accepted: Annotated[list[Share], Field(min_length=1, max_length=64)]
    guessed: Share = 1.0
    ask_s: NotNegative = 0.0
    ask_place_s: NotNegative = 0.0


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

    @property
    def timing(self) -> StepTiming:
        return self.timing_of(1)

    @property
    def decode_timing(self) -> StepTiming:
        return self.decode_timing_of(1)

    def timing_of(self, width: int) -> StepTiming:
        """Return the step timing of a replica with `width` times the profile's threads."""
        return StepTiming(**(self.steps if width == 1 else self._wider(width).steps).model_dump())

    def decode_timing_of(self, width: int) -> StepTiming:
        """Return the timing of decode-only steps."""
        usual = self.decode_steps or self.steps
        return StepTiming(**(usual if width == 1 else self._wider(width).decode_steps).model_dump())

    def _wider(self, width: int) -> WiderSteps:
        return next(wider for wider in self.wider if wider.width == width)

    @property
    def draft_rates(self) -> DraftRates | None:
        if self.drafts is None:
            return None
        return DraftRates(**{**self.drafts.model_dump(), "accepted": tuple(self.drafts.accepted)})


def load_profile(name: str) -> Profile:
    """Load a profile from a .json path, or a shipped one by name. Raises SpecError."""
    path = Path(name) if name.endswith(".json") else _shipped(name)
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; shipped profiles: {', '.join(shipped_profiles())}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise SpecError(f"{path}: {wrong}") from None


def shipped_profiles() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def _shipped(name: str) -> Path:
    return Path(__file__).parent / f"{name}.json"

"""Widths of recurrent layers, which keep a state per sequence instead of keys and values, and sizes of the states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

from core.types.errors import SpecError

_FP32_BYTES = 4


class StatePart(NamedTuple):
    """Part of a state, divided into equal units; each rank has a range of them."""

    num_units: int
    # Channels of a unit in each section of the convolution, such as queries, keys and values. A rank's channels are
    # sorted by part, then by section, then by unit.
    unit_channels: tuple[int, ...]


class RecurrentShape(ABC):
    """Widths of a recurrent layer. A sequence's state is the last inputs of a convolution, and a matrix per head.

    num_ranks: ranks that share the layer's heads or channels.
    """

    hidden_size: int
    # Inputs of the convolution per output.
    conv_width: int

    @abstractmethod
    def matrix_shape(self, num_ranks: int = 1) -> tuple[int, ...]:
        """Return the shape of one rank's matrices: heads, key features, value features."""
        ...

    @property
    @abstractmethod
    def parts(self) -> tuple[StatePart, ...]:
        """Parts of the state. The first one has the matrices, and ranks divide it.

        If there are more ranks than units of a later part, several ranks hold the same unit.
        """
        ...

    @property
    @abstractmethod
    def num_parameters(self) -> int: ...

    def conv_channels(self, num_ranks: int = 1) -> int:
        """Return the channels that one rank convolves."""
        return sum(max(1, part.num_units // num_ranks) * sum(part.unit_channels) for part in self.parts)

    def can_share(self, num_ranks: int) -> bool:
        """Return True if the layer can be split over this many ranks."""
        divided, *others = (part.num_units for part in self.parts)
        return divided % num_ranks == 0 and all(n % num_ranks == 0 or num_ranks % n == 0 for n in others)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise SpecError unless the layer can be split over this many ranks."""
        if not self.can_share(num_ranks):
            units = " and ".join(str(part.num_units) for part in self.parts)
            raise SpecError(
                f"{num_ranks} ranks cannot share recurrent layers of {units} heads or channels; "
                "use a divisor of these numbers"
            )

    def unit_bytes(self, part: int, *, number_bytes: int) -> int:
        """Return the bytes of a unit of one part. number_bytes: size of the activations' dtype."""
        num_units, unit_channels = self.parts[part]
        matrices = self.matrix_bytes() // num_units if part == 0 else 0
        return matrices + (self.conv_width - 1) * sum(unit_channels) * number_bytes

    def conv_shape(self, num_ranks: int = 1) -> tuple[int, int]:
        """Return the shape of the inputs that one rank's convolution keeps: rows, channels."""
        return self.conv_width - 1, self.conv_channels(num_ranks)

    def matrix_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of one rank's matrices; they are fp32."""
        return prod(self.matrix_shape(num_ranks)) * _FP32_BYTES

    def state_bytes(self, num_ranks: int = 1, *, number_bytes: int) -> int:
        """Return the bytes of a sequence's state on one rank. number_bytes: size of the activations' dtype."""
        return self.matrix_bytes(num_ranks) + prod(self.conv_shape(num_ranks)) * number_bytes


@dataclass(frozen=True, kw_only=True)
class DeltaNetShape(RecurrentShape):
    """Gated DeltaNet of Qwen3-Next and Qwen3.5. Ranks share the key heads, each with its value heads."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    # Features of one head.
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    # Qwen3-Next stores two projections, whose rows are sorted by key head; Qwen3.5 stores four.
    is_fused: bool

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise SpecError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.num_key_heads}"
            )

    @property
    def parts(self) -> tuple[StatePart, ...]:
        values = self.num_value_heads // self.num_key_heads * self.value_dim
        return (StatePart(self.num_key_heads, (self.key_dim, self.key_dim, values)),)

    @property
    def num_parameters(self) -> int:
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        projections = self.hidden_size * (2 * keys + 3 * values + 2 * self.num_value_heads)
        return projections + self.conv_width * (2 * keys + values) + 2 * self.num_value_heads + self.value_dim

    def matrix_shape(self, num_ranks: int = 1) -> tuple[int, ...]:
        return self.num_value_heads // num_ranks, self.key_dim, self.value_dim


@dataclass(frozen=True, kw_only=True)
class MambaShape(RecurrentShape):
    """Mamba-2 mixer of Nemotron-H. Ranks share the groups, each with its heads.

    With more ranks than groups, several ranks share the heads of a group, and each holds its B and C.
    """

    hidden_size: int
    num_heads: int
    # Features of one head.
    head_dim: int
    # Heads of a group share B and C.
    num_groups: int
    # Features of B and C: ssm_state_size.
    state_dim: int
    conv_width: int
    norm_eps: float
    min_dt: float = 0.0
    max_dt: float = inf
    has_conv_bias: bool = True
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise SpecError(f"mamba_num_heads {self.num_heads} is not a multiple of n_groups {self.num_groups}")

    @property
    def parts(self) -> tuple[StatePart, ...]:
        # x of each head, and B and C of each group.
        return StatePart(self.num_heads, (self.head_dim,)), StatePart(self.num_groups, (self.state_dim,) * 2)

    @property
    def num_parameters(self) -> int:
        values = self.num_heads * self.head_dim
        channels = values + 2 * self.num_groups * self.state_dim
        return self.hidden_size * (2 * values + channels + self.num_heads) + (self.conv_width + 1) * channels + values

    def matrix_shape(self, num_ranks: int = 1) -> tuple[int, ...]:
        return self.num_heads // num_ranks, self.state_dim, self.head_dim


@dataclass(frozen=True, kw_only=True)
class ShortConvShape(RecurrentShape):
    """Gated convolution of LFM2. Ranks share the channels."""

    hidden_size: int
    conv_width: int
    has_bias: bool = False

    @property
    def parts(self) -> tuple[StatePart, ...]:
        return (StatePart(self.hidden_size, (1,)),)

    @property
    def num_parameters(self) -> int:
        return self.hidden_size * (4 * self.hidden_size + self.conv_width)

    def matrix_shape(self, num_ranks: int = 1) -> tuple[int, ...]:
        return (0,)

"""MLP of a dense layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.model.shape import ModelConfig
from engine.kernels.gated_mul import SILU, GatedActivation
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.norms import mlp_norms, read_norm
from engine.weights.checkpoint import Shape, expected_matrices


@dataclass(frozen=True)
class GatedMLP:
    """MLP x + output_norm(down(act(gate(norm(x))) * up(norm(x)))) * residual_scale; relu2 has no gate."""

    # Rows: gate, up; or up.
    gate_up: Linear
    down: RowParallelLinear
    activation: GatedActivation = SILU
    # Norm of the output.
    output_norm: RMSNorm | None = None
    residual_scale: float = 1.0

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int | str) -> GatedMLP:
        """layer: index of a layer, or a tensor prefix outside the model's layers for an MLP like the first layer's."""
        name, index = (layer, 0) if isinstance(layer, str) else (f"model.layers.{layer}.mlp", layer)
        features = reader.parallel.span(config.layers[index].intermediate_size)
        after = mlp_norms(config).after if isinstance(layer, int) else ""
        return cls(
            reader.linear(
                {f"{name}.{matrix}": features for matrix in config.activation.input_matrices},
                has_bias=config.has_mlp_bias,
            ),
            reader.row_parallel(f"{name}.down_proj", features, has_bias=config.has_mlp_bias),
            GatedActivation.of(config.activation),
            read_norm(reader, config, f"model.layers.{layer}.{after}") if after else None,
            config.residual_scale,
        )

    def __call__(self, x: Residual, *, norm: RMSNorm | None) -> None:
        x.add_product(
            self.down,
            x.into(self.gate_up, norm=norm),
            before=self.activation,
            after=self.output_norm,
            scale=self.residual_scale,
        )

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on the number of tokens."""
        return is_plain(self.gate_up, self.down)


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer's MLP."""
    name, features = f"model.layers.{layer}.mlp", config.layers[layer].intermediate_size
    inputs = config.activation.input_matrices
    return mlp_tensors(name, inputs, config.hidden_size, features, has_bias=config.has_mlp_bias)


def mlp_tensors(name: str, inputs: Sequence[str], width: int, features: int, *, has_bias: bool) -> dict[str, Shape]:
    """Return the tensors of an MLP or expert. inputs: names of its first matrices, each (features, width)."""
    shapes = dict.fromkeys(inputs, (features, width)) | {"down_proj": (width, features)}
    return expected_matrices(name, {matrix: (shape, has_bias) for matrix, shape in shapes.items()})

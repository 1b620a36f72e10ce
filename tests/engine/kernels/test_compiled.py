"""Whole steps of large models compiled for an absent GPU: kernels fit its registers and memory.

Finds what the interpreter does not: launches that a GPU would reject, host tensors among device tensors, and host waits
inside a step. The last two raise inside the program that is run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.grids import quick

triton = pytest.importorskip("triton")

_ROOT = Path(__file__).parents[3]
# Per program, from the CUDA programming guide's table of compute capabilities.
SHARED_KIB = {"9.0": 227, "8.0": 163, "10.0": 227}
# A few spilled registers outside of loops are acceptable.
_STACK_BYTES = 80
_PRODUCTS = {"9.0": "wgmma.mma_async", "8.0": "mma.sync"}
# Prompt tiles, large enough for the widest instruction, unlike rows of a few heads or tokens.
_WIDE = {"_attend_tile"}


def launches(capability: str, *cases: str, program: str = "compiled_steps") -> list[dict[str, Any]]:
    found = results(capability, *cases, program=program)
    return [launch | {"case": of["case"]} for of in found for launch in of["launches"]]


def results(capability: str, *cases: str, program: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.engine.kernels.{program}", capability, *cases]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [of["case"] for of in found] == list(cases)
    return found


def check(capability: str, *cases: str, program: str = "compiled_steps") -> None:
    for launch in launches(capability, *cases, program=program):
        place = f"{launch['case']}: {launch['name']}{launch['grid']}"
        assert launch["stack_bytes"] <= _STACK_BYTES, f"{place} spills {launch['stack_bytes']} bytes per thread"
        assert launch["shared_bytes"] <= SHARED_KIB[capability] << 10, place
        if launch["name"] in _WIDE:
            assert _PRODUCTS[capability] in launch["ptx"], f"{place} multiplies without {_PRODUCTS[capability]}"


_KINDS = ("bf16", "fp8", "int8", "int4")
_HEADS = ("eagle", "medusa", "eagle1", "mtp", "mtp/deepseek_v32")
# Minimum resident warps per multiprocessor, for kernels that wait for memory or products; limited by its 65536
# registers and shared memory. A prompt tile fills half of an A100's.
_WARPS = {"_attend_part": 8, "_attend_tile": 8, "_attend_latents": 8, "_gather_rows": 32}
_WARPS_OF_AN_A100 = _WARPS | {"_attend_tile": 4}
_PROCESSOR_KIB = {"9.0": 228, "8.0": 164, "10.0": 228}
# Instructions of the longest loop over keys or latent values, counted with the pinned Triton, for each of _KINDS.
_INSTRUCTIONS = {
    "9.0": {
        "_attend_part": (327, 1140, 1407, 1997),
        "_attend_tile": (716, 1101, 1408, 1464),
        "_attend_latents": (576, 1184, 1066),
        "_latent_values": (377, 377, 377),
    },
    "8.0": {
        "_attend_part": (324, 2184, 1707, 2031),
        "_attend_tile": (1041, 1091, 966, 931),
        "_attend_latents": (512, 1152, 1066),
        "_latent_values": (328, 328, 328),
    },
    "10.0": {
        "_attend_part": (327, 1091, 1382, 1950),
        "_attend_tile": (696, 1530, 1838, 1349),
        "_attend_latents": (554, 1172, 1055),
        "_latent_values": (358, 358, 358),
    },
}
# The same for heads of further families, by capability: of _attend_part and _attend_tile.
_OF_FAMILIES = {
    "bf16/gpt_oss": {"9.0": (266, 534), "8.0": (264, 570), "10.0": (252, 586)},
    "bf16/gemma2": {"9.0": (386, 756), "8.0": (353, 995), "10.0": (370, 741)},
    "fp8/gemma2": {"9.0": (711, 1027), "8.0": (1251, 995), "10.0": (696, 1144)},
    "bf16/gemma4": {"9.0": (695, 704), "8.0": (607, 611), "10.0": (669, 681)},
    "int8/gemma4": {"9.0": (1486, 919), "8.0": (1734, 902), "10.0": (1443, 914)},
    "fp8/gemma4": {"9.0": (1130, 1045)},
    "int4/gemma4": {"9.0": (1850, 1305)},
    "fp8/gpt_oss": {"9.0": (765, 914)},
    "int4/gpt_oss": {"9.0": (1226, 1095)},
    "bf16/llama4": {"9.0": (370, 658), "8.0": (352, 932)},
    "fp8/llama4": {"9.0": (1181, 1154)},
    "bf16/gemma3": {"9.0": (364, 589)},
    "fp8/gemma3": {"9.0": (687, 944)},
    "int4/gemma3": {"9.0": (1076, 998), "8.0": (1076, 1022)},
}
# Minimum resident warps of kernels that only move numbers; a multiprocessor runs 64.
_STORING_WARPS = {"_store_heads": 24, "_rotate": 24, "_write_kv": 12}
# Triton 3.6 needs up to 1.31 times as many.
_MORE = 1.1 if triton.__version__ == "3.9.0" else 1.35


def resident_warps(launch: dict[str, Any], capability: str) -> int:
    """Return the resident warps per multiprocessor if only this kernel runs."""
    warps = launch["num_warps"]
    by_registers = 65536 // (-(-launch["registers"] // 8) * 8 * 32 * warps)
    # The system reserves one KiB per program.
    by_memory = (_PROCESSOR_KIB[capability] << 10) // (launch["shared_bytes"] + 1024)
    return int(min(by_registers, by_memory) * warps)


def budget_of(capability: str, case: str, name: str) -> int:
    """Return the number of instructions of a loop."""
    if case in _KINDS:
        return _INSTRUCTIONS[capability][name][_KINDS.index(case)]
    return _OF_FAMILIES[case][capability][name == "_attend_tile"]


def check_loops(capability: str, *cases: str) -> None:
    """Check limits of key loops on any device, and the number of resident warps."""
    seen = set()
    for launch in launches(capability, *cases, program="compiled_attention"):
        name, place = launch["name"], f"{launch['case']}: {launch['name']}{launch['grid']} on {capability}"
        seen.add(name)
        assert launch["tensor_columns"] <= 512, f"{place} needs {launch['tensor_columns']} columns of tensor memory"
        loops = [loop for loop in launch["loops"] if loop["products"]]
        assert bool(loops) == (name in _INSTRUCTIONS[capability]), place
        for loop in loops:
            budget = budget_of(capability, launch["case"], name)
            assert loop["instructions"] <= _MORE * budget, f"{place}: a loop of {loop['instructions']} instructions"
            assert loop["conversions"] == 0, f"{place} converts {loop['conversions']} numbers one by one"
            if capability == "9.0":
                assert loop["serialized"] <= 3, f"{place}: ptxas has serialized the products"
            assert loop["byte_loads"] == 0, f"{place} loads {loop['byte_loads']} bytes one by one"
            assert loop["spills"] == 0, f"{place} spills {loop['spills']} registers"
        # Prompt tiles of wide heads fill half of any processor.
        wanted = _WARPS_OF_AN_A100 if capability == "8.0" or launch["case"] not in _KINDS else _WARPS
        assert resident_warps(launch, capability) >= wanted.get(name, 0), place
    assert {"_attend_part", "_attend_tile"} <= seen
    assert not set(cases) & set(_KINDS) or {"_attend_latents", "_gather_rows"} <= seen


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["9.0", "8.0", "10.0"])
def test_attention_loops(capability: str) -> None:
    check_loops(capability, *_KINDS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "capability"),
    quick([(case, at) for case, budgets in _OF_FAMILIES.items() for at in budgets], [("fp8/gpt_oss", "9.0")]),
)
def test_attention_loops_of_other_heads(case: str, capability: str) -> None:
    """Narrow heads with sinks, wide ones with soft caps, windows and chunks."""
    check_loops(capability, case)


# Instructions of the loop that scores a block of keys for a decoding row, and for a query of a prompt; and of the loops
# of the choice among 2048 scores.
_OF_SCORES = {"9.0": (433, 337), "8.0": (596, 483), "10.0": (341, 280)}
_OF_CHOICE = (1090, 150)
# Of _attend_latents with blocks of one position.
_OF_CHOSEN = {"bf16": {"9.0": 578, "8.0": 523, "10.0": 557}, "fp8": {"9.0": 1221, "8.0": 1173, "10.0": 1209}}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", _OF_SCORES)
@pytest.mark.parametrize("pool", _OF_CHOSEN)
def test_sparse_attention(pool: str, capability: str) -> None:
    """Index scores, the choice of positions, and attention to them."""
    loops: dict[str, list[int]] = {}
    for launch in launches(capability, f"sparse/64/{pool}", program="compiled_attention"):
        name = launch["name"]
        place = f"{name}{launch['grid']} of {pool} on {capability}"
        assert launch["stack_bytes"] <= (8 if name == "_latent_values" else 0), f"{place} spills"
        assert resident_warps(launch, capability) >= {"_choose_slots": 24, "_share_out": 4}.get(name, 8), place
        found = [loop for loop in launch["loops"] if loop["products"] or name == "_choose_slots"]
        loops.setdefault(name, []).extend(loop["instructions"] for loop in found)
        assert not any(loop["conversions"] or loop["byte_loads"] or loop["serialized"] > 3 for loop in found), place
    for name, budgets in (
        ("_score_keys", _OF_SCORES[capability]),
        ("_choose_slots", _OF_CHOICE),
        ("_attend_latents", (_OF_CHOSEN[pool][capability],)),
    ):
        assert len(loops[name]) == len(budgets)
        for count, budget in zip(sorted(loops[name], reverse=True), budgets, strict=True):
            assert count <= _MORE * budget, f"{name} of {pool} on {capability}: a loop of {count} instructions"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", _PRODUCTS)
@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "gemma2", "gemma4"])
@pytest.mark.parametrize("pool", _KINDS)
def test_store_kernels(pool: str, family: str, capability: str) -> None:
    """Heads of 64 to 512 features, rotated as a whole, in part and not at all."""
    found = launches(capability, f"stores/{pool}/{family}", program="compiled_attention")
    assert {launch["name"] for launch in found} == set(_STORING_WARPS)
    for launch in found:
        place = f"{launch['name']}{launch['grid']} of {pool}/{family} on {capability}"
        assert launch["stack_bytes"] <= 8, f"{place} spills {launch['stack_bytes']} bytes per thread"
        assert resident_warps(launch, capability) >= _STORING_WARPS[launch["name"]], place


# Spilled registers of a step, bytes per thread, and instructions of a step, with the pinned Triton.
_LATENTS_OF_128_HEADS = {"fp8": (104, 536, 1846), "int8": (104, 536, 1798)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", _LATENTS_OF_128_HEADS)
def test_latent_attention_of_128_heads_does_not_regress(kind: str) -> None:
    """With 8 bits, 64 heads at a time spill registers on an H100. This test pins the cost, it does not approve it.

    With 32 heads nothing spills, but a head needs nearly twice the instructions.
    """
    spills, stack_bytes, instructions = _LATENTS_OF_128_HEADS[kind]
    found = launches("9.0", f"latents/128/{kind}", program="compiled_attention")
    (launch,) = (launch for launch in found if launch["name"] == "_attend_latents")
    (loop,) = (loop for loop in launch["loops"] if loop["products"])
    assert loop["spills"] <= spills and launch["stack_bytes"] <= stack_bytes
    assert loop["instructions"] <= _MORE * instructions
    assert loop["conversions"] == loop["byte_loads"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["qwen3_moe/int8", "deepseek_v32/fp8_e4m3"])
def test_steps_fit_the_gpu(case: str) -> None:
    check("9.0", case)


# Not for latent attention.
_INT4 = {"llama": ("int4",), "qwen3_moe": ("int4",)}


@pytest.mark.slow
@pytest.mark.parametrize("capability", _PRODUCTS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
def test_every_pool_dtype_fits_every_gpu(family: str, capability: str) -> None:
    check(
        capability, *(f"{family}/{pool_dtype}" for pool_dtype in ("auto", "fp8_e4m3", "int8", *_INT4.get(family, ())))
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", _HEADS)
def test_draft_heads_fit_the_gpu(kind: str) -> None:
    check("9.0", kind, program="compiled_heads")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", _PRODUCTS)
@pytest.mark.parametrize("case", ["qwen3_next/auto", "nemotron_h/auto"])
def test_recurrent_layers_fit_the_gpu(capability: str, case: str) -> None:
    check(capability, case)


_HANDOFFS = ("bfloat16/fp8_e4m3/1", "bfloat16/raw/1", "bfloat16/int8/2", "bfloat16/int4/2")
_HANDOFFS += ("fp8_e4m3/raw/1", "int8/raw/4", "int4/raw/1")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", quick(_HANDOFFS, _HANDOFFS[:1]))
def test_handoffs_compile_nothing_after_warm_up(case: str) -> None:
    (found,) = results("9.0", case, program="compiled_handoffs")
    assert len(found["runs"]) > 2, "ranks must exchange subsets of this rank's heads"
    assert {launch["name"] for launch in found["launches"]} == {"_pack_kv", "_word_sum", "_unpack_kv"}
    assert not found["late"]

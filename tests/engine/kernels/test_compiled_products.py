"""Low-bit products compiled for an absent GPU, for the row counts of every kind of step.

Finds tiles that exceed registers or shared memory, products without tensor cores, and products still in flight when the
next loop iteration starts, whose operand registers would be reused.
"""

from __future__ import annotations

import re

import pytest

from tests.engine.kernels.test_compiled import SHARED_KIB, launches, resident_warps

triton = pytest.importorskip("triton")

_IS_PINNED = triton.__version__ == "3.9.0"
_DEVICES = tuple(SHARED_KIB)
_STACK_BYTES = {"9.0": 0, "8.0": 0 if _IS_PINNED else 8, "10.0": 0 if _IS_PINNED else 8}
# Instructions of the longest loop over weights, counted with the pinned Triton on these devices. Those of Q6_K for
# hundreds of rows on sm_100 were a trap, without a loop, until 2026-11-27.
_INSTRUCTIONS = {
    "fp8": (329, 419, 342),
    "fp8 blocks": (339, 486, 396),
    "MXFP8": (480, 482, 627),
    "int8 rows": (94, 422, 104),
    "int8 channels": (299, 389, 312),
    "Q8_0": (639, 693, 588),
    "int8 zeros": (365, 428, 380),
    "NVFP4": (827, 814, 1137),
    "MXFP4": (749, 727, 1116),
    "NF4": (1039, 1073, 1439),
    "int4 channels": (408, 346, 613),
    "AWQ": (670, 542, 838),
    "Q4_0": (781, 796, 968),
    "Q4_1": (1279, 1285, 1333),
    "Q4_K": (1293, 1292, 1353),
    "Q5_K": (1462, 1427, 1495),
    "Q6_K": (1247, 1264, 1287),
}
# Forms whose programs share a processor: two of four warps, or one of eight.
_FILL_A_PROCESSOR = {"MXFP8", "int8 zeros", "NVFP4", "MXFP4", "NF4", "int4 channels"}
# Triton 3.6 needs up to 1.42 times as many.
_MORE = 1.1 if _IS_PINNED else 1.5


def check(form: str, capability: str) -> None:
    found = launches(capability, form, program="compiled_products")
    assert len(found) >= 4
    for launch in found:
        place = f"{form}: {launch['name']}{launch['grid']} on {capability}"
        most = _STACK_BYTES[capability]
        assert launch["stack_bytes"] <= most, f"{place} spills {launch['stack_bytes']} bytes per thread"
        assert launch["shared_bytes"] <= SHARED_KIB[capability] << 10, place
        assert launch["tensor_columns"] <= 512, f"{place} needs {launch['tensor_columns']} columns of tensor memory"
        if launch["name"] == "_product" and form in _FILL_A_PROCESSOR:
            assert resident_warps(launch, capability) >= 8, f"{place}: one program per processor"
        for loop in launch["loops"]:
            if launch["name"] == "_product" and loop["products"]:
                check_loop(form, capability, loop, place)
        if launch["name"] == "_product" and capability == "9.0":
            assert "wgmma.mma_async" in launch["ptx"], place
            # Both operands of int8 rows are in shared memory.
            if form != "int8 rows":
                assert not turns_with_products_under_way(launch["ptx"]), place


def check_loop(form: str, capability: str, loop: dict[str, int], place: str) -> None:
    budget = _MORE * _INSTRUCTIONS[form][_DEVICES.index(capability)]
    assert loop["instructions"] <= budget, f"{place}: a loop of {loop['instructions']} instructions"
    assert loop["spills"] == 0, f"{place} spills {loop['spills']} registers"
    assert loop["byte_loads"] == 0, f"{place} loads {loop['byte_loads']} bytes one by one"
    assert loop["conversions"] == 0, f"{place} converts {loop['conversions']} numbers one by one"


def turns_with_products_under_way(ptx: str) -> int:
    """Return the number of backward branches at which a committed group of products has not been waited for."""
    labels: set[str] = set()
    found, is_pending = 0, False
    for line in ptx.splitlines():
        if label := re.match(r"(\$\S+):", line):
            labels.add(label[1])
        elif "wgmma.commit_group" in line:
            is_pending = True
        elif "wgmma.wait_group" in line:
            is_pending = False
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$\S+);", line)) and branch[1] in labels:
            found += is_pending
    return found


def test_products_in_flight_are_detected() -> None:
    turn = "$L1:\nwgmma.mma_async;\nwgmma.commit_group.sync.aligned;\n{}@%p1 bra $L1;\nwgmma.wait_group 0;\n"
    assert turns_with_products_under_way(turn.format("")) == 1
    assert turns_with_products_under_way(turn.format("wgmma.wait_group.sync.aligned 0;\n")) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", _DEVICES)
@pytest.mark.parametrize("form", _INSTRUCTIONS)
def test_every_format_fits_every_gpu(form: str, capability: str) -> None:
    check(form, capability)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", _DEVICES)
@pytest.mark.parametrize("form", [form for form in _INSTRUCTIONS if form not in ("int8 rows", "Q8_0", "Q4_1")])
def test_expert_products_fit_every_gpu(form: str, capability: str) -> None:
    found = launches(capability, f"experts of {form}", program="compiled_products")
    assert len(found) >= 2
    for launch in found:
        place = f"{form}: {launch['grid']} on {capability}"
        assert launch["tensor_columns"] <= 512, place
        assert launch["shared_bytes"] <= SHARED_KIB[capability] << 10, place
        assert not any(loop["spills"] for loop in launch["loops"]), place
        assert capability != "9.0" or not turns_with_products_under_way(launch["ptx"]), place
        # Outside of the loop, with Triton 3.6.
        most = 8 if (form, capability) == ("Q6_K", "10.0") else 0
        assert launch["stack_bytes"] <= most, f"{place}: {launch['stack_bytes']} bytes"

"""Products in few bits as a GPU gets them: compiled for one that is not there, after every kind of step's rows.

Found are tiles that do not fit the registers or the shared memory, numbers that are not multiplied by tensor cores, and
products that are still under way when the next turn of a loop begins: their codes are in registers, which others get.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

_ROOT = Path(__file__).parents[3]
_SHARED_KIB = 227  # of one program, capability 9.0
_FORMS = [
    "fp8",
    "fp8 blocks",
    "int8 rows",
    "int8 channels",
    "Q8_0",
    "AWQ",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
]


def check(form: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.engine.kernels.compiled_products", "9.0", form]
    done = subprocess.run(program, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    launches: list[dict[str, Any]] = json.loads(done.stdout)["launches"]
    assert len(launches) >= 4
    for launch in launches:
        place = f"{form}: {launch['name']}{launch['grid']}"
        assert launch["stack_bytes"] == 0, f"{place} has {launch['stack_bytes']} bytes of each thread in memory"
        assert launch["shared_bytes"] <= _SHARED_KIB << 10, place
        if launch["name"] == "_product":
            assert "wgmma.mma_async" in launch["ptx"], place
            if form != "int8 rows":  # both of whose operands are in shared memory
                assert not turns_with_products_under_way(launch["ptx"]), place


def turns_with_products_under_way(ptx: str) -> int:
    """Branches backwards at which a group of products has been committed and not been waited for."""
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


def test_what_is_under_way_is_found() -> None:
    turn = "$L1:\nwgmma.mma_async;\nwgmma.commit_group.sync.aligned;\n{}@%p1 bra $L1;\nwgmma.wait_group 0;\n"
    assert turns_with_products_under_way(turn.format("")) == 1
    assert turns_with_products_under_way(turn.format("wgmma.wait_group.sync.aligned 0;\n")) == 0


@pytest.mark.timeout(300)
def test_a_product_fits_a_gpu() -> None:
    check("fp8")


@pytest.mark.slow
@pytest.mark.parametrize("form", _FORMS)
def test_every_form_fits_a_gpu(form: str) -> None:
    check(form)

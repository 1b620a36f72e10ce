"""How long one thread of a process keeps Python to itself while another waits for it."""

from __future__ import annotations

import sys

_TURN_S = 0.0005


def take_short_turns() -> None:
    """For a process whose steps and event loop are threads of one Python.

    A step has its kernels compute without Python's lock and then wants it back. Whoever has it meanwhile, such as a
    loop that takes in a prompt's KV, may keep it for 5 ms by default: a third of a decode step, in which no stream gets
    a token; and the loop waits as long for a step that chooses tokens. See docs/benchmarks/kv_path.md.
    """
    sys.setswitchinterval(_TURN_S)

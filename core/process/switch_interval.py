"""Switch interval of Python's threads."""

from __future__ import annotations

import sys

_TURN_S = 0.0005


def take_short_turns() -> None:
    """Shorten the switch interval, for a process that runs a step thread beside an event loop.

    A step releases the GIL for its kernels and then needs it back. By default another thread, such as a loop that
    receives a prompt's KV, may keep it for 5 ms: a third of a decode step. The loop waits as long for a step that
    samples. See docs/benchmarks/kv_path.md.
    """
    sys.setswitchinterval(_TURN_S)

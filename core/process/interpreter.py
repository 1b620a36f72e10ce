"""Tuning of Python's cycle collector and thread switching for processes with many concurrent requests.

Nearly all objects of a request are freed by reference counting. Only failed requests leave reference cycles, and each
collection stops every thread.
"""

from __future__ import annotations

import gc
import sys

# Allocation threshold of the youngest generation. One token for each of a thousand streams makes 19,000 live objects
# and no garbage. At Python's default of 700 they are scanned and promoted repeatedly, which triggers full collections.
_MANY = 50_000
# Switch interval; Python's default is 5 ms.
_TURN_S = 0.0005


def spare_the_old() -> None:
    """Exempt all current objects from collection and raise the threshold. Call it once start-up is complete.

    Otherwise Python scans a router's 85,000 initial objects about once every hundred requests, and every stream pauses
    for 53 ms. With 1,000 streams it scans 358,000 objects every 4 s, for 200 ms. See docs/benchmarks/router.md.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY, *gc.get_threshold()[1:])


def take_short_turns() -> None:
    """Shorten the switch interval, for a process that runs a step thread and an event loop.

    A step releases the GIL for its kernels and then needs it back. By default another thread, such as a loop that
    receives a prompt's KV, may keep it for 5 ms: a third of a decode step. Likewise the loop may wait 5 ms for a step
    that samples. See docs/benchmarks/kv_path.md.
    """
    sys.setswitchinterval(_TURN_S)

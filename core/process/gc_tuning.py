"""What Python's collector of cycles may cost a process that answers many at a time.

Almost all that a request leaves is freed when nothing refers to it any more. The collector is for the rest, circles,
which requests leave when they fail; and it stops every thread while it looks for them.
"""

from __future__ import annotations

import gc

# New objects that are alive at the same time, after which the collector looks. A thousand streams that get a token at
# once have 19,000, none of which is garbage: at Python's own 700 they are looked at again and again, count as old after
# two looks, and so bring about looks at everything.
_MANY = 50_000


def spare_the_old() -> None:
    """Once a process has all that it keeps for good: none of that is looked through again, and the rest less often.

    What a router has when it opens, 85,000 objects, takes 53 ms to look through, in which no stream gets a token; that
    came about every hundred requests or so. With 1,000 streams it is 358,000 objects and 200 ms, which came about every
    4 seconds: see docs/benchmarks/router.md.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY, *gc.get_threshold()[1:])


def collect_the_new() -> None:
    """What has become garbage of all that came after `spare_the_old`; milliseconds, as a rule."""
    gc.collect()

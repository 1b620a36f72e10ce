"""Host time of a decode step: python -m tests.gpu_check.host [--rehearse]"""

from __future__ import annotations

import sys

from benchmarks.engine.host import bench_host
from tests.gpu_check.rows import tell

_MOST_MS = 0.2  # with a model that takes no time, at 64 rows of 2,048 tokens


def main() -> None:
    is_rehearsal = "--rehearse" in sys.argv
    batches, contexts = ([2], [32]) if is_rehearsal else ([64], [2048])
    for row in bench_host(batches=batches, contexts=contexts, vocabulary=1024, threads=1)["host"]:
        name = f"host of a step, {row['batch']} x {row['context']}"
        tell(name, row["host_ms"], "ms", at_most=None if is_rehearsal else _MOST_MS)


if __name__ == "__main__":
    main()

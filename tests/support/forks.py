"""Processes that start in a tenth of a second, forked from a server that has imported their modules.

Python has one such server per process, so this module lists the imports for all tests.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

_IMPORTED = (  # packages that are not installed are ignored
    "kvtransfer.links.backends",
    "tests.engine.gang",
    "prefill_worker.actor",
    "decode_worker.actor",
    "tests.support.rank_in_process",
)

os.environ["PYTHONPATH"] = os.pathsep.join(  # for the server, which does not inherit sys.path
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# The default check for a GPU initializes CUDA in the server, and forked processes could not use CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(list(_IMPORTED))

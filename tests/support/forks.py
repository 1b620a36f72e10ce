"""Processes that start in a tenth of a second: forked from a server that has imported what tests' processes need.

Python keeps one such server per process, so that what it imports is said here for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

_IMPORTED = (  # those that are missing on this machine are left out
    "kvtransfer.links.backends",
    "tests.engine.gang",
    "prefill_worker.actor",
    "decode_worker.actor",
    "tests.support.rank_in_process",
)

os.environ["PYTHONPATH"] = os.pathsep.join(  # the server's, which does not look at our sys.path
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Asked otherwise, whether there is a GPU starts CUDA in the server, and what is forked from it could not use CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(list(_IMPORTED))

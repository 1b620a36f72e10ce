"""Entry point of `python -m benchmarks COMMAND`, from a checkout."""

from __future__ import annotations

import sys

from benchmarks.app import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

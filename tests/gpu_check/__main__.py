"""Entry point: python -m tests.gpu_check. See tests/gpu_check/check.py."""

from tests.gpu_check.check import main

main()

"""python -m tests.gpu_check: see tests/gpu_check/check.py"""

from tests.gpu_check.check import main

main()

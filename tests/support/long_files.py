"""The longest files of the default run. A parallel run starts them first: one at the end would leave a core idle."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

SECONDS = {  # on two cores; a file that is not here comes after them
    "tests/cluster/cli/test_cli.py": 24,
    "tests/e2e/test_failover.py": 19,
    "tests/engine/kernels/test_compiled.py": 12,
    "tests/e2e/test_bench_and_profile.py": 11,
    "tests/e2e/test_heads.py": 11,
    "tests/engine/kernels/test_attention.py": 10,
    "tests/engine/model/test_models.py": 10,
    "tests/engine/runner/test_decode_graphs.py": 10,
    "tests/e2e/test_tools.py": 10,
    "tests/test_gpu_check.py": 10,
    "tests/e2e/test_windows.py": 9,
    "tests/e2e/test_both_endpoints.py": 9,
    "tests/engine/test_smollm2.py": 9,
    "tests/kvtransfer/links/test_links.py": 9,
    "tests/e2e/test_redis_outage.py": 9,
    "tests/e2e/test_mixed_versions.py": 9,
    "tests/docs/test_clients.py": 9,
    "tests/e2e/test_disaggregated.py": 9,
    "tests/e2e/test_token_features.py": 9,
    "tests/e2e/test_kv_faults.py": 8,
    "tests/e2e/test_prefix_fetch.py": 8,
    "tests/e2e/test_tiers.py": 8,
    "tests/test_packages.py": 8,
    "tests/e2e/test_overload.py": 8,
    "tests/cluster/cli/test_over_ssh.py": 8,
    "tests/engine/test_async_gang.py": 7,
    "tests/engine/quantization/test_rounding.py": 7,
    "tests/engine/scheduler/test_windows.py": 7,
    "tests/e2e/test_migration.py": 7,
    "tests/engine/kernels/quant/test_quantized_matmul.py": 7,
    "tests/core/model/test_source.py": 7,
    "tests/engine/runner/test_parallel.py": 7,
    "tests/engine/test_spec_decode.py": 7,
    "tests/golden/test_golden.py": 6,
    "tests/e2e/test_identity.py": 6,
    "tests/engine/kernels/test_launches.py": 6,
}


class LongestFirst(OrderedDict[str, Any]):
    """Queue by file: `popitem(last=False)` takes the longest file."""

    def popitem(self, last: bool = True) -> tuple[str, Any]:
        if last:
            return super().popitem()
        longest = max(self, key=lambda file: SECONDS.get(file, 0))  # the first of equals
        return longest, self.pop(longest)

"""Least squares without negative numbers: for what things cost."""

from __future__ import annotations

import numpy as np

_RIDGE = 1e-6  # of what was seen of a feature: where two of them never differ, each gets a share


def non_negative(sums: np.ndarray, targets: np.ndarray) -> list[float]:
    """The solution of sums · x = targets without what would have to be negative, which is left out worst first."""
    scale = np.sqrt(np.diag(sums))
    kept = [i for i in range(len(targets)) if scale[i] > 0]
    solved = np.zeros(len(targets))
    while kept:
        scaled = sums[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
        found = np.linalg.solve(scaled + _RIDGE * np.eye(len(kept)), targets[kept] / scale[kept])
        if found.min() >= 0:
            solved[kept] = found / scale[kept]
            break
        del kept[int(found.argmin())]
    return [float(value) for value in solved]

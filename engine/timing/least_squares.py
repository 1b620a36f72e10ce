"""Non-negative least squares, for cost models."""

from __future__ import annotations

import numpy as np

# Relative to each feature; gives each of two identical features a share.
_RIDGE = 1e-6


def non_negative(sums: np.ndarray, targets: np.ndarray) -> list[float]:
    """Return the solution of sums · x = targets with x >= 0.

    Drops negative terms one by one, the most negative first.
    """
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

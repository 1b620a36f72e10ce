"""Mean and quantiles, in the form of this project's reports."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_QUANTILES = (50, 90, 99)


def spread(values: ArrayLike, counts: ArrayLike | None = None) -> dict[str, float]:
    """Return mean, p50, p90 and p99 of `values`, weighted by `counts`; all 0 for no values."""
    found = np.asarray(values, dtype=float)
    if not len(found):
        return {"mean": 0.0} | {f"p{q}": 0.0 for q in _QUANTILES}
    weights = np.ones(len(found)) if counts is None else np.asarray(counts, dtype=float)
    order = np.argsort(found)
    found, weights = found[order], weights[order]
    places = np.cumsum(weights)
    result = {"mean": float(np.average(found, weights=weights))}
    for q in _QUANTILES:
        place = min(int(np.searchsorted(places, places[-1] * q / 100)), len(found) - 1)
        result[f"p{q}"] = float(found[place])
    return result

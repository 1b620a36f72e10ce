"""Asking the router, through its HTTP door, how many replicas it sees.

By urllib: `cluster status` need not wait half a second until httpx is imported.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from cluster.words.errors import DeployError

_ANSWER_S = 3.0
_POLL_S = 0.1
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


def health(http: str) -> dict[str, int] | None:
    """How many replicas of each role the router sees; None when it does not answer."""
    try:
        with _DIRECT.open(f"{http}/health", timeout=_ANSWER_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503: it answers, and says what it lacks
        with error:
            body = error.read()
    except OSError:
        return None
    try:
        counts: Any = json.loads(body)
    except ValueError:
        return None
    return {role: int(count) for role, count in counts.items()} if isinstance(counts, dict) else None


def await_seen(http: str, wanted: Mapping[str, int], *, within_s: float) -> None:
    """Until the router sees at least `wanted` replicas per role. Raises DeployError."""
    deadline = time.monotonic() + within_s
    while (seen := health(http)) is None or any(seen.get(role, 0) < count for role, count in wanted.items()):
        if time.monotonic() > deadline:
            what = f"sees {seen} of {dict(wanted)}" if seen else "does not answer"
            raise DeployError(f"the replicas are ready, but the router at {http} {what}")
        time.sleep(_POLL_S)

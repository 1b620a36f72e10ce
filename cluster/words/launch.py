"""What every process of a deployment is started with, ranks and routers alike."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.words.credentials import Credentials
from cluster.words.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The one thing by which secrets reach a process: Ray carries it as an actor's argument and, for routers, as what
    Serve binds. So it lies in Ray's control store, in clear, and is as safe as that is (docs/SECURITY.md, 7)."""

    spec: Spec
    log_dir: str  # on every node
    credentials: Credentials

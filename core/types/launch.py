"""What every process of a deployment is started with, ranks and routers alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.spec.schema import Spec


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The one thing by which secrets reach a process: Ray carries it as an actor's argument and, for routers, as what
    Serve binds. So it lies in Ray's control store, in clear, and is as safe as that is (docs/SECURITY.md, 7).

    It travels as plain values, the spec as an operator might have written it: so that a process of a newer version has
    its own defaults for what an older controller does not know.
    """

    spec: Spec
    log_dir: str  # on every node
    credentials: DeploymentSecrets

    def __reduce__(self) -> tuple[Callable[..., Launch], tuple[Any, ...]]:
        """How it is pickled, which Ray does with all that it carries."""
        credentials = self.credentials
        return _arrived, (self.spec.model_dump(mode="json"), self.log_dir, credentials.secret, credentials.index_url)


def _arrived(spec: dict[str, Any], log_dir: str, secret: bytes, index_url: str) -> Launch:
    credentials = DeploymentSecrets(secret=secret, index_url=index_url)
    return Launch(spec=parse_spec(spec, origin="the spec of this deployment"), log_dir=log_dir, credentials=credentials)

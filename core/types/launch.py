"""Start parameters of every process of a deployment, rank or router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.spec.schema import Spec


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Start parameters of a process. The only carrier of secrets to a process.

    Ray carries it as an actor's argument and, for routers, as an argument bound by Serve. It therefore lies in Ray's
    control store in clear text and is as safe as that store (docs/SECURITY.md, 7).

    The spec is pickled as plain values without resolved types, so that a process of a newer version applies its own
    defaults for keys that an older controller does not have.
    """

    spec: Spec
    log_dir: str  # on every node
    credentials: DeploymentSecrets

    def __reduce__(self) -> tuple[Callable[..., Launch], tuple[Any, ...]]:
        """Pickle as plain values; Ray pickles everything it carries."""
        credentials = self.credentials
        return _arrived, (self.spec.model_dump(mode="json"), self.log_dir, credentials.secret, credentials.index_url)


def _arrived(spec: dict[str, Any], log_dir: str, secret: bytes, index_url: str) -> Launch:
    credentials = DeploymentSecrets(secret=secret, index_url=index_url)
    return Launch(spec=parse_spec(spec, origin="the spec of this deployment"), log_dir=log_dir, credentials=credentials)

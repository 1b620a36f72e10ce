"""How a process that Ray has started comes by its papers: from the deployment's controller, again and again."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.control.desired import CONTROLLER, namespace
from cluster.identity.key_pair import KeyPair
from cluster.identity.renewal import Renewal
from cluster.words.errors import ClusterError, DeployError
from cluster.words.papers import Certificate, Identity, Papers
from cluster.words.process_name import ProcessName

_ASK_S = 60.0  # longer than a controller needs to come back after its death


def open_identity(name: ProcessName, *, tls: str) -> Identity:
    """Of this process, renewed for as long as it lives; `tls` as in the spec. Blocks. Raises ClusterError."""
    if tls == "off":
        return Identity(name, None)
    identity = Identity(name, _obtain(name))
    Renewal(identity, lambda: _obtain(name)).start()
    return identity


def _obtain(name: ProcessName) -> Papers:
    """The key is made here, and stays here."""
    keys = KeyPair()
    try:
        controller: Any = ray.get_actor(CONTROLLER, namespace=namespace(name.deployment))
        certificate: Certificate = ray.get(controller.certify.remote(name, keys.request), timeout=_ASK_S)
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise DeployError(f"no certificate for {name}: {error.cause}") from error
    except (RayError, GetTimeoutError, ValueError) as error:
        raise DeployError(f"no certificate for {name}: {' '.join(str(error).split())}") from error
    return keys.papers(certificate)

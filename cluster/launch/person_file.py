"""The file by which a person operates a deployment without Ray: where to ask, and the papers to show there.

It is made by `cluster operators create`, holds a private key, and is readable by its owner alone.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from core.identity.credentials import Certificate, Identity, TlsCredentials
from core.identity.process_name import ProcessName
from core.types.errors import SpecError

CERTIFICATE = "CLUSTER_CERTIFICATE"  # in the environment: such a file, in place of Ray
_OPEN_TO_OTHERS = 0o077


@dataclass(frozen=True, kw_only=True)
class PersonFile:
    """What is in the file of a person: where the controller is, and the person's identity."""

    address: str  # HOST:PORT of the controller
    identity: Identity

    @staticmethod
    def check_free(path: Path) -> None:
        """Raises SpecError where there is a file already, or no directory for it."""
        if path.exists() or not path.absolute().parent.is_dir():
            raise SpecError(f"{path}: is there already, or has no directory; choose another file with --out")

    def save(self, path: Path) -> None:
        """Raises SpecError where there is a file already, or no room for one."""
        tls_credentials = self.identity.tls_credentials
        assert tls_credentials
        own = tls_credentials.certificate
        tree = {
            "address": self.address,
            "name": self.identity.name.uri,
            "key": tls_credentials.key.decode(),
            "certificate": own.chain.decode(),
            "authorities": own.authorities.decode(),
        }
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(json.dumps(tree, indent=1))
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror}; choose another file with --out") from None

    @classmethod
    def load(cls, path: str) -> PersonFile:
        """Raises SpecError."""
        try:
            if Path(path).stat().st_mode & _OPEN_TO_OTHERS:
                raise SpecError(f"{path} may be read by others than its owner: chmod 600 {path}")
            tree = json.loads(Path(path).read_text())
            name = ProcessName.parse(tree["name"])
            certificate = Certificate(
                chain=tree["certificate"].encode(), authorities=tree["authorities"].encode(), life_s=0.0
            )
            tls_credentials, address = (
                TlsCredentials(certificate=certificate, key=tree["key"].encode()),
                str(tree["address"]),
            )
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            name = None
        if name is None:
            raise SpecError(f"{path} is not what `cluster operators create` has written")
        return cls(address=address, identity=Identity(name, tls_credentials))

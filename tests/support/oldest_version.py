"""The oldest version that must interoperate with ours, checked out from git, and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from core.identity.credentials import Identity
from core.types.launch import Launch

# Processes of this and of every later commit interoperate: an upgrade may start from any of them, replica by replica.
# Update it when WIRE_VERSION changes (core/types/wire_version.py), or when no deployment is that old any more; then
# adapt tests/support/oldest_process.py to that version's names.
OLDEST = "04b79ae962bfb8dada67e3d890b0753b02c794f9"

_ROOT = Path(__file__).parents[2]
_END_S = 10.0


def check_out(directory: Path) -> Path:
    """Check out the tree of OLDEST into `directory`. Skips the test if git or the commit is missing."""
    try:
        archive = subprocess.run(["git", "archive", OLDEST], cwd=_ROOT, capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no git here, and so no older version to run")
    except subprocess.CalledProcessError as error:
        stderr = error.stderr.decode().strip()
        pytest.skip(f"commit {OLDEST[:7]} is not in the history here (git fetch --unshallow may bring it): {stderr}")
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
    return directory


class OldestProcess:
    """Rank or router that runs the code in `tree`, named by `identity`."""

    def __init__(self, tree: Path, launch: Launch, identity: Identity, *, log: Path, ceiling: int = 0) -> None:
        """ceiling: see tests.support.long_answers; in tokens, 0: none. Returns before the process serves."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_ROOT / "tests" / "support" / "oldest_process.py")],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._log = log
        assert identity.tls_credentials
        tls_credentials = identity.tls_credentials
        order = {
            "name": identity.name.uri,
            # Only the keys that were set: an older version may not have newer ones.
            "spec": launch.spec.model_dump(mode="json", exclude_unset=True),
            "index_url": launch.credentials.index_url,
            "secret": launch.credentials.secret.hex(),
            "tls_credentials": {
                "key": tls_credentials.key.decode(),
                "chain": tls_credentials.certificate.chain.decode(),
                "authorities": tls_credentials.certificate.authorities.decode(),
                "life_s": tls_credentials.certificate.life_s,
            },
            "ceiling": ceiling,
        }
        self.tell(json.dumps(order))

    def start(self) -> dict[str, Any]:
        """Wait until the process serves and return its addresses. Raises RuntimeError with its log."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                facts: dict[str, Any] = json.loads(line)
                return facts
        raise RuntimeError(f"the process exited: {self._log.read_text()[-2000:]}")

    def tell(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Let the process leave in order; kill it if it does not."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

"""deploy/ray/setup.sh on a host with only Python: everything else comes from a package index."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.package_proxy import package_proxy
from tests.deploy.ray_hosts import GATEWAY, ROOT, Hosts, why_not

_SETUP = "bash ~/xpyd/deploy/ray/setup.sh"


@pytest.fixture
def host() -> Iterator[Hosts]:
    directory = Path(tempfile.mkdtemp(prefix="xh"))
    directory.chmod(0o755)
    hosts = Hosts(directory, {"bare": "10.78.0.31"}, {}, is_bare=True)
    try:
        hosts.start()
        hosts.send(ROOT, "xpyd")
        yield hosts
    finally:
        hosts.end()


def pip_goes_by(proxy: str, hosts: Hosts) -> None:
    """Configure pip for the proxy, and with this environment's PIP_ settings."""
    pip_options = {
        name[4:].lower().replace("_", "-"): value for name, value in os.environ.items() if name.startswith("PIP_")
    }
    lines = [f"{name} = {value}" for name, value in (pip_options | {"proxy": proxy}).items()]
    (hosts.directory / "hosts" / "bare" / "etc" / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_host_with_only_python_serves_a_request(host: Hosts) -> None:
    with package_proxy(GATEWAY) as proxy:
        pip_goes_by(proxy, host)
        host.ssh("bare", _SETUP, within_s=1200)
        installed = host.ssh("bare", "~/.xpyd/venv/bin/pip freeze --exclude-editable").splitlines()
        constraints = {line.partition(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()}
        # The installed torch==2.13.0+cpu is the constraint's 2.13.0.
        others = [line for line in installed if line.partition("+")[0] not in constraints]
        assert not others, "not the versions that are tested"
        host.ssh("bare", "cluster deploy 1P1D --timeout 300", within_s=400)  # fetches a model
    with pytest.raises(subprocess.CalledProcessError):
        host.ssh("bare", "~/.xpyd/venv/bin/pip download --no-deps --retries 0 -d /tmp/x xgrammar")
    host.ssh("bare", _SETUP, within_s=30)  # nothing to install: no network access
    assert "Paris" in host.ssh("bare", "cluster generate --max-tokens 8 --temperature 0 'The capital of France is'")
    host.ssh("bare", "cluster down")
    assert not host.processes("bare")

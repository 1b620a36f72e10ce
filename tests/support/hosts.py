"""Two hosts on one machine: this one, and a network namespace at the other end of a cable that can be cut.

A cut drops packets silently. Needs root and the `ip` command.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.slow_cable import Slowness, slow_cable

_CLONE_NEWNET = 0x40000000
_LOCK = Path("/run/lock/xpyd-test-cable")
_NETWORK, _NEAR, _FAR = "198.18.77.0/30", "198.18.77.1", "198.18.77.2"  # RFC 2544: reserved for network tests


@dataclass(frozen=True)
class Host:
    address: str
    network: str = ""  # name of the namespace; empty: this machine's own


@dataclass(frozen=True)
class Cable:
    near: Host
    far: Host
    interface: str  # at the near end

    def cut(self) -> None:
        _ip("link", "set", self.interface, "down")

    def mute(self) -> None:
        """Drop everything from the far host. The near interface stays up."""
        _ip("-n", self.far.network, "route", "add", "blackhole", f"{_NEAR}/32")

    def mend(self) -> None:
        _ip("link", "set", self.interface, "up")


def can_be_made() -> bool:
    """Return whether this process may create network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and _may_unshare()


@contextmanager
def cable(slowness: Slowness | None = None) -> Iterator[Cable]:
    """Set up a cable. One at a time per machine, because the addresses are fixed; a second caller waits."""
    number = uuid.uuid4().hex[:6]
    network, near, far = f"xpyd-{number}", f"xpn{number}", f"xpf{number}"
    _ip("netns", "add", network)
    made = ExitStack()
    try:
        fcntl.flock(made.enter_context(_LOCK.open("w")), fcntl.LOCK_EX)
        if slowness:
            made.enter_context(slow_cable(near, far, slowness))
            _ip("link", "set", far, "netns", network)
        else:
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", network)
        _ip("address", "add", f"{_NEAR}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", network, "address", "add", f"{_FAR}/30", "dev", far)
        _ip("-n", network, "link", "set", far, "up")
        _ip("-n", network, "link", "set", "lo", "up")
        if slowness:
            usual = ["proto", "kernel", "scope", "link", "src", _FAR, "congctl", "cubic"]  # default of most hosts
            _ip("-n", network, "route", "replace", _NETWORK, "dev", far, *usual)
        yield Cable(Host(_NEAR), Host(_FAR, network), near)
    finally:
        subprocess.run(["ip", "link", "delete", near], capture_output=True, check=False)
        _ip("netns", "delete", network)
        made.close()


def enter(network: str) -> None:
    """Move this process into a namespace. Call it before other threads exist; new threads inherit it."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{network}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({network})")
    finally:
        os.close(descriptor)


def _may_unshare() -> bool:
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)

"""Form and classification of network addresses, and the check of unprotected links."""

from __future__ import annotations

import ipaddress

from core.types.errors import SpecError

# Links that authenticate their peer. All others, plugins included, are assumed to accept bytes from anyone who reaches
# their ports.
_PROTECTED = ("tcp",)


def format_address(host: str, port: int | str) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port of "host:port". Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. False for a name other than localhost: it may resolve anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return False


def is_private(host: str) -> bool:
    """True for loopback and for addresses that the internet does not route. False for names other than localhost."""
    if host == "localhost":
        return True
    try:
        return not ipaddress.ip_address(_bare(host)).is_global
    except ValueError:
        return False


def check_link(link: str, host: str, *, trust_network: bool) -> None:
    """Require a link that protects itself, a private network, or `trust_network`. Raises SpecError with one line.

    link: nccl, or a value of kv.host_link.
    """
    if link not in _PROTECTED and not (trust_network or is_private(host)):
        raise SpecError(
            f"kv.trust_network: {link} is unprotected and {host} is not a private address; use pools without GPUs "
            "and kv.host_link: tcp, or set kv.trust_network: true if the network is isolated"
        )


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").partition("%")[0]

"""Which networks an address belongs to, as far as the address says."""

from __future__ import annotations

import ipaddress

from core.types.errors import SpecError

# The links that let in nobody but their other end. All others, an operator's own among them, count as taking orders and
# bytes from whoever reaches their ports.
_PROTECTED = ("tcp",)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. A name other than localhost may be anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return False


def is_private(host: str) -> bool:
    """Loopback, or an address that the internet does not route. A name other than localhost may be anywhere."""
    if host == "localhost":
        return True
    try:
        return not ipaddress.ip_address(_bare(host)).is_global
    except ValueError:
        return False


def check_link(link: str, host: str, *, trust_network: bool) -> None:
    """A link must protect itself, be on a private network, or be trusted. Raises SpecError, one line.

    link: nccl, or a value of kv.host_link.
    """
    if link not in _PROTECTED and not (trust_network or is_private(host)):
        raise SpecError(
            f"kv.trust_network: {link} has no protection that we know of, and {host} is on no private network; use "
            "pools without GPUs and kv.host_link: tcp, or set kv.trust_network: true where nobody else is on that "
            "network"
        )


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").partition("%")[0]

"""Unprotected links are confined to private networks unless the operator trusts the network."""

import pytest

from core.types.errors import SpecError
from core.types.network import check_link, format_address, is_loopback, is_private, split_address

_LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"]
_PRIVATE = ["10.1.2.3", "172.16.0.1", "192.168.3.4", "100.64.0.7", "169.254.1.1", "fd00::7", "fe80::1%eth0"]
_ELSEWHERE = ["8.8.8.8", "172.32.0.1", "2600::1", "redis.example.org", "", "10.0.0.1.example.org"]


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("fe80::1%eth0", "[fe80::1%eth0]:5")],
)
def test_address_of_ipv6_has_brackets(host: str, address: str) -> None:
    assert format_address(host, 5) == address
    assert split_address(address) == (host.strip("[]"), 5)


def test_loopback_and_private_addresses() -> None:
    assert all(map(is_loopback, _LOOPBACK)) and not any(map(is_loopback, _PRIVATE + _ELSEWHERE))
    assert all(map(is_private, _LOOPBACK + _PRIVATE)) and not any(map(is_private, _ELSEWHERE))


@pytest.mark.parametrize("link", ["nccl", "gloo", "nixl", "our_links:Fast"])
@pytest.mark.parametrize("host", ["8.8.8.8", "2600::1"])
def test_blocks_without_protection_do_not_leave_private_networks(link: str, host: str) -> None:
    with pytest.raises(SpecError, match=rf"^kv\.trust_network: {link} .* {host} "):
        check_link(link, host, trust_network=False)
    check_link(link, host, trust_network=True)
    check_link(link, "10.0.0.1", trust_network=False)
    check_link("tcp", host, trust_network=False)

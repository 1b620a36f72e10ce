"""Scrapes of routers and workers, with the targets that a router lists for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Target:
    address: str
    labels: Mapping[str, str]


def targets_of(admin: str) -> list[Target]:
    """Return the targets that the router at "host:port" lists."""
    groups = httpx.get(f"http://{admin}/targets", verify=False, timeout=_TIMEOUT_S).raise_for_status().json()
    return [Target(address, group["labels"]) for group in groups for address in group["targets"]]


def scrape(address: str) -> Iterator[Sample]:
    answer = httpx.get(f"http://{address}/metrics", verify=False, timeout=_TIMEOUT_S).raise_for_status()
    for family in text_string_to_metric_families(answer.text):
        yield from family.samples


def scrape_workers(admin: str) -> Iterator[Sample]:
    """Yield the samples of all workers that the router at "host:port" lists and that answer."""
    for target in targets_of(admin):
        if target.labels["role"] != "router":
            try:
                yield from scrape(target.address)
            except httpx.TransportError:  # it has just died
                continue

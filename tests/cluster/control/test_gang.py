"""Where the ranks of a replica are put."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.control import gang
from cluster.control.desired import Desired
from cluster.control.gang import Gang
from cluster.control.placement import Node
from cluster.words.credentials import Credentials
from cluster.words.launch import Launch
from cluster.words.spec_file import parse_spec


@pytest.mark.parametrize(("failures", "chosen"), [({}, "a"), ({"host-a": 1}, "b"), ({"host-a": 1, "host-b": 2}, "a")])
async def test_a_node_where_starts_have_failed_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, failures: dict[str, int], chosen: str
) -> None:
    """It has no replica, and the most room: by that alone it would be chosen until the pool gives up."""
    selectors: list[list[dict[str, str]]] = []

    def reserve(bundles: object, *, bundle_label_selector: list[dict[str, str]], **more: Any) -> Any:
        selectors.append(bundle_label_selector)
        return SimpleNamespace(wait=lambda timeout_s: True)

    room = {"CPU": 8.0}
    nodes = [Node(id=name, name=f"host-{name}", ip="10.0.0.1", total=room, available=room) for name in "ab"]
    monkeypatch.setattr(gang, "live_nodes", lambda: nodes)
    monkeypatch.setattr(gang, "placement_group", reserve)
    monkeypatch.setattr(gang, "placement_group_table", lambda *group: {"bundles_to_node_id": {0: "a"}} if group else {})
    launch = Launch(spec=parse_spec({}), log_dir="", credentials=Credentials.new(index_url=""))
    await Gang("decode-1", Desired(launch=launch), failures=failures).place(lambda why: None)
    assert [selector["ray.io/node-id"] for [selector] in selectors] == [chosen]

"""What is in deploy/ is what Ray and our own spec accept, and the labels on both sides are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.control.placement import Node, ResourceDemand, check_fit
from cluster.words.request import Role
from cluster.words.spec import Spec
from cluster.words.spec_file import load_spec

DEPLOY = Path(__file__).parents[1] / "deploy"
TOPOLOGIES = sorted((DEPLOY / "topologies").glob("*.yaml"))
CLUSTERS = sorted((DEPLOY / "ray").glob("*.yaml"))
SMALL_MACHINE = Node(id="a", name="a", ip="127.0.0.1", total={"CPU": 2}, available={"CPU": 2})


def read(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text())
    assert isinstance(tree, dict)
    return tree


def demands(spec: Spec) -> list[ResourceDemand]:
    return [ResourceDemand(role, spec.pool(role), spec.pool(role).replicas) for role in Role]


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_a_topology_is_what_its_name_says(path: Path) -> None:
    assert load_spec(str(path)).topology == path.stem.partition("-")[0]


@pytest.mark.parametrize("path", [p for p in TOPOLOGIES if "-" not in p.stem], ids=lambda path: path.stem)
def test_a_plain_topology_fits_two_cores(path: Path) -> None:
    check_fit(demands(load_spec(str(path))), [SMALL_MACHINE])


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_ray_accepts_the_cluster(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read(path)))


def test_ray_would_notice_a_mistake() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read(DEPLOY / "ray" / "aws.yaml")
    config["available_node_types"]["prefill"]["lables"] = {}
    with pytest.raises(Exception, match="lables"):
        validate_config(prepare_config(config))


def test_the_gpu_topology_fits_the_nodes_of_both_clusters() -> None:
    spec = load_spec(str(DEPLOY / "topologies" / "2P4D-h200.yaml"))
    types = read(DEPLOY / "ray" / "aws.yaml")["available_node_types"]
    aws = [
        Node(
            id=f"{name}-{i}",
            name=name,
            ip=name,
            labels=kind["labels"],
            total=kind["resources"],
            available=kind["resources"],
        )
        for name, kind in types.items()
        for i in range(kind.get("min_workers", 0))
    ]
    check_fit(demands(spec), aws)
    labels = [read(path) for path in sorted((DEPLOY / "ray" / "labels").glob("*.yaml"))]
    total = {"CPU": 64, "GPU": 8}
    hosts = [
        Node(id=str(i), name="", ip="", labels=label, total=total, available=total) for i, label in enumerate(labels)
    ]
    check_fit(demands(spec), hosts)

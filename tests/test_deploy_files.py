"""What is in deploy/ is what Ray, KubeRay and our own spec accept, and the labels on both sides are the same."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
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
KUBERAY = [*yaml.safe_load_all((DEPLOY / "kuberay" / "cluster.yaml").read_text())]
# openAPIV3Schema of v1 in ray.io_rayclusters.yaml of KubeRay 1.7.0 (Apache-2.0), without descriptions.
SCHEMA = Path(__file__).parent / "raycluster-kuberay-1.7.0.json.gz"
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


def strict(schema: Any) -> Any:
    """With no room for keys that are not in it: Kubernetes would drop them without a word."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def test_kuberay_accepts_the_cluster_and_kubernetes_its_pods() -> None:
    import jsonschema

    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    [cluster] = [thing for thing in KUBERAY if thing["kind"] == "RayCluster"]
    jsonschema.validate(cluster, schema)
    pod = schema["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]["template"]
    for thing in KUBERAY:
        if thing["kind"] == "StatefulSet":
            jsonschema.validate(thing["spec"]["template"], pod)
    cluster["spec"]["workerGroupSpecs"][0]["lables"] = {}
    with pytest.raises(jsonschema.ValidationError, match="lables"):
        jsonschema.validate(cluster, schema)


def test_the_parts_of_the_kubernetes_cluster_find_each_other() -> None:
    things = {(thing["kind"], thing["metadata"]["name"]): thing for thing in KUBERAY}
    assert len(things) == len(KUBERAY)
    cluster = things["RayCluster", "xpyd"]["spec"]
    store, _, port = cluster["gcsFaultToleranceOptions"]["redisAddress"].partition(":")
    assert [entry["port"] for entry in things["Service", store]["spec"]["ports"]] == [int(port)]
    for (kind, name), thing in things.items():
        if kind == "StatefulSet":
            labels = thing["spec"]["template"]["metadata"]["labels"]
            assert things["Service", name]["spec"]["selector"] == labels == thing["spec"]["selector"]["matchLabels"]
    spec = load_spec(str(DEPLOY / "topologies" / "2P4D-h200.yaml"))
    pools = {group["labels"]["pool"] for group in cluster["workerGroupSpecs"]}
    assert {spec.pool(role).labels["pool"] for role in Role} == pools
    doors = {entry["port"] for entry in things["Service", "xpyd-doors"]["spec"]["ports"]}
    assert doors == {spec.router.grpc_port, spec.router.http_port}


def test_the_image_has_every_package_of_the_project() -> None:
    said = (DEPLOY / "kuberay" / "Dockerfile").read_text()
    root = DEPLOY.parent
    for package in (path.parent.name for path in root.glob("*/__init__.py") if path.parent.name != "tests"):
        assert f"COPY {package} " in said


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_runs_shell_that_a_shell_can_read(path: Path) -> None:
    commands = [command for key, value in read(path).items() if key.endswith("_commands") for command in value]
    scripts = [*commands, *(script.read_text() for script in (DEPLOY / "ray").glob("*.sh"))]
    bash = shutil.which("bash")
    assert commands and bash
    for script in scripts:
        assert subprocess.run([bash, "-n"], input=script, text=True, capture_output=True).stderr == ""

"""Files in deploy/ are valid for Ray, KubeRay and our own spec, and their labels match."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.control.placement import Node
from cluster.launch.preflight import check_index, check_network, check_nodes
from cluster.launch.state import state_dir
from core.spec.loader import load_spec
from core.types.request import Role

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


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_topology_matches_its_name(path: Path) -> None:
    assert load_spec(str(path)).topology == path.stem.partition("-")[0]


@pytest.mark.parametrize("path", [p for p in TOPOLOGIES if "-" not in p.stem], ids=lambda path: path.stem)
def test_a_plain_topology_fits_two_cores(path: Path) -> None:
    check_nodes(load_spec(str(path)), [SMALL_MACHINE])


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_ray_accepts_the_cluster(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read(path)))


def test_ray_rejects_an_invalid_cluster() -> None:
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
    check_nodes(spec, aws)
    labels = [read(path) for path in sorted((DEPLOY / "ray" / "labels").glob("*.yaml"))]
    total = {"CPU": 64, "GPU": 8}
    hosts = [
        Node(id=str(i), name="", ip="", labels=label, total=total, available=total) for i, label in enumerate(labels)
    ]
    check_nodes(spec, hosts)


def strict(schema: Any) -> Any:
    """Return the schema without room for unknown keys, which Kubernetes would silently drop."""
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
    endpoints = {entry["port"] for entry in things["Service", "xpyd-endpoints"]["spec"]["ports"]}
    assert endpoints == {spec.router.grpc_port, spec.router.http_port}


def test_the_spec_for_kubernetes_is_accepted_as_its_readme_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (DEPLOY / "kuberay" / "README.md").read_text()
    [make] = re.findall(r"^{ cat .*> spec.yaml$", readme, re.MULTILINE)
    [deploy] = re.findall(r"^kubectl exec .* -- (cluster deploy .*)$", readme, re.MULTILINE)
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / "password").write_text("s3cret")
    subprocess.run(["bash", "-c", make], cwd=tmp_path, check=True, timeout=10)
    words = shlex.split(deploy)
    overrides = [word for before, word in pairwise(words) if before == "--set"]
    spec = load_spec(str(tmp_path / "spec.yaml"), overrides=overrides)
    assert words[2] == "/etc/xpyd/spec.yaml"

    urls = []

    def answers(url: str, *, within_s: float) -> AbstractContextManager[SimpleNamespace]:
        urls.append(url)
        return nullcontext(SimpleNamespace(smembers=lambda key: set()))

    monkeypatch.setattr("core.index.redis_server.asked_once", answers)
    check_index(spec.index, trust_network=spec.kv.trust_network)
    [store] = [thing for thing in KUBERAY if (thing["kind"], thing["metadata"]["name"]) == ("Service", "xpyd-index")]
    assert urls == [f"redis://:s3cret@xpyd-index:{store['spec']['ports'][0]['port']}/0"]
    check_network(spec, [Node(id="a", name="a", ip="100.64.0.7", total={}, available={})])  # no private network
    plain = load_spec(str(DEPLOY / "topologies" / "2P4D-h200.yaml"))
    ours = {"index": spec.index, "kv": plain.kv.model_copy(update={"trust_network": True})}
    assert spec == plain.model_copy(update=ours), "another key has changed"


def test_state_directory_outlives_the_heads_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    [cluster] = [thing for thing in KUBERAY if thing["kind"] == "RayCluster"]
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    [claim] = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    [place] = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == claim["name"]]
    monkeypatch.setenv("HOME", "/home/ray")
    monkeypatch.delenv("CLUSTER_STATE_DIR", raising=False)
    assert Path(place["mountPath"]) in state_dir("llama-70b").parents
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", "files keep their modes"
    claims = {thing["metadata"]["name"] for thing in KUBERAY if thing["kind"] == "PersistentVolumeClaim"}
    assert claim["persistentVolumeClaim"]["claimName"] in claims
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert claim not in group["template"]["spec"]["volumes"], "the volume can be mounted on one node only"


def test_every_volume_is_mounted() -> None:
    [cluster] = [thing for thing in KUBERAY if thing["kind"] == "RayCluster"]
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_image_has_every_package_of_the_project() -> None:
    dockerfile = (DEPLOY / "kuberay" / "Dockerfile").read_text()
    root = DEPLOY.parent
    packages = {path.parent.name for path in root.glob("*/__init__.py")} - {"tests", "benchmarks"}
    for package in packages:
        assert f"COPY {package} " in dockerfile


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_runs_shell_that_a_shell_can_read(path: Path) -> None:
    commands = [command for key, value in read(path).items() if key.endswith("_commands") for command in value]
    scripts = [*commands, *(script.read_text() for script in (DEPLOY / "ray").glob("*.sh"))]
    bash = shutil.which("bash")
    assert commands and bash
    for script in scripts:
        assert subprocess.run([bash, "-n"], input=script, text=True, capture_output=True).stderr == ""

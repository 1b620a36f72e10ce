"""What every test keeps to: it does not sleep, and it does not reach for names that are private to somebody else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_TESTS = Path(__file__).parent
# The one place that may look again and again; and where a sleep takes no time.
_MAY_SLEEP = {"support/waiting.py", "router/serving/virtual_time.py"}
_OTHERS = {
    "os._exit",  # public, in spite of its name
    "torch.cpu._is_avx512_bf16_supported",  # torch has no other way to ask
    "Fp8Dequantize(None)._dequantize_one",  # of transformers: the reference
}
_KNOWN = {
    # How long or how much a bench measures: an operator has no use for the knob, a test makes it small.
    ("benchmarks/test_isolation.py", "isolation._STREAM_PROMPT"),
    ("benchmarks/test_isolation.py", "isolation._WARM_UP_S"),
    ("core/model/test_source.py", "model_source._LOCK_S"),
    ("engine/kv/test_kv.py", "attention._MAX_GATHERED"),
    ("benchmarks/engine/test_bench.py", "bench._NUM_STEPS"),
    ("benchmarks/test_kv.py", "bench_run._MOST_BYTES"),
    ("benchmarks/test_kv.py", "bench_run._NUM_TRIES"),
    # What is recorded or compiled for a device that is not there can be seen nowhere else.
    ("engine/kernels/compiled_steps.py", "sampler._place"),
    ("engine/kernels/compiled_heads.py", "runner._recorded"),
    ("engine/kernels/compiled_steps.py", "replaying._recorded"),
    ("engine/kernels/compiled_steps.py", "replaying._model"),
    ("engine/kernels/counted_steps.py", "runner._model"),
    ("engine/kernels/test_models_by_kernels.py", "runner._model"),
    ("engine/attention/test_flashinfer_heads.py", "runner._model"),
    ("engine/runner/test_decode_graphs.py", "replaying._model"),
    ("engine/runner/test_decode_graphs.py", "pair[0]._recorded"),
    # What an operation of torch writes to is said by its schema alone.
    ("support/fake_streams.py", "func._schema"),
    # The books themselves, cooked to see that the audit finds it; and a memory that must not grow.
    ("engine/kv/test_block_manager.py", "manager._free"),
    ("engine/kv/test_eviction.py", "eviction._past"),
    ("core/model/test_source.py", "model_source._imported"),
    ("kvtransfer/protocol/test_register.py", "register_module._MAX_CLOSED"),
    # What is left out of them, or done too early, is the planted fault.
    ("engine/tiers/test_streams.py", "store._rows"),
    ("kvtransfer/transfer/test_streams.py", "arriving._lock"),
    ("kvtransfer/transfer/test_streams.py", "arriving._written"),
    # An agent that hangs, or is told nonsense: NIXL's own does neither at a test's word.
    ("kvtransfer/links/test_nixl.py", "nixl_module._Agent"),
    ("kvtransfer/links/test_nixl.py", "nixl_module._errors"),
}


def _files() -> list[Path]:
    return sorted(_TESTS.rglob("*.py"))


def _private(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that are taken from or set in somebody else; as strings, too, and in a fault's path."""
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
    found = {(_name(path), name) for path in _files() for name in _private(ast.parse(path.read_text()))}
    assert not {(path, name) for path, name in found - _KNOWN if name not in _OTHERS}
    assert not _KNOWN - found, "no longer there: take it off the list"


def test_tests_do_not_sleep() -> None:
    """`asyncio.sleep(0)` lets others on the loop go first; anything longer says how quick a machine is."""
    sleeps = {
        (_name(path), ast.unparse(node))
        for path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "sleep")
    }
    assert not {(path, call) for path, call in sleeps if path not in _MAY_SLEEP and call != "asyncio.sleep(0)"}


def _name(path: Path) -> str:
    return str(path.relative_to(_TESTS))

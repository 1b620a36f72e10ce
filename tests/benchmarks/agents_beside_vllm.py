"""Agents' traffic at our door and at that of vLLM's CPU build: schemas, hostile schemas, speed, and clients' calls.

    python -m tests.benchmarks.agents_beside_vllm --side ours --parts correctness,hostile,calls --log LOG --model DIR
    python -m tests.benchmarks.agents_beside_vllm --side VENV/bin/python --parts … --log LOG --model DIR

One side in a run, and its log in a file; `--parts speed` wants a quiet machine. vLLM lives in a virtual environment of
its own (see `beside_vllm`). The doors and what they load: `agents_doors`. --clients: an interpreter of an environment
with what `tests/clients` names, whose programs are run, too. It takes minutes for each part, and up to 15 for the
hostile ones where a door has to be started again.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.benchmarks.agents_calls import calls
from tests.benchmarks.agents_doors import AgentsDoor, agents_door
from tests.benchmarks.agents_schemas import correctness, hostile
from tests.benchmarks.agents_speed import speed

_PROGRAMS = ("langchain", "instructor", "litellm", "agents")
_PROGRAM_S = 300
_CLIENTS = Path(__file__).parents[1] / "clients"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


def main(
    side: Annotated[str, typer.Option(help="'ours', or the interpreter of vLLM's environment.")],
    log: Annotated[Path, typer.Option(help="Where the door's log goes.")],
    model: Annotated[Path, typer.Option(help="A directory, into which the demo model is written in bf16.")],
    parts: str = "correctness,speed,calls,hostile",
    clients: Annotated[Path | None, typer.Option(help="The interpreter of an environment of clients.")] = None,
    eager: Annotated[bool, typer.Option(help="vLLM does not compile the model, which takes it minutes.")] = False,
    threads: int = 2,
) -> None:
    with agents_door(None if side == "ours" else Path(side), model, log, is_eager=eager, threads=threads) as endpoint:
        for part in parts.split(","):
            endpoint.ensure()
            load, begin = os.getloadavg()[0], time.monotonic()
            found = _PARTS[part](endpoint)
            if part == "calls" and clients:
                found |= {f"{name}_program": _program(clients, name, endpoint.url) for name in _PROGRAMS}
            row = {"part": part, "load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1)}
            print(json.dumps({**row, "s": round(time.monotonic() - begin, 1), "found": found}, indent=1), flush=True)


def _program(python: Path, name: str, url: str) -> str:
    """The last line of what went wrong, or nothing."""
    command = [str(python), str(_CLIENTS / f"{name}_program.py"), url]
    with tempfile.TemporaryDirectory() as home:
        try:
            done = subprocess.run(
                command, cwd=home, env=os.environ | _OFFLINE, capture_output=True, text=True, timeout=_PROGRAM_S
            )
        except subprocess.TimeoutExpired:
            return f"not within {_PROGRAM_S} s"
    return "" if done.returncode == 0 else done.stderr[-700:]


def _speed(endpoint: AgentsDoor) -> Any:
    return asyncio.run(speed(endpoint))


_PARTS: dict[str, Any] = {
    "correctness": lambda endpoint: asyncio.run(correctness(endpoint)),
    "hostile": lambda endpoint: asyncio.run(hostile(endpoint)),
    "speed": _speed,
    "calls": lambda endpoint: calls(endpoint.url),
}

if __name__ == "__main__":
    typer.run(main)

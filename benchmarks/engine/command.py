"""`python -m benchmarks engine` and `kernels`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.counts import parse_counts
from cluster.cli import options
from core.types.errors import SpecError

_SLOW_WITHOUT_KERNELS = (
    "computing with torch, a few times slower than our kernels, which need --dtype bfloat16 and a C++ "
    "compiler (Debian: apt-get install g++)"
)
_NO_COMPILER = "no C++ compiler (Debian: apt-get install g++): computing with torch; low-bit weights take minutes"
_Batch = Annotated[str, typer.Option(metavar="N[,N…]", help="Sequences that decode concurrently.")]
_Context = Annotated[str, typer.Option(metavar="N[,N…]", help="Context length of each sequence.")]
_Prefill = Annotated[str, typer.Option(metavar="N[,N…]", help="Prompt lengths.")]


def engine(
    model: options.Model = options.DEFAULT_MODEL,
    batch: _Batch = "1,8,32",
    context: _Context = "128",
    prefill: _Prefill = "512,2048",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; default: one per processor.")] = None,
    dtype: options.ModelDType = options.DEFAULT_DTYPE,
    weights: options.ModelWeights = options.DEFAULT_WEIGHTS,
    pool_dtype: options.PoolDType = "auto",
    gpu: Annotated[bool, typer.Option("--gpu", help="Use the first GPU, with and without CUDA graphs.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Measure the host time of a decode step instead, without the forward pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the engine's tokens per second on this machine, compared with the memory bandwidth.

    Random token ids, greedy, 128 steps after prompts of --context tokens; prompts of --prefill tokens; best of three.
    Any other load on the machine lowers all figures.

    The bandwidth share of a decode step is the time to read every weight once divided by the step time; 1 is optimal.
    Large batches are limited by compute, so their share is small.

    `chosen` lists, for each shape of product and for attention, the time of each implementation on one thread, as
    measured when this machine was first used, and the one used for prompts of that many rows: our kernels, unless
    another one is 1.3 times as fast.

    --host uses a forward pass that takes no time. It reports the time to schedule, build and record a step's rows: in
    total, and the part that delays steps under async scheduling, as on a GPU.
    """
    from benchmarks.engine.bench import bench_engine
    from core.model.source import resolve
    from engine.config import device_for

    batches, contexts = parse_counts("batch", batch), parse_counts("context", context)
    directory = resolve(model)
    if host:
        if gpu or (dtype, weights, pool_dtype) != (options.DEFAULT_DTYPE, options.DEFAULT_WEIGHTS, "auto"):
            raise SpecError("--host computes no model and takes only --batch, --context and --threads")
        result = _host(directory, batches=batches, contexts=contexts, threads=threads)
        print(json.dumps(result) if as_json else "\n".join(_host_lines(result)))
        return
    if not (gpu or shutil.which("c++") or shutil.which("g++")):
        # Printed before the minutes that this may take.
        print(_NO_COMPILER, file=sys.stderr)
    result = bench_engine(
        directory,
        dtype=dtype,
        weights=weights,
        pool_dtype=pool_dtype,
        batches=batches,
        contexts=contexts,
        prefills=parse_counts("prefill", prefill),
        threads=threads,
        device=device_for(gpus=gpu),
    )
    print(json.dumps(result) if as_json else "\n".join(_lines(result)))


def kernels(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Measure the GPU kernels, each compared with the device's copy bandwidth or matrix product rate."""
    from benchmarks.engine.kernels import bench_kernels

    result = bench_kernels()
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['device']}: copies {result['copy_gb_s']:.0f} GB/s, bf16 {result['matmul_tflops']:.0f} TFLOP/s")
    for row in result["kernels"]:
        print(f"{row['name']:<24} {row['microseconds']:10.1f} us  {100 * row['share']:5.1f} %")


def _host(model_dir: Path, *, batches: list[int], contexts: list[int], threads: int | None) -> dict[str, Any]:
    from benchmarks.engine.host import bench_host
    from core.model import config as model_config

    vocabulary = model_config.load(model_dir).vocab_size
    return bench_host(batches=batches, contexts=contexts, vocabulary=vocabulary, threads=threads)


def _lines(result: dict[str, Any]) -> list[str]:
    title = ", ".join(str(result[key]) for key in ("model", "dtype", "weights", "instructions"))
    return [
        f"{title}, {result['threads']} threads, memory {result['bandwidth_gb_s']} GB/s",
        *([_SLOW_WITHOUT_KERNELS] if result["computed_by"] == "torch" else ()),
        *(
            f"decode   batch {row['batch']:4}, context {row['context']:6}: {row['tokens_per_s']:9.1f} tokens/s, "
            f"{row['step_ms']:8.3f} ms per step{_share(row)}{_plain(row)}"
            for row in result["decode"]
        ),
        *(f"prefill  {row['tokens']:6} tokens: {row['tokens_per_s']:9.1f} tokens/s" for row in result["prefill"]),
        *(f"chosen   {row['taken']:<7} for {row['what']}: {_times(row['ms'])}" for row in result.get("ways", ())),
    ]


def _host_lines(result: dict[str, Any]) -> list[str]:
    return [
        f"without the forward pass, {result['threads']} threads, vocabulary {result['vocabulary']}",
        *(
            f"batch {row['batch']:4}, context {row['context']:6}: {row['host_ms']:7.3f} ms per step, "
            f"{row['ahead_ms']:7.3f} with async scheduling (device idle {row['idle_ms']:.3f} between 0.25 ms steps), "
            f"{row['greedy_ms']:7.3f} with the argmax over the vocabulary, {row['penalty_ms']:7.3f} more with a "
            f"repetition penalty, {row['rank_bytes']} bytes to each other rank"
            for row in result["host"]
        ),
    ]


def _times(ms: dict[str, float]) -> str:
    return ", ".join(f"{way} {took} ms" for way, took in ms.items())


def _share(decode: dict[str, Any]) -> str:
    share = decode["bandwidth_share"]
    return "" if share is None else f", {share:4.0%} of the bandwidth"


def _plain(decode: dict[str, Any]) -> str:
    return f"; without graphs {decode['plain_step_ms']:8.3f} ms" if "plain_step_ms" in decode else ""

"""`cluster bench`: a load on a live deployment; `cluster bench …`: one part of the cluster alone, on this machine."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Annotated, Any

import typer

from cluster.cli import load
from cluster.cli.model_options import DEFAULT_DTYPE, DEFAULT_MODEL, DEFAULT_WEIGHTS, Model, ModelDType, ModelWeights
from cluster.errors import SpecError

bench = typer.Typer(help="Measure a deployment under a load; or, by a command's name, one part of it alone.")
bench.callback(invoke_without_command=True)(load.load)

_Counts = Annotated[str, typer.Option(metavar="N[,N…]")]


@bench.command()
def engine(
    model: Model = DEFAULT_MODEL,
    batch: _Counts = "1,8,32",
    context: _Counts = "128",
    prefill: _Counts = "512,2048",
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one per processor.")] = None,
    dtype: ModelDType = DEFAULT_DTYPE,
    weights: ModelWeights = DEFAULT_WEIGHTS,
    pool_dtype: Annotated[str, typer.Option(help="As in a spec.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tokens per second of the engine on this machine's processors, beside the memory bandwidth that bounds it.

    Random token ids, greedy, 128 steps after prompts of --context tokens; prompts of --prefill tokens; best of three.
    """
    model_dir = import_module("cluster.model_source").resolve(model)
    # By name: this floor does not import the ones above it.
    result = import_module("engine.bench").bench_engine(
        model_dir,
        dtype=dtype,
        weights=weights,
        pool_dtype=pool_dtype,
        batches=_parse("batch", batch),
        contexts=_parse("context", context),
        prefills=_parse("prefill", prefill),
        threads=threads,
    )
    print(json.dumps(result) if as_json else "\n".join(_lines(result)))


@bench.command()
def kernels(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """The GPU kernels, each beside the copy bandwidth or the matrix product rate of the device in the same run."""
    result = import_module("engine.bench_kernels").bench_kernels()
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['device']}: copies {result['copy_gb_s']:.0f} GB/s, bf16 {result['matmul_tflops']:.0f} TFLOP/s")
    for row in result["kernels"]:
        print(f"{row['name']:<24} {row['microseconds']:10.1f} us  {100 * row['share']:5.1f} %")


def _parse(option: str, counts: str) -> list[int]:
    try:
        numbers = [int(count) for count in counts.split(",") if count]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise SpecError(f"--{option} {counts}: write whole numbers above 0, with commas between them")
    return numbers


def _lines(result: dict[str, Any]) -> list[str]:
    what = ", ".join(str(result[key]) for key in ("model", "dtype", "weights", "instructions"))
    return [
        f"{what}, {result['threads']} threads, memory {result['bandwidth_gb_s']} GB/s",
        *(
            f"decode   batch {row['batch']:4}, context {row['context']:6}: {row['tokens_per_s']:9.1f} tokens/s, "
            f"{row['step_ms']:8.3f} ms a step"
            for row in result["decode"]
        ),
        *(f"prefill  {row['tokens']:6} tokens: {row['tokens_per_s']:9.1f} tokens/s" for row in result["prefill"]),
    ]

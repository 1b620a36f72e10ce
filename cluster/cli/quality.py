"""`cluster quantize` and `cluster eval formats`: checkpoints in fewer bits, and the speed and quality of formats."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.console import columns, say
from cluster.cli.options import DEFAULT_MODEL, Model
from core.model.kv_memory import QUANTIZED
from core.model.shape import ModelConfig
from core.types.errors import SpecError

evaluate = typer.Typer(help="Measure a model's quality, in this process.", no_args_is_help=True)


@evaluate.callback()
def _group() -> None:
    """Exist so that typer does not collapse the group into its only command."""


def quantize(
    into: Annotated[Path, typer.Argument(help="Output directory; must not exist.")],
    model: Model = DEFAULT_MODEL,
    to: Annotated[
        str,
        typer.Option(
            help="fp8 (blocks of 128 x 128), fp8_dynamic or int8 (one scale per output), int4 or int4_asym (groups of "
            "inputs, without and with zero points), nvfp4, mxfp4."
        ),
    ] = "fp8",
    group: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Inputs per scale of int4 and int4_asym; 0: one scale per output. Default: the largest of 128, 64 and "
            "32 that divides all inputs.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text file typical of the workload. Rounding then minimizes the error of products instead of weights "
            "(GPTQ), and 4-bit formats scale input channels (AWQ)."
        ),
    ] = None,
) -> None:
    """Write a checkpoint with quantized matrices, for this cluster, vLLM and other engines."""
    from core.model.source import resolve
    from engine.quantization.calibration import inputs_of_text
    from engine.quantization.write import quantize_checkpoint

    model_dir = resolve(model)
    text = _read(calibrate) if calibrate else None
    calibrated = dict if text is None else partial(inputs_of_text, model_dir, text, say)
    quantize_checkpoint(model_dir, into, to, group=group, calibrate=calibrated, say=say)
    print(f"wrote {into}")


def calibrate(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="Text file typical of the workload; default: half of the Python reference.")
    ] = None,
) -> None:
    """Write kv_basis.safetensors into a model's directory, for `kv.pool_dtype: int4`: several times less error.

    Every host of both pools needs the same file; replicas with unlike files do not exchange KV.
    """
    from core.model.source import resolve
    from engine.kv.basis import write_bases
    from engine.quantization.kv_calibration import bases_of_text

    model_dir, words = resolve(model), _read(text) if text else _halves_of_reference()[1]
    if not os.access(model_dir, os.W_OK):
        raise SpecError(f"{model_dir} is read-only; copy the model to a directory of your own")
    print(f"wrote {write_bases(model_dir, bases_of_text(model_dir, words, say))}")


@evaluate.command()
def formats(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for formats.json, .md and .png.")],
    model: Model = DEFAULT_MODEL,
    weights: Annotated[
        str,
        typer.Option(
            help="Formats of the weights, separated by commas: bf16, stored (as in the checkpoint), int8 (converted at "
            "load), a format of `cluster quantize`, perhaps with its group (int4:64), or NAME=SOURCE, a checkpoint."
        ),
    ] = "bf16,int8",
    kv: Annotated[
        str,
        typer.Option(
            help="Formats of the KV pool: bf16, fp8, int8, int4, perhaps with its unquantized layers (int4:0:-1)."
        ),
    ] = "bf16,int8",
    wire: Annotated[str, typer.Option(help="Formats in which a bf16 pool is sent: raw, fp8, int8, int4.")] = "raw",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Quantize weights with the second half of the text.")
    ] = False,
    text: Annotated[Path | None, typer.Option(help="Text file; default: the Python reference from pydoc.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    windows: Annotated[int, typer.Option(min=1, help="Maximum number of windows of text.")] = 16,
    window: Annotated[int, typer.Option(min=32, help="Tokens per window.")] = 512,
    stride: Annotated[int, typer.Option(min=1, help="Tokens scored in each window.")] = 256,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, separated by commas (`pip install lm-eval`).")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of examples per task.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of each timing.")] = 3.0,
) -> None:
    """Measure tokens per second, first token, memory and perplexity of every combination of formats.

    The first combination is the baseline. Windows come from the first half of the text.
    """
    from importlib.util import find_spec
    from itertools import product

    from core.model import config as model_config
    from core.model.source import resolve
    from engine.tools import formats as tool

    names, pools, wires = (list(dict.fromkeys(given.split(","))) for given in (weights, kv, wire))
    settings = [_split(name) for name in names]
    pool_formats = {pool: _pool_format(pool) for pool in pools}
    wire_dtypes = {link: _known("--wire", link, _WIRES) for link in wires}
    if tasks and find_spec("lm_eval") is None:
        raise SpecError("--tasks needs lm-eval: pip install lm-eval")
    tool.make_directory(output)
    model_dir = resolve(model)
    _check_kv(model_config.load(model_dir), pool_formats.values(), wire_dtypes.values())
    words, seen = _halves(_read(text)) if text else _halves_of_reference()
    with tempfile.TemporaryDirectory() as scratch:
        held = _weights(settings, model_dir, Path(scratch), seen if calibrate else None)
        combinations = [
            tool.Combination(
                weights=name,
                kv=pool,
                wire=link,
                model_dir=directory,
                held=how,
                pool_dtype=pool_formats[pool][0],
                unquantized_layers=pool_formats[pool][1],
                wire_dtype=wire_dtypes[link],
            )
            for (name, directory, how), pool, link in product(held, pools, wires)
        ]
        costs = tool.measure(
            combinations,
            words,
            dtype="bfloat16",
            threads=threads,
            window=window,
            stride=stride,
            max_windows=windows,
            seconds=seconds,
            tasks=[task for task in tasks.split(",") if task],
            limit=limit,
            measured=lambda cost: say(f"{cost.weights} / {cost.kv} / {cost.wire}: done"),
        )
    facts = {"model": model, "threads": threads, "date": date.today().isoformat()}
    print(columns(tool.table(costs)))
    note = tool.write_report(costs, output, facts)
    print(f"wrote {output}{note}")


# Formats by name, and their values of kv.pool_dtype, kv.wire_dtype or model.weights.
_POOLS = {"bf16": "auto"} | QUANTIZED
_WIRES = {"raw": "raw"} | QUANTIZED
_HELD = {"bf16": "widen", "stored": "auto", "int8": "int8"}


def _halves(words: str) -> tuple[str, str]:
    return words[: len(words) // 2], words[len(words) // 2 :]


def _halves_of_reference() -> tuple[str, str]:
    """Return the halves of the Python reference: one to measure with, one to calibrate with."""
    from pydoc_data.topics import topics

    return _halves("\n".join(topics.values()))


def _known(option: str, name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise SpecError(f"{option}: unknown format {name!r}; choose from {', '.join(known)}")
    return known[name]


def _pool_format(name: str) -> tuple[str, tuple[int, ...]]:
    """Return kv.pool_dtype and kv.unquantized_layers of NAME or NAME:LAYER:LAYER. Raises SpecError."""
    kind, *layers = name.split(":")
    dtype = _known("--kv", kind, _POOLS)
    try:
        return dtype, tuple(map(int, layers))
    except ValueError:
        raise SpecError(f"--kv: a layer of {name!r} is not a number, as in int4:0:-1") from None


def _check_kv(config: ModelConfig, pools: Iterable[tuple[str, tuple[int, ...]]], wire_dtypes: Iterable[str]) -> None:
    """Raise SpecError, before hours of measurement, for formats of KV that the model cannot have."""
    for dtype, layers in pools:
        config.check_kv_dtype("--kv", dtype)
        config.layers_at("--kv", layers)
    for dtype in wire_dtypes:
        config.check_kv_dtype("--wire", dtype)


def _split(name: str) -> tuple[str, str, int | None, str]:
    """Return a format's label, kind, group size, and the checkpoint that it names, if any. Raises SpecError."""
    from engine.quantization.formats import FORMATS

    label, equals, source = name.partition("=")
    if equals:
        if not label or not source:
            raise SpecError(f"--weights: {name!r} is not NAME=SOURCE, a name and a checkpoint")
        return label, "", None, source
    kind, colon, group = name.partition(":")
    _known("--weights", name if name in _HELD else kind, _HELD | dict.fromkeys(FORMATS, ""))
    if colon and not (group.isascii() and group.isdigit()):
        raise SpecError(f"--weights: the group of {name!r} is not a number of inputs, as in int4:64")
    return name, kind, int(group) if colon else None, ""


def _weights(
    names: Sequence[tuple[str, str, int | None, str]], model_dir: Path, scratch: Path, seen: str | None
) -> list[tuple[str, Path, str]]:
    """Return name, model directory and model.weights of each format; quantizes into `scratch` where needed."""
    from core.model.source import resolve
    from engine.quantization.calibration import inputs_of_text
    from engine.quantization.write import quantize_checkpoint

    found = []
    calibrate = cache(partial(inputs_of_text, model_dir, seen, say)) if seen is not None else dict
    for name, kind, group, source in names:
        if source:
            found.append((name, resolve(source), "auto"))
        elif name in _HELD:
            found.append((name, model_dir, _HELD[name]))
        else:
            quantize_checkpoint(model_dir, scratch / name, kind, group=group, calibrate=calibrate, say=say)
            found.append((name, scratch / name, "auto"))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot read text: {error}") from error

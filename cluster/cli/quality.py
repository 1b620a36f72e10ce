"""`cluster quantize` and `cluster eval perplexity`: 8-bit checkpoints and their quality loss."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.deploy import AsJson
from cluster.cli.planning.model_options import DEFAULT_DTYPE, DEFAULT_MODEL, Model, ModelDType
from core.types.errors import SpecError

evaluate = typer.Typer(help="Measure a model's quality, in this process.", no_args_is_help=True)


@evaluate.callback()
def _group() -> None:
    """Exist so that typer does not collapse the group into its only command."""


def quantize(
    into: Annotated[Path, typer.Argument(help="Output directory; must not exist.")],
    model: Model = DEFAULT_MODEL,
    to: Annotated[str, typer.Option(help="fp8 (128 x 128 blocks) or int8 (one scale per output).")] = "fp8",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text file typical of the workload; rounding then minimizes the error of products instead of weights."
        ),
    ] = None,
) -> None:
    """Write a checkpoint with 8-bit matrices, for this cluster and other engines."""
    from core.model.source import resolve
    from engine.quantization.calibration import inputs_of_text
    from engine.quantization.write import quantize_checkpoint

    model_dir = resolve(model)
    grams = inputs_of_text(model_dir, _read(calibrate)) if calibrate else {}
    quantize_checkpoint(model_dir, into, to, grams=grams)
    print(f"wrote {into}")


@evaluate.command()
def perplexity(
    model: Model = DEFAULT_MODEL,
    text: Annotated[Path | None, typer.Option(help="Text file; default: the Python reference from pydoc.")] = None,
    dtype: ModelDType = DEFAULT_DTYPE,
    window: Annotated[int, typer.Option(min=32, help="Tokens per window.")] = 512,
    stride: Annotated[int, typer.Option(min=1, help="Tokens scored in each window.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Maximum number of windows.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity cost of quantized weights, KV pool and wire format, separately and combined.

    Windows come from the first half of the text; "calibrated" weights used the second half.
    """
    from pydoc_data.topics import topics

    from core.model.source import resolve
    from engine.quantization.calibration import inputs_of_text
    from engine.quantization.write import quantize_checkpoint
    from engine.tools.perplexity import compare, settings_for

    model_dir = resolve(model)
    words = _read(text) if text else "\n".join(topics.values())
    words, seen = words[: len(words) // 2], words[len(words) // 2 :]
    with tempfile.TemporaryDirectory() as scratch:
        others = []
        grams = inputs_of_text(model_dir, seen)
        for name, kind, known in (("fp8", "fp8", {}), ("fp8 calibrated", "fp8", grams), ("int8", "int8", {})):
            directory = Path(scratch) / name.replace(" ", "-")
            quantize_checkpoint(model_dir, directory, kind, grams=known)
            others.append((name, directory))
        del grams
        result = compare(
            settings_for(model_dir, others),
            words,
            dtype=dtype,
            window=window,
            stride=stride,
            max_windows=windows,
        )
    if as_json:
        print(json.dumps(result))
        return
    for row in result["results"]:
        error = "" if row["standard_error_percent"] is None else f" +- {row['standard_error_percent']:.3f}"
        print(f"{row['setting']:<32} {row['perplexity']:9.4f}  {row['difference_percent']:+7.3f}{error} %")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot read text: {error}") from error

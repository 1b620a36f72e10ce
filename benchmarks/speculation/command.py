"""`python -m benchmarks speculation`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cluster.cli.planning import model_options as options
from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.model.draft_source import DraftSource

_WITHOUT_MODEL = ("ngram", "suffix", "self", "mtp")
_DEFAULT = "ngram,suffix,auto"
_ANSWERS = 3
_SHOWN = 4  # places


def speculation(
    model: options.Model = options.DEFAULT_MODEL,
    method: Annotated[str, typer.Option(metavar="NAME[,NAME…]", help="As in a spec; each beside off.")] = _DEFAULT,
    draft_model: Annotated[str | None, typer.Option(help="As speculation.model in a spec.")] = None,
    batch: Annotated[str, typer.Option(metavar="N[,N…]", help="Prompts answered at a time.")] = "1,4",
    kind: Annotated[str, typer.Option(metavar="NAME[,NAME…]", help="Of the prompts; default: all.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Instead: a JSON object on each line, with "prompt" or "messages".'),
    ] = None,
    most_prompts: Annotated[int, typer.Option(min=1, help="Of these, the first so many.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer, at most.")] = 256,
    tries: Annotated[int, typer.Option(min=1, help="Rounds, in which the methods take turns.")] = 5,
    answers: Annotated[
        int | None,
        typer.Option(
            min=1, help="To each prompt in a round: where one ends, the next begins. Default: 3; to --prompts always 1."
        ),
    ] = None,
    linear: Annotated[bool, typer.Option("--linear", help="Each method also with drafts that do not branch.")] = False,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Draft whatever is guessed: how often is it right?")
    ] = False,
    answered: Annotated[
        int, typer.Option(min=0, help="Times that each prompt was answered before, with other seeds.")
    ] = 0,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Of a draft, at most.")] = 16,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one per processor.")] = None,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="One thread's own time, on a busy machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tokens per second with each method of drafting beside none, on this machine's processors.

    Prompts that ask for an edit of a text, of JSON and of code, and one that does not; in bfloat16. It takes minutes;
    what has been measured is printed as it comes.

    tokens/s, and how many times those without drafts (x): the median of the rounds. Then of the last round, as long as
    the batch was full: tokens in steps; and by place in a draft, the first four, how often the token there was right
    if all before it were.
    """
    from benchmarks.speculation.bench import bench_speculation, prompt_texts
    from benchmarks.speculation.methods_in_turn import LINEAR
    from core.model.source import resolve
    from core.spec.schema import SpeculationSpec

    counts, texts = _words(batch), prompt_texts()
    kinds, methods = _words(kind) if kind else list(texts), _words(method)
    if prompts and kind:
        raise SpecError("--prompts and --kind: one of them says what is asked")
    if prompts and answers:
        raise SpecError("--answers: each of --prompts is answered once; leave it out")
    if wrong := [count for count in counts if not count.isdecimal() or not int(count)]:
        raise SpecError(f"--batch takes whole numbers above 0, such as 1,4 (got {wrong[0]!r})")
    if wrong := [name for name in kinds if name not in texts]:
        raise SpecError(f"--kind takes some of {', '.join(texts)} (got {wrong[0]!r})")
    drafting = [name for name in get_args(SpeculationSpec.model_fields["method"].annotation) if name != "off"]
    if wrong := [name for name in methods if name not in drafting]:
        raise SpecError(f"--method takes some of {', '.join(drafting)} (got {wrong[0]!r})")
    if draft_model and set(methods) <= set(_WITHOUT_MODEL):
        raise SpecError(f"--draft-model: {' and '.join(methods)} would not use it; leave it out, or name a --method")
    batches, directory = sorted({int(count) for count in counts}), resolve(model)
    drafts = _drafts(methods, draft_model, model, directory)
    asked, ends = encode_prompts(directory, {name: texts[name] for name in kinds}, count=max(batches))
    if prompts:
        asked = {"prompts": read_prompts(prompts, directory)[:most_prompts]}
        if (count := len(asked["prompts"])) < max(batches):
            raise SpecError(
                f"--batch {max(batches)} takes as many prompts, and --prompts has {count}; say --batch {count}"
            )
    result = bench_speculation(
        directory,
        asked,
        batches=batches,
        methods=["off", *methods, *([one + LINEAR for one in methods] if linear else [])],
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
    """What these draft by that need something. Raises SpecError, as a spec with them would."""
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
        raise SpecError(f"--method: {' and '.join(sorted(named))} are measured one by one: name one of them")
    if found and not found.heads:
        check_same_tokens(found.directory, model_dir)
    return found


def read_prompts(path: Path, model_dir: Path) -> list[list[int]]:
    """Token ids of each line's prompt, or of its messages by the model's template. Raises SpecError."""
    from frontend.chat.chat_template import ChatTemplate, find_chat_template
    from frontend.text.tokenizer import Tokenizer

    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SpecError(f"--prompts {path}: cannot be read as lines of JSON: {error}") from error
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
    """So many prompts of each text, which differ in their first line, in ChatML where the model has its marks; and the
    tokens that end an answer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
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
    """How often tokens were right where all before them were; of branches, of those that were drafted."""
    places, branches = row["by_place"], row["branches_by_place"]
    before = [drafted for drafted, _ in places[:1]] + [right for _, right in places]
    reached = [min(drafted, count) for (drafted, _), count in zip(places, before, strict=False)]
    shares = [f"{right / count:.0%}" for (_, right), count in zip(places[:_SHOWN], reached, strict=False) if count]
    said = f"; by place {', '.join(shares)}" if shares else ""
    drafted, right = (sum(counts) for counts in zip(*branches, strict=True)) if branches else (0, 0)
    return said + (f"; {right} of {drafted} in branches" if drafted else "")

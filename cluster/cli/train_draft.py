"""`cluster train-draft`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.cli import model_options as options
from core.types.errors import Interrupted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from frontend.chat.chat_template import ChatTemplate
    from frontend.text.tokenizer import Tokenizer

_MAX_ANSWER = 256  # tokens
_SELF = "self"
_LINES = 10  # of progress in a file, where there is no terminal


def train_draft(
    kind: Annotated[Literal["eagle3", "medusa"], typer.Option(help="Of heads.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The heads' directory.")],
    model: options.Model = options.DEFAULT_MODEL,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE|self",
            help="A JSON object a line, with messages, prompt or text, or of `cluster batch`; self: the model's own.",
        ),
    ] = _SELF,
    tokens: Annotated[int, typer.Option(min=1, help="Of answers, to train on and to measure with.")] = 300_000,
    passes: Annotated[int, typer.Option(min=1, help="Over the answers.")] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one per processor.")] = None,
) -> None:
    """Train heads that draft for a model, from its own answers; `speculation` in a spec takes the directory.

    Interrupted, by whatever: the same command goes on. Says how many tokens a step gives on answers held out, greedily.
    """
    import torch

    from core.model import config as model_config
    from core.model.source import resolve
    from engine.training.answers import FileAsker, SelfAsker
    from engine.training.prompts import read_conversations
    from engine.training.run import Run, RunWords, digest_of
    from engine.training.training import train

    if threads is not None:
        torch.set_num_threads(threads)
    directory = resolve(model)
    words = RunWords(
        kind=kind,
        model=model_config.fingerprint(directory),
        data=data if data == _SELF else digest_of(Path(data)),
        seed=seed,
        tokens=tokens,
        passes=passes,
    )
    texts = ModelWords(directory)
    asker = (
        SelfAsker(texts, texts.tokenizer.decode, seed)
        if data == _SELF
        else FileAsker(read_conversations(Path(data), texts))
    )
    try:
        with _shown() as shown:
            report = train(
                Run(output, words),
                directory,
                kind,
                asker,
                seed=seed,
                tokens=tokens,
                max_answer=_MAX_ANSWER,
                passes=passes,
                progress=shown,
            )
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the same command goes on from what {output} holds") from None
    last = list(report["held_out"].values())[-1]
    size = (output / "model.safetensors").stat().st_size
    print(f"wrote {output}: {size / 1e6:.1f} MB, {last['mean_length']:.2f} tokens a step on answers held out")


class ModelWords:
    """Implements engine.training.prompts.Words."""

    def __init__(self, directory: Path) -> None:
        from frontend.chat.chat_template import ChatTemplate, find_chat_template
        from frontend.text.tokenizer import Tokenizer

        self.tokenizer: Tokenizer = Tokenizer(directory)
        source = find_chat_template(directory)
        self._template: ChatTemplate = ChatTemplate(source, special_tokens=self.tokenizer.special_tokens)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        return self._template.render(messages, opens_answer=opens_answer)

    def encode(self, text: str, *, is_whole: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=is_whole)


@contextmanager
def _shown() -> Iterator[_Lines | _Bar]:
    """A bar on a terminal, some lines elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = (TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *parts, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True)
    ) as bar:
        yield _Bar(bar)


class _Bar:
    """Implements engine.training.training.TrainingProgress."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def begin(self, what: str, total: int, done: int) -> None:
        self._task = self._bar.add_task(what, total=total, completed=done, note="")

    def advance(self, count: int, note: str = "") -> None:
        assert self._task is not None, "something is under way"
        self._bar.update(self._task, advance=count, note=note)

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)


class _Lines:
    """Implements engine.training.training.TrainingProgress."""

    def __init__(self) -> None:
        self._what, self._total, self._done = "", 1, 0

    def begin(self, what: str, total: int, done: int) -> None:
        self._what, self._total, self._done = what, max(1, total), done
        self.say(f"{what} {done} of {total}")  # the first tenth may take minutes

    def advance(self, count: int, note: str = "") -> None:
        before, self._done = self._done, min(self._total, self._done + count)
        if before * _LINES // self._total < self._done * _LINES // self._total:
            self.say(f"{self._what} {self._done} of {self._total} {note}".rstrip())

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

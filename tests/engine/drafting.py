"""Drafting methods: files of heads, runners and their speculations, and drafts of heads for given rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from core.model.draft_heads import HeadsPlace
from engine.kv.block_manager import BlockManager
from engine.spec_decode.draft_models.draft_model import DraftModel, HeadProposer, OwnLayers
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.speculation import Speculation
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import MakeRunner

WRITERS: Mapping[str, Callable[[Path], object]] = {
    "medusa": write_medusa,
    "eagle": write_eagle,
    "eagle1": write_eagle1,
    "mtp": write_mtp,
}
METHODS = ("ngram", "suffix", "draft", "self", *WRITERS, "auto: all but mtp")


def heads_place(kind: Any, directory: Path) -> HeadsPlace:
    return HeadsPlace("eagle" if kind == "eagle1" else kind, directory)


class Drafting:
    """Runner of the model in `target`, and the speculations made for it. directory: for the files of heads."""

    def __init__(
        self, method: str, target: Path, make_runner: MakeRunner, directory: Path, *, num_blocks: int = 2048
    ) -> None:
        self.made: list[Speculation] = []
        self._method = method.partition(":")[0]
        self._is_auto = self._method == "auto"
        place = None
        if kind := "eagle" if self._is_auto else self._method if self._method in WRITERS else "":
            WRITERS[kind](directory)
            place = heads_place(kind, directory)
            self._method = place.kind if kind == "eagle1" else self._method
        self.runner = make_runner(directory if kind == "mtp" else target, num_blocks=num_blocks, heads=place)
        self._heads = place and place.kind
        self._smaller = partial(make_runner, first_layers(target, 2), num_blocks=num_blocks // 2)

    @property
    def num_drafted(self) -> list[int]:
        """Return the number of drafted tokens of each speculation."""
        return [sum(counts.drafted.total() for counts in one.counts.values()) for one in self.made]

    def speculation(self, blocks: BlockManager) -> Speculation:
        models: dict[str, ModelProposer] = {}
        if self._heads:
            models[self._heads] = HeadProposer(self.runner)
        if self._is_auto or self._method == "draft":
            models["draft"] = DraftModel(self._smaller(), vocab_size=VOCAB_SIZE)
        if self._is_auto or self._method == "self":
            models["self"] = OwnLayers(self.runner, blocks, before_writing=lambda: None)
        self.made.append(Speculation.of(self._method, max_tokens=6, vocab_size=VOCAB_SIZE, models=models))
        return self.made[-1]

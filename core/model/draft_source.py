"""Sources of drafts: the small model or the draft heads that a spec names."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from core.model import config as model_config
from core.model import source as model_source
from core.model.draft_heads import HeadsKind, is_eagle1
from core.model.settings import read_object
from core.model.source import Progress
from core.types.errors import SpecError
from core.types.request import Role

if TYPE_CHECKING:
    from core.spec.schema import Spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftSource:
    """Kind and directory of a draft model or of draft heads; for `mtp`, the directory of the served model."""

    kind: Literal["draft"] | HeadsKind
    directory: Path

    @property
    def heads(self) -> HeadsKind | None:
        """Kind of the heads; None: a draft model."""
        return None if self.kind == "draft" else self.kind


def draft_source(spec: Spec, *, progress: Progress | None = None) -> DraftSource | None:
    """Resolve the draft model or heads of `speculation`; None if it needs none. May download. Raises SpecError."""
    method, source = spec.speculation.method, spec.speculation.model
    if method == "mtp" or (method == "auto" and source == spec.model.source):
        own = model_source.resolve(spec.model.source, progress=progress)
        if method == "mtp" or model_config.load(own).num_further_layers:
            return DraftSource("mtp", own)
    if source is None or method == "off":
        return None
    if spec.speculation.heads:
        return DraftSource(spec.speculation.heads, model_source.resolve_heads(source, progress=progress))
    if method == "auto" and (heads := _heads(source, progress)):
        return heads
    try:
        return DraftSource("draft", model_source.resolve(source, progress=progress))
    except SpecError as error:
        if kind := _heads_here(source):
            raise SpecError(
                f"speculation.model: {source}: these are {kind} heads; set speculation.method to {kind} or auto"
            ) from None
        raise SpecError(str(error).replace("model.source:", "speculation.model:")) from None


def heads_source(spec: Spec) -> DraftSource | None:
    """Resolve the heads that every replica loads with its model; None if none. May download. Raises SpecError.

    A draft model is left out: prefill replicas do not need it on their hosts.
    """
    source = None if spec.speculation.method == "draft" else draft_source(spec)
    return source if source and source.heads else None


def fetch_for_a_switch(spec: Spec, role: Role) -> None:
    """Fetch the draft model on a prefill replica that may become a decode replica, so that the switch needs no
    download. Errors are logged only: the switch itself reports them."""
    from core.types.role_switch import hindrance  # imported here: the engine loads without specs

    if role is Role.DECODE or spec.speculation.method != "draft" or hindrance(spec):
        return
    try:
        draft_source(spec)
    except SpecError as error:
        logger.info("this replica could not become a decode replica: %s", error)


def check_same_tokens(draft_dir: Path, model_dir: Path) -> None:
    """Raise SpecError unless both models have the same vocabulary."""
    from core.model.tokenizer_file import open_tokenizer  # imported here: it loads the tokenizers library

    ours, theirs = (open_tokenizer(directory).get_vocab(with_added_tokens=True) for directory in (model_dir, draft_dir))
    if ours != theirs:
        same = len(ours.items() & theirs.items())
        raise SpecError(
            f"speculation.model: {draft_dir} has another vocabulary than the served model: {same} of {len(ours)} "
            "tokens are the same; name a smaller model of the same family"
        )


def _heads(source: str, progress: Progress | None) -> DraftSource | None:
    """Detect draft heads in a source, by their config.json; None if there are none."""
    is_of_hub, place = source.startswith("hf:"), Path(source).expanduser()
    if source.endswith(".gguf") or not (is_of_hub or place.is_dir()):
        return None
    if not is_of_hub and any(place.glob("*.gguf")) and not any(place.glob("*.safetensors")):
        return None  # a GGUF model
    directory = model_source.resolve_heads(source, progress=progress)
    try:
        raw = read_object(directory / "config.json")
    except SpecError:
        return None  # reported when it is loaded as a model
    if "medusa_num_heads" in raw:
        return DraftSource("medusa", directory)
    is_eagle = (
        "speculators_model_type" in raw
        or "eagle" in str(raw.get("architectures")).lower()
        or (raw.get("num_hidden_layers") == 1 and _is_eagle1(directory))
    )
    return DraftSource("eagle", directory) if is_eagle else None


def _heads_here(source: str) -> HeadsKind | None:
    """Detect draft heads in a local directory; None if there are none, or if that is unknown."""
    try:
        found = None if source.startswith("hf:") else _heads(source, None)
    except SpecError:
        return None
    return found.heads if found else None


def _is_eagle1(directory: Path) -> bool:
    try:
        return is_eagle1(directory)
    except SpecError:
        return False  # reported when it is loaded as a model

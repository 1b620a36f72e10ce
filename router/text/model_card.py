"""The model as a client sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the doors say of the model that this cluster serves, and what bounds a request to it."""

    id: str  # what clients call it
    max_context: int  # tokens, prompt and answer together
    vocab_size: int  # rows of the embedding; a token id is below it
    dtype: str
    created: int = 0  # unix seconds

"""Models served at one router's endpoints, by name."""

from __future__ import annotations

from collections.abc import Sequence

from core.types.errors import ModelUnavailable, UnknownModel
from frontend.text.completion import Completions
from frontend.text.completion_request import ModelCard, not_served


class Models:
    """Registry of served models by name. A name belongs to the first model that has it. Bound to the router's event
    loop."""

    def __init__(self, default: Completions) -> None:
        """default: model of the router's own deployment, used for requests that name none."""
        self.default = default
        self._served = dict.fromkeys(default.model.names, default)
        self._unavailable: dict[str, str] = {}  # reason, by name of a model that should be served but is not

    @classmethod
    def of(cls, served: Completions | Models) -> Models:
        return served if isinstance(served, Models) else cls(served)

    def add(self, served: Completions) -> bool:
        """Add a model. Return False if one of its names is taken."""
        names = served.model.names
        if not self._served.keys().isdisjoint(names):
            return False
        self.forget_unavailable(names)
        self._served |= dict.fromkeys(names, served)
        return True

    def remove(self, served: Completions) -> None:
        """Remove a model; running requests continue."""
        self._served = {name: one for name, one in self._served.items() if one is not served}

    def report_unavailable(self, names: Sequence[str], why: str) -> None:
        """Mark a model as known but not servable at present."""
        self._unavailable |= {name: why for name in names if name not in self._served}

    def forget_unavailable(self, names: Sequence[str]) -> None:
        """Remove the mark of `report_unavailable`."""
        for name in names:
            self._unavailable.pop(name, None)

    def find(self, name: str) -> Completions:
        """Return the model, the default one for an empty name. Raises UnknownModel and ModelUnavailable."""
        if not name:
            return self.default
        if (served := self._served.get(name)) is not None:
            return served
        if name in self._unavailable:
            raise ModelUnavailable(f"model {name!r} is unavailable at this router: {self._unavailable[name]}")
        raise UnknownModel(not_served(name, self.names), param="model")

    def card(self, name: str) -> ModelCard:
        """Return a model's card. Raises UnknownModel and ModelUnavailable."""
        if not name:
            raise UnknownModel(not_served(name, self.names), param="model")
        return self.find(name).model

    @property
    def cards(self) -> Sequence[ModelCard]:
        """Cards of all models, the default one first, then by their first names."""
        cards = {served.model.id: served.model for served in self._served.values()}
        return [self.default.model, *(cards[name] for name in sorted(cards) if name != self.default.model.id)]

    @property
    def names(self) -> Sequence[str]:
        return [name for card in self.cards for name in card.names]

    @property
    def max_context(self) -> int:
        """Largest limit of prompt and answer of any model, in tokens."""
        return max(card.max_model_len for card in self.cards)

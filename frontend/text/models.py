"""Models served at one router's endpoints, by name."""

from __future__ import annotations

from collections.abc import Sequence

from core.types.errors import ModelUnavailable, UnknownModel
from frontend.text.completion import Completions
from frontend.text.completion_request import ModelCard, not_served


class Models:
    """Registry of served models; names are unique, the first one wins. Bound to the router's event loop."""

    def __init__(self, default: Completions) -> None:
        """default: model of the router's own deployment, used for requests that name none."""
        self.default = default
        self._others: dict[str, Completions] = {}
        self._unavailable: dict[str, str] = {}  # reason, by name of a model that should be served but is not

    @classmethod
    def of(cls, served: Completions | Models) -> Models:
        return served if isinstance(served, Models) else cls(served)

    def add(self, served: Completions) -> bool:
        """Add a model. Return False if its name is taken."""
        name = served.model.id
        if name == self.default.model.id or name in self._others:
            return False
        self._unavailable.pop(name, None)
        self._others[name] = served
        return True

    def remove(self, served: Completions) -> None:
        """Remove a model; running requests continue."""
        if self._others.get(served.model.id) is served:
            del self._others[served.model.id]

    def report_unavailable(self, name: str, why: str) -> None:
        """Mark a model as known but not servable at present."""
        if name != self.default.model.id and name not in self._others:
            self._unavailable[name] = why

    def forget_unavailable(self, name: str) -> None:
        """Remove the mark of `report_unavailable`."""
        self._unavailable.pop(name, None)

    def is_known(self, name: str) -> bool:
        """Return whether the model is served, or should be."""
        return name in (self.default.model.id, *self._others, *self._unavailable)

    def find(self, name: str) -> Completions:
        """Return the model, the default one for an empty name. Raises UnknownModel and ModelUnavailable."""
        if not name or name == self.default.model.id:
            return self.default
        if (served := self._others.get(name)) is not None:
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
        """Cards of all models, the default one first."""
        return [self.default.model, *(self._others[name].model for name in sorted(self._others))]

    @property
    def names(self) -> Sequence[str]:
        return [card.id for card in self.cards]

    @property
    def max_context(self) -> int:
        """Largest context of any model, in tokens."""
        return max(card.max_context for card in self.cards)

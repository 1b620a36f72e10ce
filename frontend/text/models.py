"""The models behind one pair of doors, by the names that clients call them."""

from __future__ import annotations

from collections.abc import Sequence

from core.types.errors import ModelUnavailable, UnknownModel
from frontend.text.completion import Completions
from frontend.text.completion_request import ModelCard, not_served


class Models:
    """Belongs to the event loop of its router. A name belongs to one model, the first that has it."""

    def __init__(self, default: Completions) -> None:
        """default: of the deployment whose doors these are; meant where a request names none."""
        self.default = default
        self._others: dict[str, Completions] = {}
        self._unavailable: dict[str, str] = {}  # of models that are known by name alone: why they are not there

    @classmethod
    def of(cls, served: Completions | Models) -> Models:
        return served if isinstance(served, Models) else cls(served)

    def add(self, served: Completions) -> bool:
        """From now on requests reach it. False where another model has its name."""
        name = served.model.id
        if name == self.default.model.id or name in self._others:
            return False
        self._unavailable.pop(name, None)
        self._others[name] = served
        return True

    def remove(self, served: Completions) -> None:
        """No request reaches it any more; what runs goes on."""
        if self._others.get(served.model.id) is served:
            del self._others[served.model.id]

    def report_unavailable(self, name: str, why: str) -> None:
        """This model should be here, and cannot be served by this router at present."""
        if name != self.default.model.id and name not in self._others:
            self._unavailable[name] = why

    def forget_unavailable(self, name: str) -> None:
        """It should not be here any more."""
        self._unavailable.pop(name, None)

    def is_known(self, name: str) -> bool:
        """Whether it is here, or should be."""
        return name in (self.default.model.id, *self._others, *self._unavailable)

    def find(self, name: str) -> Completions:
        """Raises UnknownModel and ModelUnavailable."""
        if not name or name == self.default.model.id:
            return self.default
        if (served := self._others.get(name)) is not None:
            return served
        if name in self._unavailable:
            raise ModelUnavailable(f"model {name!r} is not served by this router at present: {self._unavailable[name]}")
        raise UnknownModel(not_served(name, self.names), param="model")

    def card(self, name: str) -> ModelCard:
        """Raises UnknownModel and ModelUnavailable."""
        if not name:
            raise UnknownModel(not_served(name, self.names), param="model")
        return self.find(name).model

    @property
    def cards(self) -> Sequence[ModelCard]:
        """Of all, the default one first."""
        return [self.default.model, *(self._others[name].model for name in sorted(self._others))]

    @property
    def names(self) -> Sequence[str]:
        return [card.id for card in self.cards]

    @property
    def max_context(self) -> int:
        """Tokens, of the model that takes most."""
        return max(card.max_context for card in self.cards)

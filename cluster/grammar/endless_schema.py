"""Whether a JSON schema has no instance that ends: one whose parts only lead back to themselves has none, and an answer
to it would go on until its length cuts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.words.json_schema import target

_MAX_ROUNDS = 32  # a schema whose parts lead that far before they come back is let through
_NESTED = ("null", "array", "object")  # the two kinds of values that may not end, and one for all others


def is_endless(schema: Any) -> bool:
    """What is not understood is taken to end. Looks at each part _MAX_ROUNDS times at most. Raises RecursionError."""
    ending: set[str] = set()  # references known to lead to what ends: at first none
    for _ in range(_MAX_ROUNDS):
        seen = _Round(schema, ending)
        if seen.ends(schema):
            return False
        more = seen.references() - ending
        if not more:
            return True
        ending |= more
    return False


class _Round:
    """What can be said with what is known. Each part is looked at once."""

    def __init__(self, document: Any, ending: set[str]) -> None:
        self._document = document
        self._ending = ending
        self._known: dict[int, bool] = {}  # by a part's identity
        self._met: set[str] = set()  # references

    def references(self) -> set[str]:
        """Those that end, of all that were met and, as their targets are looked at, are met yet."""
        found, looked = set[str](), set[str]()
        while new := self._met - looked:
            looked |= new
            found |= {reference for reference in new if self.ends(target(self._document, reference))}
        return found

    def ends(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return True
        if id(schema) not in self._known:
            self._known[id(schema)] = True  # a document is a tree: it does not come back here
            self._known[id(schema)] = self._all_end(schema)
        return self._known[id(schema)]

    def _all_end(self, schema: Mapping[str, Any]) -> bool:
        """All that must hold for one value. Every part is looked at, for what it refers to."""
        checks = [self.ends(one) for one in _list(schema.get("allOf"))]
        if isinstance(reference := schema.get("$ref"), str) and self._is_inside(reference):
            self._met.add(reference)
            checks.append(reference in self._ending)
        for key in ("anyOf", "oneOf"):
            if some := [self.ends(one) for one in _list(schema.get(key))]:
                checks.append(any(some))
        kinds = schema.get("type", _NESTED)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if some := [self._kind_ends(kind, schema) for kind in kinds] if isinstance(kinds, list | tuple) else []:
            checks.append(any(some))
        return all(checks)

    def _kind_ends(self, kind: Any, schema: Mapping[str, Any]) -> bool:
        parts: list[Any] = []
        if kind == "object" and isinstance(properties := schema.get("properties"), Mapping):
            parts = [properties.get(name) for name in _list(schema.get("required")) if isinstance(name, str)]
        if kind == "array" and isinstance(least := schema.get("minItems"), int):
            first = _list(schema.get("prefixItems"))
            parts = [*first[:least], *([schema.get("items")] if least > len(first) else [])]
        return all([self.ends(part) for part in parts])

    def _is_inside(self, reference: str) -> bool:
        try:
            target(self._document, reference)
        except LookupError:
            return False
        return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

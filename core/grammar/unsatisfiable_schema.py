"""Detection of JSON schemas without a finite instance, such as a part that requires itself. An answer to one would
continue until its length limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from core.types.json_schema import target

_NESTED = ("null", "array", "object")  # the two kinds of values that may not end; null stands for all others


def is_endless(schema: Any) -> bool:
    """Return whether no instance ends. Unknown keywords count as finite. Takes time linear in the schema."""
    return not _Needs(schema).are_met()


class _Needs:
    """Graph of the parts that each part of a document needs in order to end. Each part is visited once.

    A node is the number of a part, or of a combination of parts.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._numbers: dict[int, int] = {}  # id() of a part that may not end -> node
        self._unread: list[tuple[int, Mapping[str, Any]]] = []
        self._num_lacking: list[int] = []  # unmet needs per node; 0: it ends
        self._needed_by: list[list[int]] = []

    def are_met(self) -> bool:
        """Return whether the whole document has a finite instance."""
        whole = self._part(self._document)
        while self._unread:
            number, part = self._unread.pop()
            self._needs_all(number, list(self._checks(part)))
        ending = [number for number, lacking in enumerate(self._num_lacking) if not lacking]
        while ending:
            for number in self._needed_by[ending.pop()]:
                self._num_lacking[number] -= 1
                if not self._num_lacking[number]:
                    ending.append(number)
        return not self._num_lacking[whole]

    def _part(self, schema: Any) -> int:
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return self._new()
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = number = self._new()
            self._unread.append((number, schema))
        return self._numbers[id(schema)]

    def _checks(self, schema: Mapping[str, Any]) -> Iterator[int]:
        """Yield the nodes that one value must satisfy."""
        yield from map(self._part, _list(schema.get("allOf")))
        if isinstance(reference := schema.get("$ref"), str):
            try:
                yield self._part(target(self._document, reference))
            except LookupError:
                pass
        for key in ("anyOf", "oneOf"):
            yield self._any([self._part(one) for one in _list(schema.get(key))])
        kinds = schema.get("type", _NESTED)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if isinstance(kinds, list | tuple):
            yield self._any([self._kind(kind, schema) for kind in kinds])

    def _kind(self, kind: Any, schema: Mapping[str, Any]) -> int:
        parts: list[Any] = []
        if kind == "object" and isinstance(properties := schema.get("properties"), Mapping):
            parts = [properties.get(name) for name in _list(schema.get("required")) if isinstance(name, str)]
        if kind == "array" and isinstance(least := schema.get("minItems"), int):
            first = _list(schema.get("prefixItems"))
            parts = [*first[:least], *([schema.get("items")] if least > len(first) else [])]
        number = self._new()
        self._needs_all(number, [self._part(part) for part in parts])
        return number

    def _any(self, some: Sequence[int]) -> int:
        """Return a node that needs one of `some`, if there are any."""
        number = self._new()
        self._num_lacking[number] = min(1, len(some))
        for one in some:
            self._needed_by[one].append(number)
        return number

    def _needs_all(self, number: int, others: Sequence[int]) -> None:
        self._num_lacking[number] = len(others)
        for other in others:
            self._needed_by[other].append(number)

    def _new(self) -> int:
        self._num_lacking.append(0)
        self._needed_by.append([])
        return len(self._num_lacking) - 1


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

"""Differences between two specs, by key, and the restart that each change needs. Pure.

A key without a rule below needs a new deployment, so keys added to the spec are rejected in updates until a rule
exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeAlias

from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role

# Path of keys. Not a dotted string, because label names may contain dots: `ray.io/market-type`.
_Keys: TypeAlias = tuple[str, ...]


class Needs(StrEnum):
    """Restart that a changed key needs to take effect."""

    NOTHING = "nothing: taken live"
    PREFILL = "new prefill replicas"
    DECODE = "new decode replicas"
    REPLICAS = "new replicas of both roles"
    DEPLOYMENT = "a new deployment"

    @property
    def roles(self) -> frozenset[Role]:
        """Roles whose replicas are replaced."""
        return _ROLES.get(self, frozenset())


_ROLES = {
    Needs.PREFILL: frozenset({Role.PREFILL}),
    Needs.DECODE: frozenset({Role.DECODE}),
    Needs.REPLICAS: frozenset(Role),
}

# The longest matching prefix of a key's path applies.
_RULES = {
    "prefill": Needs.PREFILL,
    "prefill.replicas": Needs.NOTHING,
    "decode": Needs.DECODE,
    "decode.replicas": Needs.NOTHING,
    "autoscale": Needs.NOTHING,
    "speculation": Needs.DECODE,
    # Draft heads have KV layers, which replicas transfer.
    "speculation.model": Needs.REPLICAS,
    "engine": Needs.REPLICAS,
    "model.dtype": Needs.REPLICAS,
    "model.weights": Needs.REPLICAS,
    "kv": Needs.REPLICAS,
    # Routers compute block hashes with it.
    "kv.block_size": Needs.DEPLOYMENT,
    "timeouts.start_s": Needs.NOTHING,
    "timeouts.drain_s": Needs.NOTHING,
    "timeouts.transfer_s": Needs.REPLICAS,
    "timeouts.handoff_s": Needs.REPLICAS,
}

# Specs that agree in all of these produce the same tokens, except for rounding.
_TOKEN_KEYS = (
    "model.source", "model.dtype", "model.weights", "kv.pool_dtype", "kv.wire_dtype", "kv.unquantized_layers",
    "engine.deterministic",
)  # fmt: skip
# If they also agree in these, a running sequence can move from one to the other.
_TRANSFER_KEYS = ("kv", "speculation.model")


@dataclass(frozen=True, kw_only=True)
class SpecChange:
    """One key that an update changes."""

    path: str  # "decode.max_running"
    old: Any  # plain values, as in a spec file
    new: Any
    # The change adds or removes transferred layers.
    changes_layers: bool = False

    @property
    def needs(self) -> Needs:
        if self.changes_layers:
            return Needs.REPLICAS
        rules = (_RULES[path] for path in _prefixes(self.path) if path in _RULES)
        return next(rules, Needs.DEPLOYMENT)

    def __str__(self) -> str:
        # The URL may contain a password.
        if self.path == "index":
            return "index: changed"
        return f"{self.path}: {_shown(self.old)} -> {_shown(self.new)}"


def updated(old: Spec, named: Mapping[str, Any], *, is_whole: bool) -> Spec:
    """Return the spec that results from applying `named` to `old`.

    is_whole: `named` is a full spec, and keys that it omits get their defaults; otherwise only the named keys change.
    Keys that an update cannot change keep their value unless named, so a spec file need not repeat a port that an
    option of `cluster deploy` had set. Raises SpecError.
    """
    settings = dict(_leaves(old.model_dump(mode="json")))
    if is_whole:
        defaulted = dict(_leaves(parse_spec(dict(named)).model_dump(mode="json")))
        beyond = {keys: value for keys, value in settings.items() if _needs(keys) is Needs.DEPLOYMENT}
        settings = beyond | {keys: value for keys, value in defaulted.items() if _needs(keys) is not Needs.DEPLOYMENT}
    tree = _tree(settings)
    _overlay(tree, named)
    return parse_spec(tree, origin="the updated spec")


def changes_of(old: Spec, new: Spec) -> list[SpecChange]:
    """Return the changed keys, in the order of the spec."""
    before, after = dict(_leaves(old.model_dump(mode="json"))), dict(_leaves(new.model_dump(mode="json")))
    both = ((keys, before.get(keys), after.get(keys)) for keys in dict.fromkeys([*before, *after]))
    other_layers = _heads_of(old) != _heads_of(new)
    return [
        SpecChange(
            path=".".join(keys), old=was, new=becomes, changes_layers=other_layers and keys == ("speculation", "method")
        )
        for keys, was, becomes in both
        if was != becomes
    ]


def check_possible(changes: Sequence[SpecChange]) -> None:
    """Raise SpecError if a change needs a new deployment."""
    beyond = [change.path for change in changes if change.needs is Needs.DEPLOYMENT]
    if beyond:
        raise SpecError(
            f"{', '.join(beyond)}: cannot change while deployed, because the routers depend on it; deploy the new spec "
            "under another --name and other ports, move the clients, and take this deployment down"
        )


def tokens_of(spec: Spec) -> str:
    """Return a digest that is equal for specs that produce the same tokens, except for rounding."""
    return _digest(spec, _TOKEN_KEYS)


def kind_of(spec: Spec) -> str:
    """Return a digest that is equal for specs between which running sequences can move."""
    return _digest(spec, (*_TOKEN_KEYS, *_TRANSFER_KEYS), heads=_heads_of(spec))


def _heads_of(spec: Spec) -> str | None:
    """Return the source of draft heads whose layers are transferred, or None.

    With method `auto` the source may be a smaller model; only its directory shows that.
    """
    drafts = spec.speculation
    if drafts.heads == "mtp":
        return spec.model.source
    return drafts.model if drafts.heads or drafts.method == "auto" else None


def _digest(spec: Spec, paths: Sequence[str], *, heads: str | None = None) -> str:
    leaves = _leaves(spec.model_dump(mode="json"))
    values = ((".".join(keys), value) for keys, value in leaves)
    facts = [(path, value) for path, value in values if not {*_prefixes(path)}.isdisjoint(paths)]
    return blake2b(repr([*facts, *([heads] if heads else [])]).encode(), digest_size=8).hexdigest()


def _prefixes(path: str) -> Iterator[str]:
    """Yield the prefixes of a dotted path, longest first: "a.b.c", "a.b", "a"."""
    keys = path.split(".")
    return (".".join(keys[:end]) for end in range(len(keys), 0, -1))


def _leaves(tree: Mapping[str, Any], under: _Keys = ()) -> Iterator[tuple[_Keys, Any]]:
    """Yield each leaf as (path of keys, value)."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*under, key))
        else:
            yield (*under, key), value


def _needs(keys: _Keys) -> Needs:
    return SpecChange(path=".".join(keys), old=None, new=None).needs


def _tree(leaves: Mapping[_Keys, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*above, key), value in leaves.items():
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[key] = value
    return tree


def _overlay(tree: dict[str, Any], named: Mapping[str, Any]) -> None:
    for key, value in named.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _overlay(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

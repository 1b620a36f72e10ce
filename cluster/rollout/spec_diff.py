"""What an update changes of a spec, key by key, and what each change needs: nothing, new replicas, or more than an
update can do. Pure.

What has no rule below needs a new deployment: a key that somebody adds to the spec is refused until somebody has
thought of it.
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

_Keys: TypeAlias = tuple[str, ...]  # a path; no text, for a label's own name may have dots: `ray.io/market-type`


class Needs(StrEnum):
    """What a changed key needs before it counts."""

    NOTHING = "nothing: taken live"
    PREFILL = "new prefill replicas"
    DECODE = "new decode replicas"
    REPLICAS = "new replicas of both roles"
    DEPLOYMENT = "a new deployment"

    @property
    def roles(self) -> frozenset[Role]:
        """Whose replicas are replaced."""
        return _ROLES.get(self, frozenset())


_ROLES = {
    Needs.PREFILL: frozenset({Role.PREFILL}),
    Needs.DECODE: frozenset({Role.DECODE}),
    Needs.REPLICAS: frozenset(Role),
}

# The longest beginning of a key's path counts.
_RULES = {
    "prefill": Needs.PREFILL,
    "prefill.replicas": Needs.NOTHING,
    "decode": Needs.DECODE,
    "decode.replicas": Needs.NOTHING,
    "autoscale": Needs.NOTHING,
    "speculation": Needs.DECODE,
    "speculation.model": Needs.REPLICAS,  # heads' layers are shipped
    "engine": Needs.REPLICAS,
    "model.dtype": Needs.REPLICAS,
    "model.weights": Needs.REPLICAS,
    "kv": Needs.REPLICAS,
    "kv.block_size": Needs.DEPLOYMENT,  # routers name blocks by it
    "timeouts.start_s": Needs.NOTHING,
    "timeouts.drain_s": Needs.NOTHING,
    "timeouts.transfer_s": Needs.REPLICAS,
    "timeouts.handoff_s": Needs.REPLICAS,
}

# Where two specs agree in all of these, their replicas give the same tokens, but for rounding.
_SAYS_TOKENS = (
    "model.source", "model.dtype", "model.weights", "kv.pool_dtype", "kv.wire_dtype", "engine.deterministic",
)  # fmt: skip
# And where they agree in these, too, a running answer moves from one to the other.
_SAYS_LINKS = ("kv", "speculation.model")


@dataclass(frozen=True, kw_only=True)
class SpecChange:
    """One key that an update changes."""

    path: str  # "decode.max_running"
    old: Any  # plain values, as in a spec file
    new: Any
    changes_layers: bool = False  # of what is shipped

    @property
    def needs(self) -> Needs:
        if self.changes_layers:
            return Needs.REPLICAS
        rules = (_RULES[path] for path in _beginnings(self.path) if path in _RULES)
        return next(rules, Needs.DEPLOYMENT)

    def __str__(self) -> str:
        if self.path == "index":  # there may be a password in it
            return "index: another one"
        return f"{self.path}: {_shown(self.old)} -> {_shown(self.new)}"


def updated(old: Spec, named: Mapping[str, Any], *, is_whole: bool) -> Spec:
    """What a deployment of spec `old` becomes by what an operator has `named` of a spec.

    is_whole: it is a spec, in which what is not named has its default; else only what is named changes. What an update
    cannot change stays as it is unless it is named: so a spec file need not repeat a port that an option of `cluster
    deploy` had set. Raises SpecError.
    """
    kept = dict(_leaves(old.model_dump(mode="json")))
    if is_whole:
        wanted = dict(_leaves(parse_spec(dict(named)).model_dump(mode="json")))
        beyond = {keys: value for keys, value in kept.items() if _needs(keys) is Needs.DEPLOYMENT}
        kept = beyond | {keys: value for keys, value in wanted.items() if _needs(keys) is not Needs.DEPLOYMENT}
    tree = _tree(kept)
    _lay_over(tree, named)
    return parse_spec(tree, origin="the updated spec")


def changes_of(old: Spec, new: Spec) -> list[SpecChange]:
    """In the order of the spec."""
    before, after = dict(_leaves(old.model_dump(mode="json"))), dict(_leaves(new.model_dump(mode="json")))
    both = ((keys, before.get(keys), after.get(keys)) for keys in dict.fromkeys([*before, *after]))
    other_layers = _heads_of(old) != _heads_of(new)
    return [
        SpecChange(
            path=".".join(keys),
            old=was,
            new=becomes,
            changes_layers=other_layers and keys == ("speculation", "method"),
        )
        for keys, was, becomes in both
        if was != becomes
    ]


def check_possible(changes: Sequence[SpecChange]) -> None:
    """Raises SpecError where one of them is more than an update can do."""
    beyond = [change.path for change in changes if change.needs is Needs.DEPLOYMENT]
    if beyond:
        raise SpecError(
            f"{', '.join(beyond)}: cannot change while deployed, for the routers hold to it; deploy the new spec "
            "beside this one under another --name and other ports, move the clients, and take this one down"
        )


def tokens_of(spec: Spec) -> str:
    """Equal where two specs give the same tokens, but for rounding."""
    return _digest(spec, _SAYS_TOKENS)


def kind_of(spec: Spec) -> str:
    """Equal where running answers may move from replicas of one spec to those of the other."""
    return _digest(spec, (*_SAYS_TOKENS, *_SAYS_LINKS), heads=_heads_of(spec))


def _heads_of(spec: Spec) -> str | None:
    """What names heads that both roles load, whose layers are shipped behind the model's.

    Of `auto` it may be a smaller model, which only its directory would tell.
    """
    drafts = spec.speculation
    if drafts.heads == "mtp":
        return spec.model.source
    return drafts.model if drafts.heads or drafts.method == "auto" else None


def _digest(spec: Spec, paths: Sequence[str], *, heads: str | None = None) -> str:
    leaves = _leaves(spec.model_dump(mode="json"))
    said = ((".".join(keys), value) for keys, value in leaves)
    facts = [(path, value) for path, value in said if not {*_beginnings(path)}.isdisjoint(paths)]
    return blake2b(repr([*facts, *([heads] if heads else [])]).encode(), digest_size=8).hexdigest()


def _beginnings(path: str) -> Iterator[str]:
    """Of "a.b.c": itself, "a.b", "a"."""
    keys = path.split(".")
    return (".".join(keys[:end]) for end in range(len(keys), 0, -1))


def _leaves(tree: Mapping[str, Any], under: _Keys = ()) -> Iterator[tuple[_Keys, Any]]:
    """Each key that has no keys below it, behind those above it."""
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


def _lay_over(tree: dict[str, Any], named: Mapping[str, Any]) -> None:
    for key, value in named.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _lay_over(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

"""Loading of a Spec from a YAML file or a shorthand. Errors name the path of each bad key, in one line."""

from __future__ import annotations

import difflib
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from core.spec.schema import Spec
from core.types.errors import SpecError

_SHORTHAND = re.compile(r"(?P<prefill>[0-9]+)P(?P<decode>[0-9]+)D", re.IGNORECASE)


def load_spec(source: str | dict[str, Any], *, overrides: list[str] | None = None) -> Spec:
    """Read a spec from a YAML file, a shorthand such as "2P4D", or plain values, and apply `PATH=VALUE` overrides.

    Raises SpecError with one line that names the path of every mistake and, where possible, the fix.
    """
    return parse_spec(named_keys(source, overrides or []), origin=source if isinstance(source, str) else "spec")


def named_keys(source: str | dict[str, Any] | None, overrides: list[str]) -> dict[str, Any]:
    """Return the values set by a file, a shorthand or plain values (None: none), and by overrides, without defaults.

    Raises SpecError.
    """
    tree = _read(source) if source is not None else {}
    for override in overrides:
        _override(tree, override)
    return tree


def parse_spec(tree: dict[str, Any], *, origin: str = "spec") -> Spec:
    """Validate a tree of plain values. Raises SpecError."""
    try:
        return Spec.model_validate(tree)
    except ValidationError as error:
        raise SpecError(f"{origin}: " + "; ".join(_explain(e) for e in error.errors())) from None


def _read(source: str | dict[str, Any]) -> dict[str, Any]:
    if not isinstance(source, str):
        return deepcopy(source)
    path = Path(source)
    if not path.exists():
        if shorthand := _SHORTHAND.fullmatch(source):
            return {
                "prefill": {"replicas": int(shorthand["prefill"])},
                "decode": {"replicas": int(shorthand["decode"])},
            }
        raise SpecError(f"{source}: no such file, and not a topology such as 2P4D")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise SpecError(f"{source}: a spec is a mapping with keys such as model, prefill and decode")
    return tree


class _Loader(yaml.SafeLoader):
    """Loader that rejects duplicate keys. YAML would silently keep the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    # Without a mark, which would quote the line: it may hold a password.
                    line = key.start_mark.line + 1
                    raise yaml.composer.ComposerError(f"{key.value} is written twice, again in line {line}")
                seen.add(key.value)
        return node


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {override}: write PATH=VALUE, such as --set model.dtype=float32")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise SpecError(f"--set {override}: the value is not readable as YAML") from None
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SpecError(f"--set {override}: {key} is a value, not a section")
        node = child
    node[keys[-1]] = value


def _explain(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key{_did_you_mean(error['loc'])}"
    # Leave out sections, which are long and whose keys the message names, and the index, which may contain a password.
    got = "" if isinstance(error["input"], dict) or path == "index" else f" (got {error['input']!r})"
    if error["type"] == "model_type":
        return f"{path}: a section of keys is expected, such as {path}.{_keys(error['loc'])[0]}{got}"
    message = error["msg"].removeprefix("Value error, ")
    # Errors about several sections have an empty path and name the sections themselves.
    prefix = f"{path}: " if path else ""
    meant = _word_meant(error) if error["type"] == "literal_error" else ""
    return f"{prefix}{message[0].lower()}{message[1:]}{got}{meant}"


def _word_meant(error: Any) -> str:
    words = re.findall(r"'([^']*)'", error["ctx"]["expected"])
    close = difflib.get_close_matches(str(error["input"]), words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _did_you_mean(path: tuple[str | int, ...]) -> str:
    known = _keys(path[:-1])
    if close := difflib.get_close_matches(str(path[-1]), known, n=1):
        return f"; did you mean {close[0]}?"
    if len(path) > 1 and path[-1] in Spec.model_fields:
        return f"; {path[-1]} belongs beside {path[0]}, not in it"
    return f"; known keys: {', '.join(known)}" if known else ""


def _keys(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys of the section at that path; none if it is not a section."""
    section: Any = Spec
    for key in path:
        field = section.model_fields.get(key) if hasattr(section, "model_fields") else None
        # An optional section such as `autoscale` is a union with None.
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return list(getattr(section, "model_fields", {}))

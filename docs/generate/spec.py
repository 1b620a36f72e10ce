"""Tables of all keys of a spec, for docs/SPEC.md."""

from __future__ import annotations

import json
from typing import Any

from core.spec.schema import Spec
from docs.generate.table import table

_HEADING = ("key", "default", "type", "meaning")
_POOLS = ("prefill", "decode")


def sections() -> str:
    """Return one table per section, in the order of the spec."""
    schema = Spec.model_json_schema()
    of_section = {key: _section(schema, field) for key, field in schema["properties"].items()}
    plain = {key: field for key, field in schema["properties"].items() if of_section[key] is None}
    parts = ["## Top level\n\n" + _table("", plain, schema)]
    for key, section in of_section.items():
        if section is None or key == _POOLS[1]:
            continue
        if key == _POOLS[0]:
            parts.append(_pools(section, of_section[_POOLS[1]] or {}, schema))
        else:
            said = " ".join(filter(None, (section["description"], schema["properties"][key].get("description"))))
            parts.append(f"## `{key}`\n\n{said}\n\n{_table(key, section['properties'], schema)}")
    return "\n\n".join(parts)


def _pools(prefill: dict[str, Any], decode: dict[str, Any], schema: dict[str, Any]) -> str:
    fields = {"prefill": prefill["properties"], "decode": decode["properties"]}
    shared = {key: field for key, field in fields["decode"].items() if key in fields["prefill"]}
    for key in shared:
        defaults = {role: of_role[key].get("default") for role, of_role in fields.items()}
        if defaults["prefill"] != defaults["decode"]:
            shared[key] = shared[key] | {"default_of": defaults}
    only = [
        f"Only in `{role}`:\n\n" + _table(role, {key: one for key, one in of_role.items() if key not in shared}, schema)
        for role, of_role in fields.items()
    ]
    return (
        "## `prefill` and `decode`\n\nReplicas of one role. Both sections have these keys; write the prefix: "
        f"`prefill.replicas`, `decode.replicas`.\n\n{_table('', shared, schema)}\n\n" + "\n\n".join(only)
    )


def _table(prefix: str, fields: dict[str, Any], schema: dict[str, Any]) -> str:
    return table(_HEADING, [row for key, field in fields.items() for row in _rows(prefix, key, field, schema)])


def _rows(prefix: str, key: str, field: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, ...]]:
    path = f"{prefix}.{key}" if prefix else key
    if section := _section(schema, field):
        return [row for name, inner in section["properties"].items() for row in _rows(path, name, inner, schema)]
    kind = ", ".join(filter(None, (_type(field), _unit(field))))
    return [(f"`{path}`", _default(field), kind, field["description"])]


def _section(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any] | None:
    if "$ref" not in field:
        of_its_own = next((one for one in field.get("anyOf", ()) if "$ref" in one), None)  # that may be left out
        return _section(schema, of_its_own) if of_its_own else None
    found: dict[str, Any] = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return found


def _default(field: dict[str, Any]) -> str:
    if defaults := field.get("default_of"):
        return ", ".join(f"{role} `{json.dumps(value)}`" for role, value in defaults.items())
    value = field["default"]
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(kind) for kind in field["anyOf"])
    if values := field.get("enum") or field.get("examples"):
        return ", ".join(f"`{value}`" for value in values)
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if field["type"] == "object":
        return f"mapping of string to {_type(field['additionalProperties'])}"
    return " ".join(part for part in (field["type"], _bounds(field)) if part)


def _bounds(field: dict[str, Any]) -> str:
    low, above, high = (field.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    parts = [
        f"from {low}" if low is not None else "",
        f"above {above}" if above is not None else "",
        f"to {high}" if high is not None else "",
        f"like `{field['pattern']}`" if "pattern" in field else "",
    ]
    return " ".join(part for part in parts if part)


def _unit(field: dict[str, Any]) -> str:
    kinds = [field, *field.get("anyOf", [])]
    return next((kind["unit"] for kind in kinds if "unit" in kind), "")

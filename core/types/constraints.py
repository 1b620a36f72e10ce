"""Grammars that constrain an answer, as text. `core.grammar` compiles them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.types.validation import check

MAX_SCHEMA_BYTES = 64 * 1024
# Limit of a regular expression, and of a grammar without its schemas: the cost of a mask grows with their length.
MAX_GRAMMAR_BYTES = 8 * 1024
_MAX_INTEGER, _MAX_DIGITS = 2**53 - 1, 17  # digits include a sign
SCHEMA_RULE = re.compile(r"^(\w+: %json )(.+)$", re.MULTILINE)  # group 2: the schema


class GrammarKind(StrEnum):
    """Syntax of a grammar."""

    JSON_SCHEMA = "json_schema"
    LENIENT_JSON_SCHEMA = "lenient_json_schema"  # ignores keywords that cannot be enforced
    REGEX = "regex"  # Rust syntax; matches the whole answer
    LARK = "lark"  # llguidance's dialect; the answer matches `start`
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's JSON form; the router converts it to LARK


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Grammar of every choice of a request."""

    kind: GrammarKind
    text: str

    @classmethod
    def of_choice(cls, texts: Sequence[str], param: str) -> Grammar:
        """Make a grammar whose answers are `texts`. Raises RequestError if they are empty or too long together."""
        check(bool(texts), param, "must not be empty")
        fits = len(texts) + sum(map(len, texts[:MAX_GRAMMAR_BYTES])) <= MAX_GRAMMAR_BYTES
        check(fits, param, f"must have at most {MAX_GRAMMAR_BYTES} bytes together")
        return cls(kind=GrammarKind.LARK, text="start: " + " | ".join(map(in_quotes, texts)))

    def check(self, param: str) -> None:
        """Check the grammar's size and its schemas' integers. Raises RequestError."""
        check(bool(self.text), param, "must not be empty")
        is_small = self.kind is GrammarKind.REGEX
        _check_size(self.text, param, MAX_GRAMMAR_BYTES if is_small else MAX_SCHEMA_BYTES)
        schemas = [self.text] if self.kind is GrammarKind.JSON_SCHEMA else []
        if self.kind is GrammarKind.LARK:
            _check_size(SCHEMA_RULE.sub(_without_schema, self.text), param, MAX_GRAMMAR_BYTES)
            schemas = [rule[2] for rule in SCHEMA_RULE.finditer(self.text) if not _is_lenient(rule[2])]
        for schema in schemas:
            _check_integers(schema, param)


ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')


def in_quotes(text: str) -> str:
    """Quote `text` as a Lark literal. Lark accepts JSON's escapes and no raw control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _check_size(text: str, param: str, most: int) -> None:
    check(len(text.encode(errors="surrogatepass")) <= most, param, f"must have at most {most} bytes")


def _check_integers(schema: str, param: str) -> None:
    """Reject integers that fp64 cannot represent: masks treat numbers as fp64 and would allow another one."""

    def check_one(digits: str) -> int:
        is_exact = len(digits) <= _MAX_DIGITS and abs(int(digits)) <= _MAX_INTEGER
        check(is_exact, param, f"integers must be from {-_MAX_INTEGER} to {_MAX_INTEGER}; write larger ones as text")
        return 0

    try:
        json.loads(schema, parse_int=check_one)
    except (ValueError, RecursionError):
        return  # the compiler reports the syntax error


def _is_lenient(schema: str) -> bool:
    """True if the schema asks to ignore keywords that cannot be enforced."""
    try:
        return json.loads(schema)["x-guidance"]["lenient"] is True
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _without_schema(rule: re.Match[str]) -> str:
    """Return the rule without its schema, or unchanged if it holds more than a schema.

    Schemas count towards a limit of their own.
    """
    try:
        return rule[1] if isinstance(json.loads(rule[2]), dict) else rule[0]
    except (ValueError, RecursionError):
        return rule[0]

"""What an answer must keep to, as a client has said it: text that somebody else compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.types.validation import check

MAX_SCHEMA_BYTES = 64 * 1024
MAX_GRAMMAR_BYTES = 8 * 1024  # of a regular expression or a grammar beside schemas: a mask costs what they are long
_MAX_INTEGER, _MAX_DIGITS = 2**53 - 1, 17  # with a sign
SCHEMA_RULE = re.compile(r"^(\w+: %json )(.+)$", re.MULTILINE)  # its schema is the second group


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    LENIENT_JSON_SCHEMA = "lenient_json_schema"  # what cannot be enforced of it is passed over
    REGEX = "regex"  # in Rust's syntax, of the whole answer
    LARK = "lark"  # as llguidance has it; the answer is its `start`
    STRUCTURAL_TAG = "structural_tag"  # as xgrammar has it, in JSON; a router makes LARK of it, for replicas too


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The same for every choice of a request."""

    kind: GrammarKind
    text: str

    @classmethod
    def of_choice(cls, texts: Sequence[str], param: str) -> Grammar:
        """The answer is one of these. Raises RequestError where they are too many, before anything is made of them."""
        check(bool(texts), param, "must not be empty")
        fits = len(texts) + sum(map(len, texts[:MAX_GRAMMAR_BYTES])) <= MAX_GRAMMAR_BYTES
        check(fits, param, f"at most {MAX_GRAMMAR_BYTES} bytes are taken")
        return cls(kind=GrammarKind.LARK, text="start: " + " | ".join(map(in_quotes, texts)))

    def check(self, param: str) -> None:
        """Its size. Raises RequestError."""
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
    """As a literal of Lark's, which takes JSON's escapes, and no control character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _check_size(text: str, param: str, most: int) -> None:
    check(len(text.encode(errors="surrogatepass")) <= most, param, f"at most {most} bytes are taken")


def _check_integers(schema: str, param: str) -> None:
    """Masks know numbers as fp64 does: beyond its integers they would let through another one."""

    def check_one(digits: str) -> int:
        is_exact = len(digits) <= _MAX_DIGITS and abs(int(digits)) <= _MAX_INTEGER
        check(
            is_exact, param, f"integers are kept to from {-_MAX_INTEGER} to {_MAX_INTEGER}; write larger ones as text"
        )
        return 0

    try:
        json.loads(schema, parse_int=check_one)
    except (ValueError, RecursionError):
        return  # whoever compiles it says what is wrong


def _is_lenient(schema: str) -> bool:
    """Whether what cannot be kept to is passed over, in a rule that is this schema."""
    try:
        return json.loads(schema)["x-guidance"]["lenient"] is True
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _without_schema(rule: re.Match[str]) -> str:
    """A rule that is a schema and nothing else costs what a schema does."""
    try:
        return rule[1] if isinstance(json.loads(rule[2]), dict) else rule[0]
    except (ValueError, RecursionError):
        return rule[0]

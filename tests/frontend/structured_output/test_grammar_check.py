"""Compilation of grammars in a router, and its cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.types.errors import RequestError
from core.types.request import Grammar, GrammarKind
from frontend.openai.types import ChatBody
from frontend.structured_output.constrained_answer import GrammarCheck
from frontend.text.completion_request import CompletionRequest
from tests.support.character_tokenizer import save_tokenizer


class CountingCompiler(GrammarCompiler):
    """Compiler that records its calls, and reports chosen grammars as slow."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, vocab_size=128)
        self.compiled: list[str] = []
        self.slow: set[str] = set()

    def compile(self, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        self.compiled.append(grammar.text)
        compiled = super().compile(grammar, param=param)
        return replace(compiled, rebuild=None) if grammar.text in self.slow else compiled


@pytest.fixture
def compiler(tmp_path: Path) -> CountingCompiler:
    save_tokenizer(tmp_path)
    return CountingCompiler(tmp_path)


def asked(regex: str, field: str = "grammar") -> CompletionRequest:
    grammar = Grammar(kind=GrammarKind.REGEX, text=regex)
    return CompletionRequest(id="1", prompt="a", grammar=grammar, grammar_field=field)


async def test_quick_grammar_is_compiled_once(compiler: CountingCompiler) -> None:
    check = GrammarCheck(compiler)
    for regex in ("a", "b", "a"):
        await check.check(asked(regex))
    assert compiler.compiled == ["a", "b"]


async def test_slow_grammar_is_compiled_for_each_request(compiler: CountingCompiler) -> None:
    compiler.slow = {"a"}
    check = GrammarCheck(compiler)
    for _ in range(3):
        await check.check(asked("a"))
    assert compiler.compiled == ["a"] * 3


async def test_problem_is_cached_and_names_each_clients_field(compiler: CountingCompiler) -> None:
    check = GrammarCheck(compiler)
    for field in ("regex", "guided", "regex"):
        with pytest.raises(RequestError) as rejected:
            await check.check(asked("[a", field))
        assert rejected.value.param == field and str(rejected.value).startswith(f"{field}: at ")
    assert compiler.compiled == ["[a"]


@pytest.mark.parametrize("choice", ["required", "bad", "other"])
async def test_problem_of_a_forced_call_names_the_tool(compiler: CountingCompiler, choice: str) -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    functions = [{"name": "good", "strict": True}] + [
        {"name": name, "parameters": schema, "strict": True} for name in ("bad", "other")
    ]
    tools = [{"type": "function", "function": one} for one in functions]
    forced = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": forced}
    check, tool = GrammarCheck(compiler), "bad" if choice == "required" else choice
    for _ in range(2):
        with pytest.raises(RequestError, match=f"^tools: tool {tool!r}: .*uniqueItems") as error:
            await check.check(ChatBody.model_validate(body).requests("r")[0])
        assert error.value.param == "tools"

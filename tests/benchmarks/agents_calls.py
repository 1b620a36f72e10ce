"""Everyday calls of openai's and anthropic's clients, and plain HTTP: which of them a door answers as it should.

A call fails where it raises. What it asks of the answer is what the API promises, not how clever the model is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import httpx
import openai
from anthropic.lib.tools import beta_tool
from pydantic import BaseModel, ConfigDict

from tests.benchmarks.agents_doors import MODEL

_QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
_GREEDY: Any = {"temperature": 0}
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": _PARAMETERS}
_LOOSE: Any = {"type": "function", "function": _FUNCTION}
_TOOL: Any = {"type": "function", "function": {**_FUNCTION, "strict": True}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
_HISTORY: Any = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It is raining in Paris."},
]


class _City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "Rome"]
    is_capital: bool


_FORM: Any = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": _City.model_json_schema()},
}


class _Clients:
    def __init__(self, url: str) -> None:
        root = url.removesuffix("/v1")
        self.openai = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        self.anthropic = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=root, timeout=60)

    def chat(self, messages: Any = None, **fields: Any) -> Any:
        asked = {"model": MODEL, "temperature": 0, "max_tokens": 64, **fields}
        return self.openai.chat.completions.create(messages=messages or _QUESTION, **asked)

    def complete(self, **fields: Any) -> Any:
        asked = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, **fields}
        return self.openai.completions.create(**asked)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
        return answer.json()


def _chat(on: _Clients) -> None:
    assert "Paris" in on.chat().choices[0].message.content


def _chat_streamed(on: _Clients) -> None:
    *_, last = list(on.chat(stream=True, stream_options={"include_usage": True}))
    assert last.usage.completion_tokens > 3 and not last.choices


def _parse(on: _Clients) -> None:
    asked: Any = {"model": MODEL, "messages": _QUESTION, "temperature": 0, "response_format": _City}
    assert isinstance(on.openai.chat.completions.parse(**asked).choices[0].message.parsed, _City)


def _parse_streamed(on: _Clients) -> None:
    asked: Any = {"model": MODEL, "messages": _QUESTION, "temperature": 0, "response_format": _City}
    with on.openai.chat.completions.stream(**asked) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, _City)


def _json_object(on: _Clients) -> None:
    (choice,) = on.chat(
        [{"role": "user", "content": "A city, as JSON."}], response_format={"type": "json_object"}, max_tokens=300
    ).choices
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


def _json_schema(on: _Clients) -> None:
    _City.model_validate_json(on.chat(response_format=_FORM).choices[0].message.content)


def _structured(field: str, value: Any, is_right: Callable[[str], bool]) -> Callable[[_Clients], None]:
    def ask(on: _Clients) -> None:
        text = on.chat(extra_body={"structured_outputs": {field: value}}).choices[0].message.content
        assert is_right(text), text

    return ask


def _tools_auto(on: _Clients) -> None:
    (choice,) = on.chat(tools=[_TOOL]).choices
    assert choice.message.content or choice.message.tool_calls


def _tools_required(on: _Clients) -> None:
    (choice,) = on.chat(tools=[_TOOL], tool_choice="required").choices
    assert choice.finish_reason == "tool_calls", f"finish_reason {choice.finish_reason}"
    for call in choice.message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def _tools_one_call(on: _Clients) -> None:
    (choice,) = on.chat(tools=[_TOOL], tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome") and not choice.message.content


def _tools_named(on: _Clients) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = on.chat(tools=[_TOOL], tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def _tools_not_strict(on: _Clients) -> None:
    """As most clients send them: arguments that the tool can be called with."""
    (choice,) = on.chat(tools=[_LOOSE], tool_choice="required").choices
    for call in choice.message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call.function.arguments


def _tools_none(on: _Clients) -> None:
    assert not on.chat(tools=[_TOOL], tool_choice="none").choices[0].message.tool_calls


def _tools_streamed(on: _Clients) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    arguments = ""
    for chunk in on.chat(tools=[_TOOL], tool_choice=named, stream=True):
        for choice in chunk.choices:
            arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])
    assert json.loads(arguments)["city"] in ("Paris", "Rome"), arguments


def _tool_history(on: _Clients) -> None:
    with_tool = on.chat(_HISTORY, tools=[_TOOL], tool_choice="none")
    assert with_tool.choices[0].message.content
    assert on.chat(_HISTORY).choices[0].message.content


def _schema_and_tools(on: _Clients) -> None:
    """Both at once, as openai-agents asks: a call, or an answer that keeps to the schema."""
    (choice,) = on.chat([{"role": "user", "content": "Rome, as JSON?"}], tools=[_TOOL], response_format=_FORM).choices
    calls = choice.message.tool_calls or []
    assert calls or _City.model_validate_json(choice.message.content or "")


def _logit_bias(on: _Clients) -> None:
    token = on.post("/tokenize", prompt=" Paris", add_special_tokens=False)["tokens"][0]
    assert "Paris" not in on.complete(logit_bias={str(token): -100}).choices[0].text
    assert on.complete(logit_bias={str(token): 100}).choices[0].text.startswith(" Paris Paris")


def _allowed_tokens(on: _Clients) -> None:
    token = on.post("/tokenize", prompt=" Paris", add_special_tokens=False)["tokens"][0]
    assert on.complete(max_tokens=3, extra_body={"allowed_token_ids": [token]}).choices[0].text == " Paris" * 3


def _bad_words(on: _Clients) -> None:
    assert "Paris" not in on.complete(extra_body={"bad_words": ["Paris"]}).choices[0].text


def _echo(on: _Clients) -> None:
    (choice,) = on.complete(echo=True, logprobs=1, max_tokens=1).choices
    assert choice.text.startswith("The capital of France is")
    assert choice.logprobs.token_logprobs[0] is None and all(value < 0 for value in choice.logprobs.token_logprobs[1:])


def _echo_only(on: _Clients) -> None:
    """As lm-eval's older versions ask: the prompt alone."""
    (choice,) = on.complete(echo=True, logprobs=1, max_tokens=0).choices
    assert choice.text == "The capital of France is" and len(choice.logprobs.token_logprobs) == 5


def _prompt_logprobs(on: _Clients) -> None:
    answer = on.complete(extra_body={"prompt_logprobs": 1}).choices[0].model_extra["prompt_logprobs"]
    assert answer[0] is None and len(answer) == 5


def _chat_logprobs(on: _Clients) -> None:
    content = on.chat(logprobs=True, top_logprobs=2, max_tokens=3).choices[0].logprobs.content
    assert len(content) == 3 and all(len(token.top_logprobs) == 2 for token in content)


def _several(on: _Clients) -> None:
    assert len(on.complete(n=3, temperature=1, seed=1).choices) == 3
    assert [choice.index for choice in on.complete(prompt=["One", "Two"]).choices] == [0, 1]


def _best_of(on: _Clients) -> None:
    assert len(on.complete(best_of=3, n=1, temperature=1, seed=1).choices) == 1
    (one,) = on.complete(best_of=3, n=1, temperature=1, seed=1, logprobs=1).choices
    assert (
        sum(one.logprobs.token_logprobs)
        >= max(
            sum(choice.logprobs.token_logprobs)
            for choice in on.complete(n=3, temperature=1, seed=1, logprobs=1).choices
        )
        - 0.5
    ), "not the likeliest"


def _continue_final(on: _Clients) -> None:
    messages = [*_QUESTION, {"role": "assistant", "content": "The capital of France is the city of"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert "Paris" in on.chat(messages, extra_body=more).choices[0].message.content


def _responses(on: _Clients) -> None:
    first = on.openai.responses.create(model=MODEL, input="What is the capital of France?", max_output_tokens=32)
    assert first.output_text and first.usage.output_tokens > 3  # type: ignore[union-attr]


def _responses_going_on(on: _Clients) -> None:
    first = on.openai.responses.create(model=MODEL, input="My name is Ann.", max_output_tokens=16)
    asked: Any = {"model": MODEL, "input": "What is my name?", "max_output_tokens": 16}
    second = on.openai.responses.create(**asked, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens, second.usage


def _responses_streamed(on: _Clients) -> None:
    kinds = [e.type for e in on.openai.responses.create(model=MODEL, input="Hi", max_output_tokens=8, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds[-1]


def _responses_parse(on: _Clients) -> None:
    asked: Any = {"model": MODEL, "input": "Is Paris a capital?", "text_format": _City, "max_output_tokens": 64}
    assert isinstance(on.openai.responses.parse(**asked).output_parsed, _City)


def _responses_tool(on: _Clients) -> None:
    tool: Any = {"type": "function", "strict": True, **_FUNCTION}
    asked: Any = {"model": MODEL, "input": "The weather in Rome?", "tools": [tool], "max_output_tokens": 64}
    calls = [item for item in on.openai.responses.create(**asked, tool_choice="required").output]
    assert [item.type for item in calls if item.type == "function_call"], calls


def _messages(on: _Clients) -> None:
    answer = on.anthropic.messages.create(model=MODEL, max_tokens=32, messages=_QUESTION, extra_body=_GREEDY)
    assert "Paris" in answer.content[0].text and answer.stop_reason == "end_turn"  # type: ignore[union-attr]


def _messages_streamed(on: _Clients) -> None:
    with on.anthropic.messages.stream(model=MODEL, max_tokens=32, messages=_QUESTION, extra_body=_GREEDY) as stream:
        assert "Paris" in stream.get_final_text()


def _messages_tool(on: _Clients) -> None:
    tool: Any = {"name": "get_weather", "description": "Weather.", "input_schema": _PARAMETERS}
    asked: Any = {"model": MODEL, "max_tokens": 64, "tools": [tool], "messages": _QUESTION}
    answer = on.anthropic.messages.create(**asked, tool_choice={"type": "tool", "name": "get_weather"})
    assert answer.stop_reason == "tool_use" and answer.content[0].input["city"] in ("Paris", "Rome")


def _messages_count(on: _Clients) -> None:
    assert on.anthropic.messages.count_tokens(model=MODEL, messages=_QUESTION).input_tokens > 10


def _messages_runner(on: _Clients) -> None:
    """Anthropic's own loop of calls and answers."""

    @beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        return f"It is raining in {city}."

    asked: Any = {"model": MODEL, "max_tokens": 64, "tools": [get_weather], "messages": _QUESTION}
    assert on.anthropic.beta.messages.tool_runner(**asked).until_done().content


def _tokenize(on: _Clients) -> None:
    found = on.post("/tokenize", prompt="Hello world")
    assert found["count"] == len(found["tokens"]) and on.post("/tokenize", messages=_QUESTION)["count"] > 10
    assert on.post("/detokenize", tokens=found["tokens"])["prompt"] == "Hello world"


def _render(on: _Clients) -> None:
    assert on.post("/v1/chat/completions/render", messages=_QUESTION)["token_ids"]
    assert on.post("/v1/completions/render", prompt="Hello")


def _token_prompt(on: _Clients) -> None:
    assert on.complete(prompt=on.post("/tokenize", prompt="The capital of France is")["tokens"]).choices[0].text


def _unknown_field(on: _Clients) -> None:
    """One that cannot change an answer, such as newer clients send."""
    on.chat(extra_body={"a_field_of_next_year": 1}, user="ann", store=False, metadata={"a": "b"})


def _errors(on: _Clients) -> None:
    for fields, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10**7}, openai.BadRequestError),
    ):
        try:
            on.chat(**fields)
        except kind as error:
            assert error.body and "message" in error.body, error.body  # type: ignore[operator]
        else:
            raise AssertionError(f"{fields} was taken")


def _pages(on: _Clients) -> None:
    for path in ("/version", "/openapi.json", "/docs", "/health", "/v1/models"):
        assert on.http.get(path).status_code == 200, path


def _batches(on: _Clients) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": MODEL, "messages": _QUESTION, "max_tokens": 4}
    file = on.openai.files.create(file=("a.jsonl", json.dumps({**line, "body": body}).encode()), purpose="batch")
    on.openai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


_GRAMMAR = 'start: "yes " NUMBER\nNUMBER: /[0-9]{2}/'
_EBNF = 'root ::= "yes " [0-9] [0-9]'
CALLS: dict[str, Callable[[_Clients], None]] = {
    "chat": _chat,
    "chat, streamed, with usage": _chat_streamed,
    "chat.completions.parse()": _parse,
    "chat.completions.stream() of a model": _parse_streamed,
    "response_format json_object": _json_object,
    "response_format json_schema": _json_schema,
    "structured_outputs json": _structured("json", _City.model_json_schema(), lambda t: bool(json.loads(t))),
    "structured_outputs regex": _structured("regex", "[a-c]{3}", lambda t: len(t) == 3 and set(t) <= set("abc")),
    "structured_outputs choice": _structured("choice", ["Paris", "Rome"], lambda t: t in ("Paris", "Rome")),
    "structured_outputs grammar (Lark)": _structured("grammar", _GRAMMAR, lambda t: t[:4] == "yes " and len(t) == 6),
    "structured_outputs grammar (EBNF)": _structured("grammar", _EBNF, lambda t: t[:4] == "yes " and len(t) == 6),
    "tools, auto": _tools_auto,
    "tools, required": _tools_required,
    "tools, required, one call": _tools_one_call,
    "tools, named": _tools_named,
    "tools, required, not strict": _tools_not_strict,
    "tools, none": _tools_none,
    "tools, streamed deltas": _tools_streamed,
    "tool messages in the history": _tool_history,
    "tools and a schema at once": _schema_and_tools,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_tokens,
    "bad_words": _bad_words,
    "echo with logprobs": _echo,
    "echo with logprobs, no new token": _echo_only,
    "prompt_logprobs": _prompt_logprobs,
    "chat logprobs": _chat_logprobs,
    "n, several prompts": _several,
    "best_of": _best_of,
    "continue_final_message": _continue_final,
    "responses": _responses,
    "responses, previous_response_id": _responses_going_on,
    "responses, streamed": _responses_streamed,
    "responses.parse()": _responses_parse,
    "responses, tool": _responses_tool,
    "messages": _messages,
    "messages, streamed": _messages_streamed,
    "messages, tool": _messages_tool,
    "messages, count_tokens": _messages_count,
    "messages, tool runner": _messages_runner,
    "tokenize, detokenize": _tokenize,
    "render": _render,
    "token ids as prompt": _token_prompt,
    "fields that are not known": _unknown_field,
    "errors": _errors,
    "version, openapi.json, docs, health, models": _pages,
    "files, batches": _batches,
}


def calls(url: str) -> dict[str, str]:
    """What became of each: "" or why it failed."""
    clients, found = _Clients(url), dict[str, str]()
    for name, call in CALLS.items():
        try:
            call(clients)
            found[name] = ""
        except Exception as error:  # whatever it is: the next call is another matter
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found

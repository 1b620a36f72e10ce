"""Recorded answers of each model family, with the expected parse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "places": {"type": "array", "items": {"type": "string"}},
            "is_exact": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
    "write.file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    format: str
    raw: str
    calls: tuple[Call, ...]
    text: str = ""


_PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
_NOW: Call = ("now", {})
_FILE: Call = ("write.file", {"path": "a.py", "text": 'def f():\n    return "é \\ 🎉"\n'})

RECORDED = [
    Recorded(
        "generic",
        '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"arguments": {}, "name": "now"}]',
        (_PARIS, _NOW),
    ),
    Recorded(
        "generic",
        'I look: 🎉\n\n```json\n[\n  {\n    "name": "get_weather",\n    "arguments": {"city": "Paris", "days": 3}\n  },'
        '\n  {"name": "now"}\n]\n```\n{"name": "now", "parameters": {}}\n Done.',
        (_PARIS, _NOW, _NOW),
        "I look: 🎉\n Done.",
    ),
    Recorded("generic", '```\n{"name": "now", "arguments": {}}\n```', (_NOW,)),
    Recorded("generic", '{"name": "now"}{"name": "unknown"}', (_NOW,), '{"name": "unknown"}'),
    *(  # JSON of another kind, and calls inside it
        Recorded("generic", raw, (), "=")
        for raw in (
            '{"plan": [{"name": "now", "arguments": {}}]}\n',
            '[\n  [{"name": "now", "arguments": {}}]\n]\n[1]\n',
            'See\n```json\n[```\n[{"name": "unknown"}]\n```\nSay [{"name": "now"}]',
            "```python\n[1]\n``` \n\n `{`",
        )
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        (_PARIS,),
    ),
    Recorded(
        "hermes",
        "Let me look. 🎉\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "now"}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>\n',
        (_PARIS, _NOW, _NOW),
        "Let me look. 🎉",
    ),
    Recorded(
        "hermes",
        '<tool_call>{"name": "write.file", "arguments": {"path": "a.py", "text": '
        '"def f():\\n    return \\"\\u00e9 \\\\ \\ud83c\\udf89\\"\\n"}}</tool_call> Done.',
        (_FILE,),
        " Done.",
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n</tool_call>',
        (_PARIS,),
    ),
    Recorded("hermes", 'No call: <tool_call> is how one begins, {"name": "now"} what is in it.', (), "="),
    Recorded("hermes", '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>', (), "="),
    Recorded("hermes", '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>', (), "="),
    Recorded("hermes", '<tool_call>\n{"name": "now", "argum', (), "="),
    Recorded("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', (_NOW,), "<tool_call>"),
    Recorded("hermes", "  \n", (), "="),
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', (_PARIS,)),
    Recorded(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        (_NOW, _PARIS),
    ),
    Recorded("llama3_json", '{"answer": 42, "name": "now"}', (), "="),
    Recorded("llama3_json", '<|python_tag|>brave_search.call(query="x")', (), "="),
    Recorded("llama3_json", "Call {} now.", (), "="),
    Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        (_PARIS, _NOW),
    ),
    Recorded(
        "mistral",
        'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
        (_PARIS, _NOW),
        "Well.",
    ),
    Recorded("mistral", "[TOOL_CALLS] [1, 2]", (), "="),
    Recorded("mistral", "[TOOL_CALLS]nothing of the kind", (), "="),
    Recorded(
        "deepseek_v3",
        "I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"  # noqa: RUF001
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'  # noqa: RUF001
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        (_PARIS, _NOW),
        "I see.",
    ),
    Recorded(
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        (_PARIS, _NOW),
    ),
    Recorded("deepseek_v3", "<｜tool▁calls▁begin｜> and nothing", (), "="),  # noqa: RUF001
    Recorded(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (_PARIS, _NOW),
        "Sure.",
    ),
    Recorded(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=places>\n["a", "b"]\n</parameter>\n<parameter=is_exact>True</parameter><parameter=days>\nmany\n'
        "</parameter></function>",
        (("get_weather", {"city": "3", "units": None, "places": ["a", "b"], "is_exact": True, "days": "many"}),),
    ),
    Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=write.file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
        'def f():\n    return "é \\ 🎉"\n\n</parameter>\n</function>\n</tool_call>',
        (_FILE,),
    ),
    Recorded("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>", (), "="),
    Recorded("pythonic", '[get_weather(city="Paris", days=3), now()]', (_PARIS, _NOW)),
    Recorded(
        "pythonic",
        "Well. <|python_start|>[get_weather(city='Par)is', places=['a', \"b]\"], is_exact=true)]<|python_end|>",
        (("get_weather", {"city": "Par)is", "places": ["a", "b]"], "is_exact": True}),),
        "Well.",
    ),
    Recorded("pythonic", "[1, 2, 3] is a list, and [now] is one.", (), "="),
    Recorded("pythonic", '[get_weather("Paris")]', (), "="),
    Recorded("pythonic", "[get_weather(city=open('x'))]", (), "="),
    Recorded("forced_call", ' {"a": [1, {}]}\n', (("now", {"a": [1, {}]}),)),
    Recorded("forced_call", "no", (), "="),
    Recorded(
        "forced_calls",
        '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        (_NOW, _PARIS),
    ),
]

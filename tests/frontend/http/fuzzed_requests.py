"""Strategies for fuzzed requests: every field at the edges of its type, and beyond where the wire permits."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hypothesis import strategies as st

from core.rpc import inference_pb2 as pb

# Around float32's smallest, largest and denormal numbers, and the rules' own bounds.
_FLOATS = [0.0, -0.0, 1e-45, 1e-40, -1e-40, 1.17549435e-38, 5e-324, 1e-300, 1e-6, 1e-5, 0.0099999, 0.01, 0.5, 1.0]
_FLOATS += [1.0000001, -1.0, 2.0, -2.0, 2.0000002, 99.99999, 100.0, 100.00001]
_FLOATS += [3.4e38, 3.4028235e38, 3.5e38, 1e39, 1e308]
_INTS = [0, 1, -1, 2, 16, 20, 21, 128, 129, 256, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1]
_INTS += [2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30]
_TEXTS = ["", "a", "hi", "\0", "\x7f", "\u202e", "\ufffe", "é", "e\u0301", "🎉👩‍👩‍👧‍👦"]
_TEXTS += ["<|im_end|>", "{{ 1 }}", "%n%s", "\r\n"]
_TEXTS += ["\N{SNOWMAN}" * 300, "a" * 2000, "../../x", "a\0b", "victim\0"]
# Only JSON can write these.
_RAW = ["NaN", "Infinity", "-Infinity", "1e999", "-0", "1E-400", "1e400", "0.1e1", "9" * 400, '"\\ud800"', '"\\udc00a"']
_RAW += ['"\\u0000"', "[[[[]]]]", "{}", "[]", "[{}]", "[null]", "null", "true", '"1"', "1.0", "[1.5]", '["a", 1]']
_RAW += ["[" * 300 + "]" * 300, "{" + '"a":{' * 100 + "}" * 101, "nul", "'a'", "\u00a0", '"\x01"', '{"a":1,"a":2}']

_VALUES = st.one_of(
    st.sampled_from(_RAW),
    st.sampled_from(_INTS).map(str),
    st.sampled_from(_FLOATS).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(_TEXTS).map(json.dumps),
    st.text(max_size=20).map(json.dumps),
    st.lists(st.sampled_from(_TEXTS), max_size=20).map(json.dumps),
    st.lists(st.sampled_from(_INTS), max_size=5).map(json.dumps),
)
_PROMPTS = st.one_of(
    st.sampled_from(['"hi"', "[5, 6]", '["a", "b"]', "[[5], [6, 7]]", "[" + "5," * 40 + "5]", "[420, 421, 422]"]),
    _VALUES,
)
_CALLS = st.builds('{{"id":"a","function":{{"name":{0},"arguments":{1}}}}}'.format, _VALUES, _VALUES)
_MESSAGES = st.one_of(
    st.just('[{"role":"user","content":"hi"}]'),
    st.builds('[{{"role":{0},"content":{1},"name":{2}}}]'.format, _VALUES, _VALUES, _VALUES),
    st.builds('[{{"role":"user","content":[{{"type":"text","text":{0}}}]}}]'.format, _VALUES),
    st.builds('[{{"role":"assistant","content":{0},"tool_calls":[{1}]}}]'.format, _VALUES, _CALLS),
    _VALUES,
)


_BLOCKS = st.one_of(
    st.builds('{{"type":"text","text":{0}}}'.format, _VALUES),
    st.builds('{{"type":{0},"text":"a"}}'.format, _VALUES),
    st.builds('{{"type":"thinking","thinking":{0}}}'.format, _VALUES),
    st.builds('{{"type":"tool_use","id":{0},"name":{1},"input":{{"a":{2}}}}}'.format, _VALUES, _VALUES, _VALUES),
    st.builds('{{"type":"tool_result","tool_use_id":{0},"content":{1}}}'.format, _VALUES, _VALUES),
)
_TURNS = st.one_of(
    st.just('[{"role":"user","content":"hi"}]'),
    st.builds('[{{"role":"user","content":{0}}}]'.format, _VALUES),
    st.builds('[{{"role":"user","content":[{0},{1}]}}]'.format, _BLOCKS, _BLOCKS),
    st.builds('[{{"role":"assistant","content":[{0}]}},{{"role":"user","content":[{1}]}}]'.format, _BLOCKS, _BLOCKS),
    _VALUES,
)


# Of /v1/responses.
_ITEMS = st.one_of(
    st.just('"hi"'),
    st.builds('[{{"role":{0},"content":{1}}}]'.format, _VALUES, _VALUES),
    st.builds('[{{"type":{0},"role":"user","content":"hi"}}]'.format, _VALUES),
    st.builds('[{{"role":"user","content":[{{"type":"input_text","text":{0}}}]}}]'.format, _VALUES),
    st.builds(
        '[{{"type":"function_call","call_id":{0},"name":{1},"arguments":{2}}}]'.format, _VALUES, _VALUES, _VALUES
    ),
    st.builds('[{{"type":"function_call_output","call_id":{0},"output":{1}}}]'.format, _VALUES, _VALUES),
    st.builds(
        '[{{"type":"reasoning","id":{0},"summary":{1}}},{{"role":"user","content":"hi"}}]'.format, _VALUES, _VALUES
    ),
    st.builds('[{{"type":"item_reference","id":{0}}}]'.format, _VALUES),
    _VALUES,
)


def json_bodies(
    fields: Iterable[str],
    *,
    input_field: str,
    inputs: st.SearchStrategy[str] | None = None,
    max_field: str = "max_tokens",
) -> st.SearchStrategy[dict[str, str]]:
    """Bodies as the JSON text of each field but the input, which is mostly right, so that the others are looked at.

    inputs: None: prompts, or messages of a chat. max_field: bounds the answer.
    """
    if inputs is None:
        inputs = _PROMPTS if input_field == "prompt" else _MESSAGES
    names = sorted({*fields, "no_such_field"} - {input_field})
    others = st.dictionaries(st.sampled_from(names), _VALUES, min_size=1, max_size=3)
    return st.builds(lambda body, given: {max_field: "2", **body, input_field: given}, others, inputs)


def anthropic_bodies(fields: Iterable[str]) -> st.SearchStrategy[dict[str, str]]:
    """Bodies of /v1/messages."""
    return json_bodies(fields, input_field="messages", inputs=_TURNS)


def responses_bodies(fields: Iterable[str]) -> st.SearchStrategy[dict[str, str]]:
    """Bodies of /v1/responses."""
    return json_bodies(fields, input_field="input", inputs=_ITEMS, max_field="max_output_tokens")


_uint32, _uint64 = (st.sampled_from([i for i in _INTS if 0 <= i < 2**bits]) for bits in (32, 64))
_float = st.one_of(
    st.sampled_from([*_FLOATS, float("nan"), float("inf"), -float("inf")]).filter(
        lambda x: x < 3.5e38 or x == float("inf") or x != x
    )
)
_text = st.one_of(st.sampled_from(_TEXTS), st.text(st.characters(codec="utf-8"), max_size=20))
_sampling = st.fixed_dictionaries(
    {"max_tokens": st.one_of(st.just(2), _uint32)},
    optional={
        **dict.fromkeys(("min_tokens", "top_k", "n", "logprobs"), _uint32),
        **dict.fromkeys(
            ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), _float
        ),
        "seed": _uint64,
        "stop": st.lists(_text, max_size=18),
        "stop_token_ids": st.lists(_uint32, max_size=5),
        "allowed_token_ids": st.lists(_uint32, max_size=5),
        "logit_bias": st.dictionaries(_uint32, _float, max_size=5),
        "bad_words": st.lists(_text, max_size=5),
        **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop"), st.booleans()),
    },
)
_chats = st.lists(st.builds(pb.ChatMessage, role=_text, content=_text), max_size=3).map(lambda m: pb.Chat(messages=m))
_ids = st.one_of(st.just([5, 6]), st.lists(_uint32, max_size=4)).map(lambda ids: pb.TokenIds(ids=ids))


def grpc_requests() -> st.SearchStrategy[pb.GenerateRequest]:
    """Any message that the wire can carry."""
    inputs = st.one_of(
        st.just({"prompt": "hi"}),
        st.fixed_dictionaries({"prompt": _text}),
        st.fixed_dictionaries({"chat": _chats}),
        st.fixed_dictionaries({"token_ids": _ids}),
        st.just({}),
    )
    others = st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("model", "request_id", "tenant", "cache_salt"), _text),
            "priority": st.sampled_from([i for i in _INTS if -(2**31) <= i < 2**31]),
        },
    )
    return st.builds(
        lambda given, other, sampling: pb.GenerateRequest(**given, **other, sampling=pb.SamplingParams(**sampling)),
        inputs,
        others,
        _sampling,
    )

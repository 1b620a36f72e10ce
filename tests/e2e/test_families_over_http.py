"""Families behind the HTTP endpoint of a deployment: the numbers of transformers, also from Mistral's own format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel

from core.model.source import resolve
from core.types.request import Sampling
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.text.tokenizer import Tokenizer
from tests.core.model.test_tokenizer_formats import write_tekken
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.mistral_files import write_mistral
from tests.engine.model.test_models import FAMILIES
from tests.engine.steps import prompts
from tests.engine.tiny_models import YARN, random_model, reference_logits, tiny_config
from tests.support.plain_http import http_client
from tests.support.router_service import http_url, router_service
from tests.support.sdk_clients import openai_client

_WITHIN = 1e-3
_NUM_TOP = 5
_NUM_NEW = 8
# A token, windows of 9 and 11 tokens ± 1, a block of 16, and parts of 32 tokens that a prefill step computes.
_PROMPTS = prompts(1, 8, 9, 10, 11, 12, 15, 16, 17, 33, 70)
_LONGER = _PROMPTS[-1] + _PROMPTS[-2]
# Those that differ most run with the other tests.
_QUICK = ("gemma4", "gpt_oss", "deepseek_v3")


_ROPE = YARN | {"llama_4_scaling_beta": 0.1, "attention_factor": 1.0}
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where does the sun rise?"}]


def _cases() -> Iterator[Any]:
    for family in FAMILIES:
        for ranks in (1, 2):
            marks = () if family in _QUICK and ranks == 1 else pytest.mark.slow
            yield pytest.param(family, ranks, id=f"{family}-{ranks}".replace(", ", "_"), marks=marks)


@pytest.mark.parametrize(("family", "ranks"), list(_cases()))
async def test_logprobs_and_greedy_tokens_equal_transformers(family: str, ranks: int, lab: Lab) -> None:
    """ranks: of the prefill replica."""
    architecture, changes = FAMILIES[family]
    model = random_model(tiny_config(architecture, **changes))
    tree = exact_tree(1, 1, tp=(ranks, 1))
    async with (
        lab.own(lab.checkpoint(architecture, **changes), **tree) as cluster,
        router_service(cluster, model={"served_name": "tiny"}) as service,
    ):
        url = http_url(service)
        async with http_client(base_url=url, timeout=60) as http:
            # All prompts of one batch, then a prompt whose first blocks are cached, with and without its scores.
            for asked, echo in ((_PROMPTS, True), ([_LONGER], True), ([_LONGER], False)):
                body = _body(asked, echo=echo)
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                for prompt, choice in zip(asked, answer["choices"], strict=True):
                    _check(model, prompt, choice["logprobs"], echo=echo)
        async with openai_client(base_url=f"{url}/v1", api_key="none") as client:
            _check(model, _LONGER, await _streamed(client, _LONGER), echo=True)


def _body(asked: list[list[int]], *, echo: bool) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": _NUM_NEW, "ignore_eos": True}
    return {"model": "tiny", "prompt": asked, "echo": echo, "logprobs": _NUM_TOP, **sampling}


async def _streamed(client: openai.AsyncOpenAI, prompt: list[int]) -> dict[str, list[Any]]:
    """Return the log-probabilities of all chunks of a streamed completion."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    body = _body([prompt], echo=True)
    extra = {"ignore_eos": body.pop("ignore_eos")}
    async for chunk in await client.completions.create(**body, stream=True, extra_body=extra):
        for choice in chunk.choices:
            for name, column in columns.items():
                column += getattr(choice.logprobs, name) if choice.logprobs else []
    return columns


def _check(model: PreTrainedModel, prompt: list[int], logprobs: dict[str, list[Any]], *, echo: bool) -> None:
    """Compare each token's log-probabilities, and that the answer's tokens are the likeliest."""
    told = [_id(token) for token in logprobs["tokens"]]
    ids = told if echo else prompt + told
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + _NUM_NEW
    expected = reference_logits(model, ids)[:-1].log_softmax(-1)
    assert ids[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()
    if echo:
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    first = max(1, len(ids) - len(told))
    own, top = (logprobs[name][first - len(ids) :] for name in ("token_logprobs", "top_logprobs"))
    for token_id, logprob, likeliest, row in zip(ids[first:], own, top, expected[first - 1 :], strict=True):
        found = {_id(token): value for token, value in likeliest.items()} | {token_id: logprob}
        assert len(found) in (_NUM_TOP, _NUM_TOP + 1)
        torch.testing.assert_close(torch.tensor(list(found.values())), row[list(found)], atol=_WITHIN, rtol=0)
        assert sorted(found.values())[-_NUM_TOP] >= row.topk(_NUM_TOP).values[-1] - _WITHIN


def _id(token: str) -> int:
    return int(token.strip("<>"))


@pytest.mark.timeout(180)
async def test_chat_with_a_model_in_mistrals_own_format(tmp_path: Path, lab: Lab) -> None:
    own, theirs = tmp_path / "own", tmp_path / "transformers"
    ranks = {bytes([i]): i for i in range(256)}
    vocab_size = Tokenizer(write_tekken(own, ranks)).vocab_size
    model = random_model(tiny_config("ministral3", vocab_size=vocab_size, rope_parameters=_ROPE))
    write_mistral(own, model, num_parts=2)
    model.save_pretrained(write_tekken(theirs, ranks))
    assert resolve(str(own)) == own

    tokenizer = Tokenizer(own)
    template = ChatTemplate(find_chat_template(own), special_tokens=tokenizer.special_tokens)
    prompt = tokenizer.encode(template.render(_MESSAGES), add_special_tokens=False)
    sampling = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=tuple(tokenizer.eos_token_ids))
    expected = lab.reference.ids(theirs, [prompt], sampling)[0]

    async with lab.own(own, **exact_tree(1, 1)) as cluster, router_service(cluster) as service:
        async with http_client(base_url=http_url(service), timeout=60) as client:
            asked = {"model": "own", "messages": _MESSAGES, "max_tokens": 12, "temperature": 0}
            asked["return_token_ids"] = True
            answer = (await client.post("/v1/chat/completions", json=asked)).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == expected, "as of the same model in transformers' format"

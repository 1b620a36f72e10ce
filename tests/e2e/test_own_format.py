"""A directory in Mistral's own format, served over HTTP: its settings, weights, tokenizer and our chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.model.source import resolve
from core.types.request import Sampling
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.template_files import find_chat_template
from frontend.text.tokenizer import Tokenizer
from tests.core.model.test_tokenizer_formats import write_tekken
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.mistral_files import write_mistral
from tests.engine.tiny_models import YARN, random_model, tiny_config
from tests.support.plain_http import http_client
from tests.support.router_service import http_url, router_service

_ROPE = YARN | {"llama_4_scaling_beta": 0.1, "attention_factor": 1.0}
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where does the sun rise?"}]


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

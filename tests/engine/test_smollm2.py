"""SmolLM2 from its GGUF against transformers, over the tensors that the gguf package reads."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import gguf as gguf_library
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from core.model.weight_files import weight_files
from core.types.request import FinishReason, Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from tests.engine.gguf_files import read_model
from tests.engine.steps import prompts, step

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n<|im_start|>assistant\n"
)


def load(directory: Path, dtype: str) -> ModelRunner:
    return ModelRunner(EngineConfig(model_dir=directory, dtype=dtype, num_blocks=256))


@pytest.fixture(scope="module")
def gguf(smollm2_dir: Path) -> Iterator[Path]:
    """Return the file, which its library reads once: that takes seconds for a vocabulary of 49152."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(gguf_library.GGUFReader)
        patch.setattr(gguf_library, "GGUFReader", lambda path: read(str(path)))
        yield weight_files(smollm2_dir).paths[0]


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path) -> ModelRunner:
    """Return a float32 runner."""
    return load(smollm2_dir, "float32")


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(gguf: Path, smollm2_dir: Path) -> PreTrainedModel:
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2_dir)).eval()
    model.tie_weights()
    read_model(gguf, model)
    return model


def test_logits_equal_transformers(runner: ModelRunner, reference: PreTrainedModel, tokenizer: Tokenizer) -> None:
    sequences = [tokenizer.encode(QUESTION).ids, *prompts(70, vocab_size=49152)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([tokens])).logits[0] for tokens in sequences]
    first = step(runner, sequences, [(0, 0, 20), (1, 0, 69)])
    second = step(runner, sequences, [(0, 20, len(sequences[0])), (1, 69, 70)])
    for row, wanted in zip(
        [*first, *second], [expected[0][19], expected[1][68], expected[0][-1], expected[1][-1]], strict=True
    ):
        torch.testing.assert_close(row, wanted, atol=5e-4, rtol=1e-4)


def test_model_answers_paris(smollm2_dir: Path, tokenizer: Tokenizer) -> None:
    runner = load(smollm2_dir, "bfloat16")
    greedy = Sampling(temperature=0.0, max_tokens=20, stop_token_ids=runner.config.eos_token_ids)
    (answer,) = generate(runner, [tokenizer.encode(QUESTION).ids], greedy)
    assert "Paris" in tokenizer.decode([token.token_id for token in answer])
    assert answer[-1].finish_reason is FinishReason.STOP


def test_the_tokenizer_equals_transformers(gguf: Path, smollm2_dir: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    texts = [
        QUESTION,
        "naïve café — 日本語, emoji 🙂👩‍👧, e\u0301; it's   spaced\n\n\tout",
        "def f(x): return x + 12",
        "",
    ]
    for text in texts:
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == len(theirs)
    config = json.loads((smollm2_dir / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == (theirs.bos_token, theirs.eos_token)
    assert config["chat_template"] == theirs.chat_template

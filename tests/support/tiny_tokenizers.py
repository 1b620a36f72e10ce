"""Small trained tokenizers of the two common families, written as model directories."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris. What is the capital of France? It is Paris, of course.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "你好世界。今天天气很好。 Größe, naïve café, señor. 🎉🎊👩‍👩‍👧‍👦",
    "You are a helpful assistant. system user assistant\n\n1 2 3 4 5 6 7 8 9 10",
]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_byte_level(model_dir: Path) -> Path:
    """Write a byte-level tokenizer, as in Llama 3, Qwen and SmolLM2, with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think> so", special=False, normalized=False)])  # an added token with a space
    tokenizer.save(str(model_dir / "tokenizer.json"))
    write_json(
        model_dir / "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML},
    )
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    write_json(model_dir / "generation_config.json", {"eos_token_id": eos})
    return model_dir


def make_byte_fallback(model_dir: Path) -> Path:
    """Write a tokenizer with byte fallback, as in Llama 2 and Mistral: ▁ for a space, <0xNN> for bytes, BOS first."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    tree = json.loads(tokenizer.to_str())
    vocab = tree["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tree["model"].update(byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>"}
    write_json(model_dir / "tokenizer_config.json", {"bos_token": bos, "eos_token": "</s>"})
    write_json(model_dir / "config.json", {"eos_token_id": vocab["</s>"]})
    return model_dir


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")

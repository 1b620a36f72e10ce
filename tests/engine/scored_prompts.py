"""Engine that computes log-probabilities of prompt tokens, and transformers as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence as TokenSequence


class ScoredPrompts:
    """Engine over one runner, whose prefix cache stays warm."""

    def __init__(self, runner: ModelRunner, *, max_batch_tokens: int) -> None:
        config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_running=8, max_waiting=8)
        self._runner = runner
        self._engine = Engine(
            runner,
            sample,
            BlockManager(runner.pool.num_blocks, num_states=runner.pool.num_states),
            config,
            block_size=runner.layout.block_size,
        )

    def tell(self, asked: Sequence[tuple[list[int], int | None]], *, n: int = 1) -> list[PromptLogprobs]:
        """Score all prompts in one batch with these numbers of likeliest tokens; None: the prompt is not scored."""
        prompts = []
        for number, (tokens, num_top) in enumerate(asked):
            request = SequenceRequest(
                id=str(number),
                token_ids=tuple(tokens),
                num_prompt_tokens=len(tokens),
                sampling=Sampling(temperature=0.0, max_tokens=2),
                choices=tuple(range(n)),
                num_prompt_logprobs=num_top,
            )
            layout = self._runner.layout
            sequence = TokenSequence(
                request, 0, model=layout.model, block_size=layout.block_size, max_context=self._runner.max_tokens
            )
            prompts.append(Prompt(sequence))
            self._engine.add(prompts[-1])
        self.cached = dict.fromkeys(prompts, 0)
        while self._engine.step().did_work:
            self.cached |= {prompt: prompt.num_cached for prompt in prompts}
        return [prompt.take_scores() for prompt in prompts]


def check_scores(
    scores: PromptLogprobs, model: PreTrainedModel, tokens: list[int], num_top: int, *, within: float
) -> None:
    """Compare with transformers' logits of the whole prompt."""
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    own_T = logprobs_TV.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    top = logprobs_TV.topk(num_top, dim=-1)
    for name, found, expected in (
        ("own", scores.logprobs_P, own_T),
        ("likeliest", scores.top_logprobs_PK, top.values),
        ("by their ids", scores.top_logprobs_PK, logprobs_TV.gather(-1, torch.from_numpy(scores.top_ids_PK).long())),
    ):
        difference = (torch.from_numpy(found.copy()) - expected).abs()
        assert found.shape == tuple(expected.shape) and (not difference.numel() or difference.max() < within), name
    for rank, own, row in zip(scores.ranks_P.tolist(), own_T, logprobs_TV, strict=True):
        assert (row > own + within).sum() < rank <= (row > own - within).sum() + 1

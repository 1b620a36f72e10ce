"""lm-eval: log-likelihoods and generated texts of a small task, by a server or by an engine here. Prints both."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

_ASKED = [
    {"question": "The capital of France is", "choices": [" Paris", " London", " the city of Rome"], "answer": 0},
    {"question": "Water boils at one hundred degrees", "choices": [" Celsius", " bananas"], "answer": 0},
]
_COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "{{question}}"
"""
_CHOICES = """
task: choices
output_type: multiple_choice
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_TEXTS = """
task: texts
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def _model(place: str) -> dict[str, Any]:
    """Return the model of lm-eval for a server's URL or a model directory."""
    if place.startswith("http"):
        return {
            "model": "local-completions",
            "model_args": f"model=smollm2,base_url={place}/completions,max_retries=1,batch_size=4",
        }
    from tokenizers import Tokenizer

    from engine.config import EngineConfig
    from engine.runner.runner import ModelRunner
    from engine.tools.lm_eval_model import EngineLM

    config = EngineConfig(model_dir=Path(place), dtype="float32", block_size=16, num_blocks=64)
    return {"model": EngineLM(ModelRunner(config), Tokenizer.from_file(f"{place}/tokenizer.json"))}


with tempfile.TemporaryDirectory() as directory:
    data = Path(directory, "data.jsonl")
    data.write_text("\n".join(map(json.dumps, _ASKED)))
    for name, task in (("choices", _CHOICES), ("texts", _TEXTS)):
        Path(directory, f"{name}.yaml").write_text(task + _COMMON % data)
    done = lm_eval.simple_evaluate(
        **_model(sys.argv[1]),
        tasks=["choices", "texts"],
        task_manager=TaskManager(include_path=directory, include_defaults=False),
        bootstrap_iters=0,
    )

likelihoods = [
    [*arguments[:2], *response[0]]
    for sample in done["samples"]["choices"]
    for arguments, response in zip(sample["arguments"], sample["resps"], strict=True)
]
texts = [sample["resps"][0][0] for sample in done["samples"]["texts"]]
scores = [float(done["results"]["choices"]["acc,none"]), float(done["results"]["texts"]["exact_match,none"])]
print(json.dumps({"likelihoods": likelihoods, "texts": texts, "scores": scores}))

"""Smaller models of the same tokenizer: the first layers of another one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def first_layers(directory: Path, num_layers: int) -> Path:
    """Return a directory next to the model's, made once. With few layers missing, the outputs often agree."""
    smaller = directory.with_name(f"{directory.name}-{num_layers}-layers")
    if not smaller.exists():
        shutil.copytree(directory, smaller)
        config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": num_layers}
        config.pop("layer_types", None)
        (smaller / "config.json").write_text(json.dumps(config))
        tensors = load_file(directory / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < num_layers}
        save_file(kept, smaller / "model.safetensors", metadata={"format": "pt"})
    return smaller


def _layer(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1

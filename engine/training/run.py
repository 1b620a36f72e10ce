"""One run of training, in a directory: what it is, how far it has come, and what it has made.

    DIR/config.json, model.safetensors      the heads, as they are published
    DIR/training/run.json                   what this run is: another one has no business here
    DIR/training/answers-*.jsonl            the model's answers, part by part
    DIR/training/features-*.safetensors     what the model computes of them, while it is needed
    DIR/training/state.safetensors          parameters, and the optimiser's state, after so many steps
    DIR/training/report.json                what each pass over the answers has given on those held out

Every file is whole or not there, so that a run that was killed goes on where its last files are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from core.process.atomic_file import move_whole, write_whole
from core.types.errors import SpecError

Kind = Literal["eagle3", "medusa"]

_STEP = "step"
_READABLE = 0o644  # heads are no secret, as the model is none


@dataclass(frozen=True, kw_only=True)
class RunWords:
    """What a run is a function of. Whoever says the same goes on with it."""

    kind: Kind
    model: str  # fingerprint
    data: str  # "self", or a digest of the file
    seed: int
    tokens: int  # of answers
    passes: int  # over the answers
    format: int = 1  # of the directory


def digest_of(path: Path) -> str:
    """Of a file's bytes. Raises SpecError."""
    try:
        return blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise SpecError(f"--data {path}: {error.strerror}") from None


class Run:
    """Owned by the process that trains."""

    def __init__(self, directory: Path, words: RunWords) -> None:
        """Raises SpecError for a directory that holds something else."""
        self.directory = directory
        self.training = directory / "training"
        path = self.training / "run.json"
        if not path.exists():
            if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
                raise SpecError(f"-o {directory}: is there already, and no run of train-draft; give a new directory")
            write_whole(path, json.dumps(asdict(words), indent=1) + "\n")
        found = _read(path)
        differences = [
            f"another --{key}" if key in ("model", "data") else f"{key} {found.get(key)}, not {value}"  # those: digests
            for key, value in asdict(words).items()
            if found.get(key) != value
        ]
        if differences:
            raise SpecError(f"-o {directory}: holds another run ({'; '.join(differences)}); give another directory")

    @property
    def is_done(self) -> bool:
        return bool(self.report().get("is_done"))

    def report(self) -> dict[str, Any]:
        """Plain JSON values; empty at first."""
        path = self.training / "report.json"
        return _read(path) if path.exists() else {}

    def note(self, report: Mapping[str, Any]) -> None:
        """Keep it instead of the one before."""
        write_whole(self.training / "report.json", json.dumps(report, indent=1) + "\n")

    def save(self, step: int, module: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """After so many steps."""
        tensors: dict[str, Tensor] = {_STEP: torch.tensor(step)}
        for name, parameter in module.named_parameters():
            tensors[f"parameter.{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        _save(tensors, self.training / "state.safetensors")

    def restore(self, module: nn.Module, optimizer: torch.optim.AdamW) -> int:
        """To what they were when they were saved last. Returns the steps before that: 0 where they never were."""
        path = self.training / "state.safetensors"
        if not path.exists():
            return 0
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            for name, parameter in module.named_parameters():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"parameter.{name}"))
                keys = [key for key in names if key.startswith("optimizer.") and key.endswith(f".{name}")]
                optimizer.state[parameter] = {key.split(".")[1]: file.get_tensor(key) for key in keys}
            return int(file.get_tensor(_STEP))

    def publish(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put heads where whoever deploys them looks."""
        _save(tensors, self.directory / "model.safetensors")
        write_whole(self.directory / "config.json", json.dumps(config, indent=2) + "\n")
        for name in ("model.safetensors", "config.json"):
            (self.directory / name).chmod(_READABLE)

    def published(self) -> dict[str, Tensor]:
        return load_file(self.directory / "model.safetensors")

    def forget_features(self) -> None:
        """They are large, and made again where they are wanted."""
        for path in self.training.glob("*features-*.safetensors"):
            path.unlink()


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    made = path.with_name(f".{path.name}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, made)
    move_whole(made, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: not readable as JSON: {error}") from None
    assert isinstance(found, dict)
    return found

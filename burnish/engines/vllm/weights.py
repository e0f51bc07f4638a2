"""Weights on their way to another process: a safetensors file, and a page that says what each tensor's bytes must be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, PAGE = "weights.safetensors", "weights.json"


class Damaged(ValueError):
    """The weights that were read are not those that were written, or not those of this model."""


def write(folder: Path, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
    """weights.safetensors; and weights.json with the version, dtype, shape and digest of every tensor, and which are one and the same."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in weights:
        place = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if place == name:
            tensors[name] = tensor.detach().cpu().contiguous()
        else:
            tied[name] = place
    save_file(tensors, folder / WEIGHTS)
    page = {"version": version, "tensors": {name: described(tensor) for name, tensor in tensors.items()}, "tied": tied}
    (folder / PAGE).write_text(json.dumps(page))


def read(folder: Path, version: int) -> dict[str, Tensor]:
    """The tensors, in memory. Raises Damaged where one is missing, too many or not the one that was written."""
    try:
        page = json.loads((folder / PAGE).read_text())
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except Exception as error:   # safetensors raises what it likes for a damaged file
        raise Damaged(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    if page["version"] != version:
        raise Damaged(f"{folder} holds version {page['version']}, not {version}")
    if differ := sorted(page["tensors"].keys() ^ tensors.keys()):
        raise Damaged(f"{folder} has other tensors than its page says: {differ[:3]}")
    if wrong := [name for name, tensor in tensors.items() if described(tensor) != page["tensors"][name]]:
        raise Damaged(f"the checksums of {len(wrong)} of {len(tensors)} tensors differ, the first that of {wrong[0]}")
    return tensors | {name: tensors[other] for name, other in page["tied"].items()}


def described(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "blake2b": hashlib.blake2b(data, digest_size=32).hexdigest()}


def fitted(weights: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The weights that a checkpoint with these shapes has. One more is left out where it equals another, as a tied output layer does.

    Raises Damaged where a name is missing or unknown, or a shape is another.
    """
    if missing := [name for name in shapes if name not in weights]:
        raise Damaged(f"{len(missing)} of the model's {len(shapes)} tensors are not among the {len(weights)} given, as {missing[0]}")
    if wrong := [name for name, shape in shapes.items() if list(weights[name].shape) != list(shape)]:
        raise Damaged(f"{wrong[0]} has the shape {list(weights[wrong[0]].shape)}; the model's is {list(shapes[wrong[0]])}")
    kept = {name: weights[name] for name in shapes}
    for name in weights.keys() - shapes.keys():
        if not any(weights[name].shape == other.shape and torch.equal(weights[name], other) for other in kept.values()):
            raise Damaged(f"the model has no tensor {name}")
    return kept


def shapes_in(model: str) -> dict[str, list[int]]:
    """Names and shapes of a model's tensors, from the heads of its files: in a folder, or in the hub's cache."""
    folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return found

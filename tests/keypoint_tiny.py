"""A feature model and a detector small enough for tests, and photos with labels."""

from __future__ import annotations

from pathlib import Path

import torch

from surefeat.data.drawn import write_folder
from surefeat.keypoints.config import KeypointConfig
from surefeat.model.files import ModelConfig
from surefeat.model.network import DenseFeatures

QUICK = KeypointConfig(size=64, hidden=16, steps=4, epochs=0, views=2, batch=4)


def small_model(seed: int = 5) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures(ModelConfig(trunk="small", lower="conv4", channels=16)).eval()


def write_labelled(folder: Path) -> Path:
    """16 photos of 8 categories; the json of their labels."""
    write_folder(folder, count=16, size=96, seed=0)
    return folder / "keypoints.json"

"""The rows by name, as the command line knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from surefeat.baselines.handmade import hog_row, sift_row
from surefeat.baselines.networks import hypercolumn_row, model_row, tap_row
from surefeat.baselines.rows import Row

Init = Sequence[str | Path]

KNOWN: dict[str, Callable[[Init, torch.device], Row]] = {
    "resnet50-hc": lambda init, device: hypercolumn_row("resnet50-hc", init=init, device=device),
    "resnet50-dilated": lambda init, device: tap_row(
        "resnet50-dilated", "res5c", init=init, device=device
    ),
    "vgg16": lambda init, device: tap_row("vgg16", "pool4", init=init, device=device),
    "res4c": lambda init, device: tap_row("res4c", "res4c", init=init, device=device),
    "res4d": lambda init, device: tap_row("res4d", "res4d", init=init, device=device),
    "sift": lambda init, device: sift_row(),
    "hog": lambda init, device: hog_row(),
}


def build_row(
    name: str, *, model: str | Path | None = None, init: Init, device: torch.device
) -> Row:
    """A row by name: `ours` (from `model`), one of KNOWN, or NAME=FOLDER for another model."""
    if name == "ours":
        return model_row(name, model, device=device)
    title, given, folder = name.partition("=")
    if given and title and folder:
        return model_row(title, folder, device=device)
    if name not in KNOWN:
        raise ValueError(
            f"unknown row {name!r}; choose ours, {', '.join(KNOWN)}, or NAME=FOLDER for a model"
        )
    return KNOWN[name](init, device)

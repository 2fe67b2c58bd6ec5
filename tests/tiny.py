"""A training that takes a second: drawn images and settings for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from surefeat.data.decode import Batches, Canvas
from surefeat.data.drawn import draw_many, write_folder
from surefeat.learn.config import Config, preset
from surefeat.learn.loop import Progress, train
from surefeat.learn.pretrain import Pretrained, pretrain
from surefeat.learn.runs import Run
from surefeat.model.network import DenseFeatures

SIDE = 48
CPU = torch.device("cpu")


def tiny(*, size: int = 32, points: int = 24, sigma_warmup: int = 3, **train: Any) -> Config:
    """The small preset for 48 pixel images, with some settings of the loop."""
    small = preset("small")
    loop: dict[str, Any] = {
        "steps": 12, "batch": 4, "lr_warmup": 2, "decay": "constant", "log_every": 3,
        "checkpoint_every": 4,
    }  # fmt: skip
    return replace(
        small,
        warp=replace(small.warp, size=size),
        loss=replace(small.loss, points=points, ignore_radius=10.0, sigma_warmup=sigma_warmup),
        train=replace(small.train, **(loop | train)),
        data=replace(small.data, side=SIDE, held_out=2, workers=1, memory="host"),
    )


def still(**settings: Any) -> Config:
    """Nothing moves: with the same images and views the loss is the same at every step."""
    return tiny(lr=0.0, head_lr=0.0, weight_decay=0.0, sigma_warmup=0, **settings)


def images(folder: Path, *, count: int = 11) -> Path:
    write_folder(folder, count=count, size=SIDE, seed=0)
    return folder


def canvas(count: int) -> Canvas:
    drawn = [one.image for one in draw_many(count, size=SIDE, seed=0)]
    sizes = torch.full((count, 2), SIDE, dtype=torch.int32)
    return Canvas(torch.stack(drawn), sizes, tuple(f"{i}.png" for i in range(count)), ())


def learn(source: Path, out: Path, config: Config | None = None, **more: Any) -> Pretrained:
    """pretrain on the CPU from random weights."""
    return pretrain(
        source, out=out, config=config, **{"init": "none"} | more, device="cpu", quiet=True
    )


def small_model(config: Config, *, seed: int = 0) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures.create(config.model, init="none")


def go(
    folder: Path,
    config: Config,
    *,
    images: int = 9,
    model: DenseFeatures | None = None,
    **more: Any,
) -> tuple[Run, DenseFeatures, Progress]:
    model = model or small_model(config)
    run = Run.start(folder, config)
    batches = Batches(canvas(images), device=CPU)
    return run, model, train(model, batches, run, config, **more)


def weights(run: Path) -> dict[str, Tensor]:
    """Of the model that a run left behind."""
    found: dict[str, Tensor] = load_file(run / "model" / "model.safetensors")
    return found


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )

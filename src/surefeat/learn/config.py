"""Every knob of learning: unit, default, where it comes from. Imports nothing heavy.

Tags in the field notes: [P] printed in the paper, [C] our choice where it is silent,
[M] worked better than the printed value in short experiments (docs/recipe.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from surefeat.core.files import by_flag, check_settings
from surefeat.model.config import SHIPPED_TRUNKS, ModelConfig, Trained

LossKind = Literal["probabilistic", "plain", "contrastive"]


@dataclass(frozen=True)
class WarpConfig:
    """Random affine views of one image (paper, section 3.4)."""

    size: int = 320
    """Side of a view, pixels; the paper preset has 224 [M]."""
    rotation: float = 15.0
    """Largest rotation either way, degrees; the paper preset has 30 [M]."""
    linear: float = 0.2
    """Each of the four linear entries is multiplied by its own U(1-l, 1+l); paper 0.5 [M]."""
    translation: float = 0.25
    """Largest shift either way, in half sides of the view; paper 0.5 [M]."""
    zoom: tuple[float, float] = (0.7, 1.3)
    """Side of the view over that of the image, before the linear part; paper 9/16 [M]."""
    mirrored: float = 0.1
    """Share of pairs whose second view is mirrored left to right against the first: things in
    photos face either way. The paper has none [M]."""


@dataclass(frozen=True)
class ColourConfig:
    """SSD's colour changes, drawn anew for each view after the warp (paper, section 3.4)."""

    brightness: float = 32 / 255
    """Added, +-, on the [0, 1] scale [P names SSD]."""
    contrast: float = 0.5
    """Factor U(1-c, 1+c) [P]."""
    saturation: float = 0.5
    """Factor U(1-s, 1+s) [P]."""
    hue: float = 36.0
    """Rotation, +-, degrees: SSD's 18 units of OpenCV's 180 [P]."""
    strength: float = 1.75
    """All ranges times this; the paper says "increased" without a number [C]."""
    probability: float = 0.5
    """Of each of the four changes [P]."""


@dataclass(frozen=True)
class LossConfig:
    """Pairs, labels and the density of scores (paper, sections 3.2 to 3.4)."""

    kind: LossKind = "probabilistic"
    """probabilistic = Ours, plain = Ours w/o conf., contrastive = UCN's loss [P]."""
    points: int = 700
    """Points per image pair; all pairs of them are scored [P]."""
    negatives: int = 30
    """Hardest negatives kept per anchor [P]."""
    match_radius: float = 1.0
    """A pair closer than this is a match, pixels of view 1 [P]."""
    ignore_radius: float = 43.0
    """A pair further than this is a non-match, pixels of view 1; what is between is ignored. It
    is the paper's 30 of 224 pixels [P]."""
    sigma_warmup: int = 150
    """Steps during which sigma is held at 1, against collapse, but three fifths of all at most
    [M]."""
    margin: float = 1.0
    """Of the contrastive loss, distance of unit descriptors [C]."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 500
    """Optimiser steps; a plateau may stop earlier. On VOC more gained nothing [M]."""
    batch: int = 64
    """Image pairs per step, over all processes [C]."""
    trained: Trained = "head"
    """all layers, the last stage (res5) and the head, or the head alone; the paper: all [M]."""
    optimiser: Literal["adagrad", "adamw"] = "adamw"
    """The paper: AdaGrad, lr 1e-3, weight decay 5e-4, which on res5 gives the same [M]."""
    lr: float = 1e-4
    """Of the trunk [M]; AdaGrad in the paper 1e-3."""
    head_lr: float = 5e-4
    """Of the head [M]."""
    weight_decay: float = 5e-4
    """Share of the weights that a step takes off, times the rate [P]."""
    lr_warmup: int = 50
    """Steps of linear warm-up [C]."""
    decay: Literal["constant", "cosine"] = "constant"
    """How the rate falls towards the last step [C]."""
    batch_norm: Literal["frozen", "trained"] = "frozen"
    """Statistics of the trunk's batch norm: those of the initial weights, or of each batch [C]."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches it off [C]."""
    patience: int = 0
    """Stop when the smoothed loss has not improved for this many steps [P]; 0 = run all steps."""
    seed: int = 0
    """Determines everything drawn, on one machine."""
    amp: bool = True
    """bf16 on accelerators; never on the CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the whole step: a minute at the start, then up to three times faster; auto:
    on CUDA from 3,000 steps on, or from 1,000 when all layers learn."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    check_every: int = 250
    """Steps between label-free checks on held-out images; 0 = only at the end."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    kept_views: int = 0
    """Views in all that are drawn once and kept as the frozen layers see them, 4 to 8 a photo; the
    rest of the photos is not used. 0: views are drawn anew at every step [C]."""


@dataclass(frozen=True)
class DataConfig:
    """Images in."""

    side: int = 384
    """Images are kept at this longest side, pixels."""
    held_out: int = 64
    """Images kept from training for the label-free check (at most a fifth of the set)."""
    memory: Literal["auto", "device", "host", "stream"] = "auto"
    """Where decoded images live: the first of these that they fit into."""
    workers: int = 8
    """Threads that decode, or processes that stream."""


@dataclass(frozen=True)
class Config:
    """All of it; stored as config.json in every run folder."""

    model: ModelConfig = field(default_factory=ModelConfig)
    warp: WarpConfig = field(default_factory=WarpConfig)
    colour: ColourConfig = field(default_factory=ColourConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)


_LEAST = {
    "model.channels": 1, "model.longest-side": 16, "warp.size": 16, "warp.zoom": 0.01,
    "loss.points": 2, "loss.negatives": 1, "train.batch": 1, "data.side": 16,
}  # fmt: skip


_MOST = {
    "warp.mirrored": 1, "colour.probability": 1, "model.sigma-floor": 0.9, "warp.size": 4096,
    "model.longest-side": 4096, "data.side": 4096, "data.workers": 1024,
    "train.batch": 100_000, "loss.points": 100_000,
}  # fmt: skip


def check_numbers(config: Config) -> None:
    """Refuse numbers that cannot work, by the name of their flag, before anything is begun."""
    check_settings(config, least=_LEAST, most=_MOST)
    if config.warp.zoom[0] > config.warp.zoom[1]:
        zoom = " ".join(f"{share:g}" for share in config.warp.zoom)
        raise ValueError(f"--warp.zoom is {zoom}; give the smaller share first")


Preset = Literal["auto", "ours", "quick", "one-way", "paper", "small"]


def preset(name: Preset) -> Config:
    """`ours`: what worked best on any photos; `auto`: the same, fitted to folder and machine by
    `fit_to`; `quick`: minutes on a CPU, with views that are seen once; `one-way`: ours without
    mirrored views and with the paper's lower layer, for things that always face one way; `paper`:
    as printed; `small`: a tiny network for tests and the demo."""
    ours = Config()
    if name in ("auto", "ours"):
        return ours
    if name == "quick":
        return replace(
            ours, warp=replace(ours.warp, size=224),
            loss=replace(ours.loss, points=350, ignore_radius=30.0, sigma_warmup=60),
            train=replace(
                ours.train, steps=200, batch=16, lr=3e-4, head_lr=2e-3, lr_warmup=20,
                decay="cosine", log_every=10, check_every=0, checkpoint_every=20, kept_views=1200,
            ),
        )  # fmt: skip
    linear = replace(ours.model, head="linear", lower="res4c")
    if name == "one-way":
        train = replace(ours.train, trained="last", head_lr=1e-3)
        return replace(ours, model=linear, warp=replace(ours.warp, mirrored=0.0), train=train)
    if name == "paper":
        wide = replace(
            ours.warp, size=224, rotation=30.0, linear=0.5, translation=0.5, zoom=(9 / 16, 9 / 16),
            mirrored=0.0,
        )  # fmt: skip
        printed = replace(
            ours.train, trained="all", optimiser="adagrad", lr=1e-3, head_lr=1e-3, lr_warmup=0,
            clip=0.0, patience=2000, steps=20_000,
        )  # fmt: skip
        loss, data = replace(ours.loss, ignore_radius=30.0), replace(ours.data, side=256)
        return replace(ours, model=linear, warp=wide, loss=loss, train=printed, data=data)
    if name == "small":
        return replace(
            ours,
            model=replace(
                ours.model, trunk="small", head="linear", channels=32, longest_side=128
            ),
            warp=replace(ours.warp, size=96, mirrored=0.0),
            loss=replace(ours.loss, points=256, ignore_radius=12.0, sigma_warmup=200),
            train=replace(
                ours.train, steps=400, batch=16, trained="all", lr=2e-3, head_lr=2e-3,
                decay="cosine", log_every=10, check_every=100, checkpoint_every=100,
            ),
            data=replace(ours.data, side=112),
        )  # fmt: skip
    raise ValueError(f"unknown preset {name!r}; choose {', '.join(get_args(Preset))}")


def refuse_preset(name: Preset, settings: Config, *, run: object) -> None:
    """ValueError where a run's settings are nearer to another preset than to this one.

    Which preset it began with is not kept, and single settings may have been given; how many
    steps it takes may change. auto asks for nothing.
    """
    if name == "auto":
        return
    own = by_flag(settings)

    def differing(other: Preset) -> list[str]:
        known = by_flag(preset(other))
        return [flag for flag in own if own[flag] != known[flag] and flag != "train.steps"]

    nearest = min(get_args(Preset), key=lambda other: len(differing(other)))
    if len(differing(name)) > len(differing(nearest)):
        flag = next(flag for flag in differing(name) if flag not in differing(nearest))
        what = f"--{flag} is {own[flag]} there, not {by_flag(preset(name))[flag]}"
        fix = "leave --preset out, or start a new run with another --out"
        raise ValueError(f"{run} keeps its own settings, not those of {name}: {what}; {fix}")


def fit_to(config: Config, *, photos: int, cpu: bool) -> Config:
    """What stands as in `ours` is set for this machine and so many photos; the rest is kept."""
    ours = preset("ours")
    kept = config.train.trained != "all" and config.model.trunk in SHIPPED_TRUNKS
    fitted = preset("quick") if cpu and kept else ours
    if not cpu:
        # 400 photos of birds had learned as much after 250 steps as after 500; VOC wants 500.
        steps = min(ours.train.steps, max(250, photos * 5 // 8))
        # Wider views than VOC's serve a folder: a point more on birds, none less on PF-PASCAL.
        wide = replace(ours.warp, rotation=30.0, linear=0.3, zoom=(0.5, 1.5))
        fitted = replace(
            ours, train=replace(ours.train, steps=steps), warp=wide if kept else ours.warp
        )
    groups: dict[str, Any] = {}
    for group in fields(config):
        given, usual, better = (getattr(c, group.name) for c in (config, ours, fitted))
        changed = {
            f.name: getattr(better, f.name)
            for f in fields(given)
            if getattr(given, f.name) == getattr(usual, f.name)
        }
        groups[group.name] = replace(given, **changed)
    return Config(**groups)


def default_init(config: Config) -> str:
    """Where a training starts if nobody says: what ships, so that no network is needed.

    All layers are learned from ImageNet's weights, as in the paper; `small` has none.
    """
    trunk = config.model.trunk
    if trunk == "small":
        return "none"
    within = trunk in SHIPPED_TRUNKS and config.train.trained != "all"
    return "shipped" if within else "imagenet"

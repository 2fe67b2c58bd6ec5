"""Every knob of weakly supervised boxes: unit, default, where it comes from. Nothing heavy.

Tags: [P] printed by Bilen & Vedaldi (2016) or in the paper's appendix B, [C] our choice where they
are silent, [M] what was measured as best where fc6 and fc7 start from random weights, by
results/boxes/wsddn-rigid12-1000.json and results/studies/boxes_search.json (docs/studies/boxes.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surefeat.core.files import check_settings
from surefeat.match.config import ProposalConfig


@dataclass(frozen=True)
class DetectorConfig:
    """The network: ROI pooling on a trunk's map, two hidden layers, two heads."""

    trunk: str = "resnet50"
    """resnet50 [M], vgg16 (conv5 [P]), small, or timm:NAME (the timm extra)."""
    stride_in_1x1: bool = False
    """ResNet v1 instead of v1.5; read from the weights file where it says so."""
    tap: str = "auto"
    """Layer that is pooled; auto: the trunk's last: res5c [M], for VGG16 conv5 [P]."""
    pooled: int = 2
    """Bins each way of the ROI max pooling; 2 for res5c [M], 7 for VGG16's own fc6 [P]."""
    hidden: int = 256
    """Width of fc6 and fc7 [M]; 4096 fits VGG16's own ImageNet layers [P]."""
    dropout: float = 0.5
    """Share of fc6 and fc7 switched off while learning [P]."""
    temperature: float = 2.0
    """Divides the localisation scores before their softmax over regions [P]."""


@dataclass(frozen=True)
class LearnConfig:
    """The loop."""

    epochs: int = 6
    """Passes over the images [M], the second half at a tenth of the rate; the paper 20 [P]."""
    batch: int = 1
    """Images per step [P]."""
    lr: float = 1e-4
    """Of the hidden layers and heads, by AdamW, which trains them from random weights [C]; the
    paper has SGD, 1e-5, on ImageNet's layers, and lets the trunk learn too."""
    weight_decay: float = 5e-4
    """Share of the weights that a step takes off, times the rate [P]."""
    regulariser: float = 1e-4
    """Weight of the spatial regulariser [P]."""
    overlap: float = 0.6
    """It pulls boxes with more IoU than this with the best one [P]."""
    scales: tuple[int, ...] = (320,)
    """Longest sides, one drawn per step, network pixels [M]; the paper 480 to 1200 [P]."""
    flips: bool = True
    """Mirror every second image [P]."""
    seed: int = 0
    """Determines everything drawn, on one machine."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    checkpoint_every: int = 500
    """Steps between checkpoints [C]; with VGG16's own hidden layers each is of 1.5 GB."""


@dataclass(frozen=True)
class SelectConfig:
    """Which boxes are kept (the paper's appendix B)."""

    scales: tuple[int, ...] = (320,)
    """Longest sides whose scores are averaged, each plain and mirrored [M]; the paper
    480 576 688 864 1200 [P]."""
    floor: float = 0.001
    """Boxes whose mean over scales and flips is less are dropped, before the class median is taken
    [P]; with agreement scores are higher, and fewer are."""
    agreement: float = 1.0
    """A box's score is the sum over all boxes of their scores times IoU to this power [C]; 0: its
    own score alone [P]. On VOC 1 is worth 6 to 7 points of CorLoc and 5 to 6 of mAP."""


@dataclass(frozen=True)
class BoxesConfig:
    """All of it; stored as config.json in every run folder."""

    detector: DetectorConfig = field(default_factory=DetectorConfig)
    proposals: ProposalConfig = field(default_factory=ProposalConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    regions: int = 100
    """Of an image's proposals the first so many compete; Prim's come the most different first
    [M]."""
    smallest: float = 0.04
    """Proposals with a side under this share of the image's longest are left out: 20 of 500 pixels
    in the code of Bilen & Vedaldi."""
    side: int = 384
    """Images are kept in memory at this longest side at most, pixels."""


_LEAST = dict.fromkeys(
    ("detector.pooled", "detector.hidden", "proposals.count", "proposals.side", "proposals.draws",
     "learn.epochs", "learn.batch", "learn.scales", "select.scales", "side", "regions"), 1,
)  # fmt: skip


_MOST = {
    "detector.dropout": 0.99, "detector.pooled": 64, "detector.hidden": 1 << 16, "side": 4096,
    "learn.batch": 10_000, "learn.scales": 4096, "select.scales": 4096,
}  # fmt: skip


def check_boxes_config(config: BoxesConfig) -> None:
    """Refuse numbers that cannot work, by the name of their flag, before anything is begun."""
    check_settings(config, least=_LEAST, most=_MOST)
    if config.detector.temperature <= 0:
        raise ValueError("--detector.temperature must be more than 0; the paper has 2")

"""The detector on drawn categories pasted on clutter: a frozen trunk, image labels alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from detection import centre_box
from torch import Tensor

from surefeat.boxes.config import DetectorConfig, LearnConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import Photo
from surefeat.boxes.select import best_boxes, score_photos
from surefeat.boxes.train import calibrate, learn_boxes
from surefeat.core.geometry import box_iou
from surefeat.data.decode import Item, Place
from surefeat.data.drawn import background, draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.sources import PhotoLabels
from surefeat.learn.runs import Run
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import propose
from surefeat.model.network import DenseFeatures

SIDE, OBJECT = 128, 72
NAMES = tuple(kind.name for kind in CATEGORIES[:3])


def scene(number: int) -> tuple[Photo, Tensor]:
    """An object of one of three categories anywhere on clutter, with Prim's boxes; its box (4,)."""
    kind = number % len(NAMES)
    generator = np.random.default_rng([7, number])
    drawn = draw(kind, size=OBJECT, generator=generator)
    clutter = background(size=SIDE, generator=generator).clip(0, 1) * 255
    picture = torch.from_numpy(clutter.astype(np.uint8))
    y, x = (int(value) for value in generator.integers(0, SIDE - OBJECT + 1, 2))
    spot = picture[:, y : y + OBJECT, x : x + OBJECT]
    spot[:] = torch.where(drawn.mask, drawn.image, spot)
    rows, columns = (
        each + start for each, start in zip(drawn.mask.nonzero().T, (y, x), strict=True)
    )
    truth = torch.stack([columns.min(), rows.min(), columns.max(), rows.max()]).float()
    name = f"{number}.png"
    image = PhotoLabels(name, Item(name, Place(name)), frozenset({NAMES[kind]}))
    boxes = propose(picture, ProposalConfig(count=60, draws=300))
    return Photo(image, picture, (SIDE, SIDE), boxes), truth


def test_the_detector_finds_drawn_objects_on_clutter(tmp_path: Path) -> None:
    """Measured CorLoc 0.58; best centre box 0.17, a random proposal 0.13."""
    pytest.importorskip("cv2").ximgproc  # noqa: B018
    photos, truth = zip(*(scene(number) for number in range(24)), strict=True)
    shipped = DenseFeatures.from_pretrained(device="cpu")
    config = DetectorConfig(
        trunk="resnet50", tap="res3d", stride_in_1x1=shipped.config.stride_in_1x1, pooled=3,
        hidden=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        detector = Detector(config, NAMES)
    detector.trunk.load_state_dict(shipped.trunk.state_dict())
    settings = LearnConfig(epochs=12, lr=3e-4, scales=(SIDE,), flips=False, checkpoint_every=0)
    calibrate(detector, photos, settings)
    learn_boxes(detector, photos, Run(tmp_path), settings, quiet=True)
    found = [
        torch.tensor(best.box)
        for each in score_photos(detector.eval(), photos, scales=(SIDE,), flips=False)
        for best in best_boxes(each, NAMES, agreement=0)
    ]
    centres = [centre_box((SIDE, SIDE), share=share) for share in (0.1, 0.15, 0.2, 0.3, 0.5)]
    centre = max(share_right([box] * len(truth), truth) for box in centres)
    chance = [
        (box_iou(photo.proposals, box[None]) >= 0.5).float().mean()
        for photo, box in zip(photos, truth, strict=True)
    ]
    right = share_right(found, truth)
    assert right > centre + 0.2
    assert right > float(torch.stack(chance).mean()) + 0.25


def share_right(boxes: list[Tensor], truth: tuple[Tensor, ...]) -> float:
    pairs = zip(boxes, truth, strict=True)
    right = [bool(box_iou(box[None], true[None]) >= 0.5) for box, true in pairs]
    return sum(right) / len(right)

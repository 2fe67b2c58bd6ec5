"""A benchmark that is drawn in a second: synthetic instances as a list of pairs."""

from __future__ import annotations

import csv
from itertools import permutations
from pathlib import Path

import torch

from surefeat.core.image import Image
from surefeat.data.drawn import correspondences, draw_many
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.pairs import load_pairs
from surefeat.match.proposals import ProposalSettings, proposals_of
from surefeat.measure.protocol import Protocol
from surefeat.model.files import ModelConfig
from surefeat.model.network import DenseFeatures

SIZE = 96
CPU = torch.device("cpu")
PROTOCOL = Protocol(side=SIZE, proposals=ProposalSettings(count=60))


def write_pairs(folder: Path, *, count: int = 16, most: int = 6) -> Path:
    """Images and pairs.csv in PF-PASCAL's columns; pairs of one category, in both directions."""
    folder.mkdir(parents=True, exist_ok=True)
    instances = draw_many(count, size=SIZE, seed=5)
    for number, one in enumerate(instances):
        Image.fromarray(one.image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    rows = []
    for (i, first), (j, second) in permutations(enumerate(instances), 2):
        if first.category == second.category and len(rows) < most:
            points0, points1 = correspondences(first, second)
            if len(points0) >= 3:
                columns = (";".join(f"{v:.2f}" for v in p) for p in (*points0.T, *points1.T))
                name = CATEGORIES[first.category].name
                rows.append([f"{i}.png", f"{j}.png", name, *columns])
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source_image", "target_image", "class", "XA", "YA", "XB", "YB"])
        writer.writerows(rows)
    return folder / "pairs.csv"


def write_model(folder: Path) -> Path:
    """A small network with random weights."""
    torch.manual_seed(1)
    DenseFeatures(ModelConfig(trunk="small", channels=16, longest_side=SIZE)).save_pretrained(
        folder
    )
    return folder


def write_proposals(listed: Path, file: Path) -> Path:
    """Proposals of the images of a list."""
    images = [path for pair in load_pairs(listed) for path in (pair.image0, pair.image1)]
    proposals_of(images, PROTOCOL.proposals, file=file, quiet=True)
    return file

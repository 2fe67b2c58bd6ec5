"""Which way do a folder's things face? A sign without labels, for folders of many kinds.

    python benchmarks/experiments/facing.py DATA --out FILE.json [--photos 120] [--folders NAME ...]

Each of some photos of a folder is matched with the one of the others that is most alike (mean of
res5c), and the votes are asked whether the pair faces opposite ways. Asked: does the share of such
pairs tell folders whose things face both ways (birds) from folders where left and right count
(PF-PASCAL's development photos)? Others: PF-WILLOW, VOC photos of one class. DATA has pf-pascal,
cub-dev, pf-willow, voc and voc-nonrigid.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from anyfolder import bird_photos, read_photo
from reliability_cases import whole_photos
from torch import Tensor

from surefeat.core.files import choose_device, environment, write_json
from surefeat.core.image import ImageLike
from surefeat.data.benchmarks import development_pairs
from surefeat.match.search import prepare_pair, vote
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

OPPOSITE = 0.5

LEAST = 40
"""Photos of a VOC class."""


def folders(data: Path) -> dict[str, list[Callable[[], ImageLike]]]:
    """Name -> readers of its photos, in an order that says nothing."""
    val, train = development_pairs(data / "pf-pascal")
    pascal = sorted({path for pair in val + train for path in (pair.image0, pair.image1)})
    lists = {
        "birds": bird_photos(data / "cub-dev", 1200),
        "pf-pascal": random.Random(0).sample(pascal, len(pascal)),
        "pf-willow": sorted((data / "pf-willow").rglob("*.png")),
    }
    known: dict[str, list[Callable[[], ImageLike]]] = {
        name: [lambda path=path: read_photo(path) for path in paths]
        for name, paths in lists.items()
    }
    for kind, photos in whole_photos(data, set(), seed=0).items():
        if len(photos) >= LEAST:
            known[f"voc {kind}"] = [photo.read for photo in photos]
    return known


@torch.no_grad()
def opposite_pairs(features: Sequence[Features]) -> list[float]:
    """Per photo the votes' say that it and the most alike of the others face opposite ways."""
    kinds = torch.stack([_kind(one) for one in features])
    alike = kinds @ kinds.T
    alike.fill_diagonal_(-1)
    says = []
    for number, partner in enumerate(alike.argmax(1).tolist()):
        sides = prepare_pair(
            features[number], features[partner],
            descriptor_weight=POINT_WEIGHTS[0], lower_weight=POINT_WEIGHTS[1],
        )  # fmt: skip
        says.append(round(vote(*sides, Voting()).mirrored, 4))
    return says


def _kind(features: Features) -> Tensor:
    """The last lower layer, res5c, averaged over the photo."""
    mean = features.lower[-features.last :].mean((1, 2))
    return mean / mean.norm()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--photos", type=int, default=120)
    parser.add_argument("--folders", nargs="*")
    args = parser.parse_args()
    device, metrics, kept = choose_device(None), {}, {}
    model = DenseFeatures.from_pretrained(device=device)
    for name, readers in folders(args.data).items():
        if args.folders and name not in args.folders:
            continue
        says = opposite_pairs(list(model.extract([read() for read in readers[: args.photos]])))
        share = sum(say > OPPOSITE for say in says) / len(says)
        error = (share * (1 - share) / len(says)) ** 0.5
        metrics[name] = {"photos": len(says), "opposite": round(share, 4), "error": round(error, 4)}
        kept[name] = says
        print(name, metrics[name], flush=True)
    write_json(args.out, {
        "row": "which way things face", "benchmark": "folders", "split": "without labels",
        "metrics": metrics, "config": {"said": OPPOSITE, "photos": args.photos},
        "weights_sha256": model.weights_sha256, **environment(device), "says": kept,
    })  # fmt: skip


if __name__ == "__main__":
    main()

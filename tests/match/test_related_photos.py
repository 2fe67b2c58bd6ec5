"""The shipped fit on photos unlike all it was fitted on: those that other packages carry.

Nothing was fitted on them. Pairs that are neither plainly of one kind nor plainly not (a portrait
and a man far off) are not asked, nor pictures of no thing (textures, micrographs, discs), which are
still taken for each other now and then (docs/studies/related.md).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefeat.match.points import match_points
from surefeat.match.related import compare
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

SKIMAGE = {
    "portrait": "astronaut.png", "cup": "coffee.png", "cat": "chelsea.png", "coins": "coins.png",
    "rocket": "rocket.jpg", "motorcycle": "motorcycle_left.png", "horse": "horse.png",
    "again": "motorcycle_right.png", "photographer": "camera.png",
}  # fmt: skip
"""Photos that scikit-image carries; the others it downloads."""

Photos = Callable[[str], Features]


@pytest.fixture(scope="module")
def photos() -> Photos:
    """Features of a photo by name; a photo that is not there is a skip."""
    skimage = pytest.importorskip("skimage")
    matplotlib = pytest.importorskip("matplotlib")
    model = DenseFeatures.from_pretrained(device="cpu")
    files = {name: Path(skimage.__file__).parent / "data" / file for name, file in SKIMAGE.items()}
    files["officer"] = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    known: dict[str, Features] = {}

    def features(name: str) -> Features:
        if not files[name].is_file():
            pytest.skip(f"the installed packages carry no {files[name].name}")
        if name not in known:
            known[name] = model.extract(files[name])[0]
        return known[name]

    return features


def chance(one: Features, other: Features) -> float:
    """`Matches.related`, without matching a point."""
    weights = dict(zip(("descriptor_weight", "lower_weight"), POINT_WEIGHTS, strict=True))
    agreement = compare(*(prepare(features, **weights) for features in (one, other)))
    assert one.reliability is not None
    return float(one.reliability.pair.log_odds(agreement.signs()).sigmoid())


def test_a_portrait_and_a_cup_have_nothing_in_common(photos: Photos) -> None:
    """They were called related with .85, and 10 of 26 matches right: outlines alone are alike."""
    matches = match_points(photos("portrait"), photos("cup"), mutual=True)
    assert matches.related is not None
    assert matches.related < 0.4
    assert matches.probability is not None
    assert float(matches.probability.max()) < 0.5


def test_two_portraits_and_two_views_of_one_thing_are_related(photos: Photos) -> None:
    for names in (("portrait", "officer"), ("motorcycle", "again")):
        assert chance(*map(photos, names)) > 0.6, names


def test_things_of_different_kinds_are_not_related(photos: Photos) -> None:
    """All pairs of photos of a thing; of three photos with a person one only is compared."""
    names = [name for name in SKIMAGE if name not in ("again", "photographer")]
    people = ("photographer", "officer")
    asked = [*combinations(names, 2), *((p, n) for p in people for n in names if n != "portrait")]
    chances: Tensor = torch.tensor([chance(*map(photos, pair)) for pair in asked])
    worst = sorted(zip(chances.tolist(), asked, strict=True))[-3:]
    assert float(chances.max()) < 0.5, worst
    assert float(chances.mean()) < 0.1

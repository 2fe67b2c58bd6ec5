"""Related or not, of photos unlike all that the fit has seen: those that other packages carry.

    python benchmarks/experiments/unlike.py --out results/studies/unlike.json

Photos of scikit-image, matplotlib and gradio that need no download. None was fitted on; they
were seen beside the development pairs by which the signs were chosen. Some show a thing, some
nothing that has a name (textures, micrographs, discs). Pairs of which nobody could say whether they
are of one kind (a moon and a retina, two men of whom one is far off) are written down, not counted.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

import gradio
import matplotlib
import skimage
import torch

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.ranking import auroc
from surefeat.match.points import match_points
from surefeat.match.related import compare
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

THINGS = {
    skimage: "data/astronaut.png data/coffee.png data/camera.png data/chelsea.png data/horse.png "
    "data/motorcycle_left.png data/motorcycle_right.png data/rocket.jpg data/coins.png",
    matplotlib: "mpl-data/sample_data/grace_hopper.jpg",
    gradio: "media_assets/images/cheetah1.jpg media_assets/images/cheetah.jpg "
    "media_assets/images/groot.jpeg media_assets/images/tower.jpg test_data/cheetah2.jpg",
}

NO_THING = {
    skimage: "data/hubble_deep_field.jpg data/moon.png data/retina.jpg data/brick.png "
    "data/grass.png data/gravel.png data/page.png data/text.png data/cell.png data/color.png "
    "data/clock_motion.png data/ihc.png data/logo.png",
}

SAME = (
    {"motorcycle_left", "motorcycle_right"}, {"astronaut", "grace_hopper"},
    {"cheetah", "cheetah1", "cheetah2"},
)  # fmt: skip

UNCLEAR = (
    {"camera", "astronaut", "grace_hopper", "groot"}, {"groot", "cheetah1", "cheetah2"},
    {"chelsea", "cheetah", "cheetah1", "cheetah2"}, {"page", "text"}, {"rocket", "tower"},
    {"coins", "page"}, {"cell", "clock_motion", "moon", "retina", "color"}, {"cell", "ihc"},
    {"moon", "gravel"},
    {"grass", "gravel", "brick", "ihc"},
)  # fmt: skip


def files(groups: dict[Any, str]) -> dict[str, Path]:
    """Name -> file; all of them come with the packages."""
    paths = [
        Path(package.__file__).parent / name
        for package, names in groups.items() for name in names.split()
    ]  # fmt: skip
    return {path.stem: path for path in paths}


def counted(chances: dict[tuple[str, str], float], names: set[str]) -> dict[str, Any]:
    """Of pairs of these photos; of the pairs of one kind all."""
    same = {pair for pair in chances if any(set(pair) <= group for group in SAME)}
    unclear = {pair for pair in chances if any(set(pair) <= group for group in UNCLEAR)} - same
    other = [pair for pair in chances if pair not in same | unclear and set(pair) <= names]
    values = torch.tensor([chances[pair] for pair in (*same, *other)])
    answer = torch.tensor([True] * len(same) + [False] * len(other))
    return {
        "pairs of other kinds": len(other),
        "of them above 0.5": int((values[~answer] > 0.5).sum()),
        "mean": round(float(values[~answer].mean()), 4),
        "auroc against pairs of one kind": round(auroc(values, answer), 4),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/studies/unlike.json"))
    args = parser.parse_args()
    about = environment(choose_device(None))
    model = DenseFeatures.from_pretrained()
    known = model.reliability
    assert known is not None
    things, rest = files(THINGS), files(NO_THING)
    features = {name: model.extract(path)[0] for name, path in (things | rest).items()}
    weights = dict(zip(("descriptor_weight", "lower_weight"), POINT_WEIGHTS, strict=True))
    sides = {name: prepare(one, **weights) for name, one in features.items()}
    chances = {
        pair: float(known.pair.log_odds(compare(sides[pair[0]], sides[pair[1]]).signs()).sigmoid())
        for pair in combinations(sides, 2)
    }
    matches = match_points(features["astronaut"], features["coffee"], mutual=True)
    assert matches.probability is not None
    metrics = {
        "photos of things": counted(chances, set(things)),
        "with pictures of no thing": counted(chances, set(things | rest)),
        "pairs of one kind": {
            " and ".join(pair): round(chance, 3) for pair, chance in chances.items()
            if any(set(pair) <= group for group in SAME)
        },
        "astronaut and coffee": {
            "related": round(chances["astronaut", "coffee"], 3), "matches": len(matches),
            "above 0.5": int((matches.probability > 0.5).sum()),
        },
        "all above 0.3": {" and ".join(pair): round(chance, 3) for pair, chance in
                          sorted(chances.items(), key=lambda one: -one[1]) if chance > 0.3},
    }  # fmt: skip
    write_json(args.out, {
        "row": "Matches.related of photos unlike all that were fitted on",
        "benchmark": "photos that scikit-image, matplotlib and gradio carry",
        "split": "none was fitted on", "metrics": metrics,
        "config": {"things": sorted(things), "no thing": sorted(rest)},
        "weights_sha256": file_hash(model_folder(None) / WEIGHTS), **about,
    })  # fmt: skip
    print(metrics)


if __name__ == "__main__":
    main()

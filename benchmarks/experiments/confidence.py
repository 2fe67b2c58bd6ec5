"""What confidence knows from one image alone: where objects are, and which places match right.

    python benchmarks/experiments/confidence.py VOC PF-PASCAL --model MODEL
        --out results/studies/confidence.json

Objects: cells inside and outside VOC boxes, on val photos. Matching: places of image 0 on the
object, whose true place in image 1 follows from the common keypoints (thin-plate spline), on
PF-PASCAL development pairs. Rules that need one image stand beside those that need both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial import Delaunay, QhullError
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import environment, write_json
from surefeat.core.geometry import fit_thin_plate
from surefeat.core.image import decode, read_bytes
from surefeat.core.ranking import auroc
from surefeat.data.benchmarks import load_benchmark
from surefeat.data.sources import find_images
from surefeat.match.search import Side, beyond, even_grid, find, prepare, vote
from surefeat.measure.material import Case, FeatureStore, prepare_material
from surefeat.measure.protocol import Protocol
from surefeat.measure.rows import Row, model_row
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

SIDE, STEP = 224, 8
LEAST_POINTS = 4  # a spline through fewer keypoints says little about the places between


def distinctiveness(side: Side) -> Tensor:
    """(T,) in [0, 2]: the peak margin of matching an image with itself.

    1 minus the similarity of the most similar place outside a place's own neighbourhood.
    """
    every = torch.arange(len(side.points), device=side.points.device)
    rows = []
    for part in torch.split(every, max(1, (1 << 23) // len(every))):
        surface = (side.vectors[part] @ side.vectors.T).reshape(-1, *side.size)
        rows.append(1 - beyond(surface, part, side.features.frame.network))
    return torch.cat(rows).clamp_min(0)


def edge_energy(image: Tensor, size: tuple[int, int]) -> Tensor:
    """(3, H, W) uint8 -> (h, w): mean gradient magnitude of the grey image in every cell."""
    grey = image.float().mean(0)
    dy, dx = torch.gradient(grey)
    return F.adaptive_avg_pool2d((dx.square() + dy.square()).sqrt()[None], size)[0]


def object_aurocs(model: DenseFeatures, voc: Path, count: int) -> dict[str, float]:
    """How well each rule ranks cells inside a box before those outside; mean over photos."""
    listed = json.loads((voc / "instances.json").read_text())
    boxes: dict[int, list[list[float]]] = {}
    for each in listed["annotations"]:
        boxes.setdefault(each["image_id"], []).append(each["bbox"])
    chosen = [image for image in listed["images"] if image["voc_split"] == "val"]
    chosen = chosen[:: max(1, len(chosen) // count)][:count]
    places = {Path(item.name).stem: item.read for item in find_images(voc / "*.tar")}
    found: dict[str, list[float]] = {}
    for image in tqdm(chosen, desc="objects"):
        name = image["file_name"]
        place = places[Path(name).stem]
        pixels = decode(read_bytes(place.path, offset=place.offset, size=place.size), name=name)
        (features,) = model.extract([pixels])
        points = even_grid(features, size=tuple(features.uncertainty.shape))
        inside = torch.zeros(len(points), dtype=torch.bool)
        for x, y, width, height in boxes.get(image["id"], []):
            across = (points[:, 0] >= x) & (points[:, 0] < x + width)
            inside |= across & (points[:, 1] >= y) & (points[:, 1] < y + height)
        if inside.all() or not inside.any():
            continue
        height, width = features.frame.original
        middle = points.new_tensor([(width - 1) / 2, (height - 1) / 2])
        rules = {
            "confidence": features.confidence.flatten(),
            "edge energy": edge_energy(pixels, tuple(features.uncertainty.shape)).flatten(),
            "closeness to the centre": -(points - middle).norm(dim=1),
        }
        for name, values in rules.items():
            found.setdefault(name, []).append(auroc(values, inside))
    return {name: float(np.mean(values)) for name, values in found.items()} | {
        "photos": len(found["confidence"])
    }


def on_object(case: Case) -> tuple[Tensor, Tensor]:
    """Places of image 0 within the common keypoints' hull, and where they truly lie in image 1."""
    points0, points1 = (
        case.frame(SIDE, number).to_network(points)
        for number, points in enumerate(case.pair.common())
    )
    steps = torch.arange(STEP / 2 - 0.5, SIDE, STEP)
    grid = torch.cartesian_prod(steps, steps).flip(-1)
    if len(points0) < LEAST_POINTS:
        return grid[:0], grid[:0]
    try:
        inside = torch.from_numpy(Delaunay(points0.numpy()).find_simplex(grid.numpy()) >= 0)
    except QhullError:  # keypoints on one line have no hull
        return grid[:0], grid[:0]
    places = grid[inside]
    return places, fit_thin_plate(points0, points1)(places)


def signs(row: Row, pair: tuple[Features, Features], image0: Tensor, places: Tensor) -> Any:
    """Found places with and without voting, and what each rule says of them."""
    weights = {"descriptor_weight": row.descriptor_weight, "lower_weight": row.lower_weight}
    side0, side1 = (prepare(each, **weights) for each in pair)
    cells = pair[0].cells(places).round().long().clamp(0, pair[0].uncertainty.shape[-1] - 1)
    edges = edge_energy(image0, tuple(pair[0].uncertainty.shape))
    own = distinctiveness(side0).reshape(side0.size)
    fine = ((places + 0.5) * (own.shape[0] / SIDE) - 0.5).round().long().clamp(0, own.shape[0] - 1)
    alone = {
        "confidence (one image)": pair[0].confidence_at(places),
        "edge energy (one image)": edges[cells[:, 1], cells[:, 0]],
        "distinctiveness (one image)": own[fine[:, 1], fine[:, 0]],
    }
    alone["confidence x distinctiveness (one image)"] = (
        alone["confidence (one image)"] * alone["distinctiveness (one image)"]
    )
    for name, votes in (("nearest", None), ("voting", vote(side0, side1, Protocol().voting))):
        peaks = find(side0, side1, places, votes, refine=True, margin=True)
        both = 2 / (
            pair[0].confidence_at(places).reciprocal()
            + pair[1].confidence_at(peaks.points).reciprocal()
        )
        together = {"confidence of both": both, "score": peaks.score, "margin": peaks.margin}
        yield name, peaks.points, alone | together


@torch.no_grad()
def matching(row: Row, data: Path, split: str) -> dict[str, Any]:
    """Share of right matches among all places, and among each rule's best quarter of each pair."""
    protocol = Protocol(measures=("nearest",), shifted_measures=())
    material = prepare_material(
        load_benchmark("pf-pascal", data, split=split), protocol, proposals=Path(), quiet=True
    )
    store = FeatureStore(
        row, material.pictures, protocol, device=torch.device("cpu"), limit=3 << 30
    )
    right: dict[str, list[float]] = {}
    ranks: dict[str, list[float]] = {}
    for case in tqdm(material.cases, desc=split):
        places, truth = on_object(case)
        if len(places) < 8:
            continue
        pair = (store[case.keys[0]], store[case.keys[1]])
        for route, found, rules in signs(row, pair, material.pictures[case.keys[0]], places):
            hit = (found - truth).norm(dim=1) < 0.1 * SIDE
            right.setdefault(f"{route}, all places", []).append(float(hit.float().mean()))
            for name, values in rules.items():
                best = values.topk(len(values) // 4).indices
                right.setdefault(f"{route}, best quarter by {name}", []).append(
                    float(hit[best].float().mean())
                )
                if hit.any() and not hit.all():
                    ranks.setdefault(f"{route}, {name}", []).append(auroc(values, hit))
    return {
        "pairs": len(right["nearest, all places"]),
        "right, percent": {k: 100 * float(np.mean(v)) for k, v in right.items()},
        "auroc within a pair": {k: float(np.mean(v)) for k, v in ranks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("voc", type=Path)
    parser.add_argument("pf_pascal", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("results/studies/confidence.json"))
    options = parser.parse_args()
    row = model_row("ours", options.model, device=torch.device("cpu"))
    model = DenseFeatures.from_pretrained(options.model, device="cpu")
    metrics = {
        "auroc of cells in VOC boxes, val photos": object_aurocs(
            model, options.voc, options.photos
        ),
        "places on the object, PF-PASCAL val": matching(row, options.pf_pascal, "val"),
    }
    result = {
        "row": "ours", "benchmark": "what confidence knows from one image", "split": "val",
        "metrics": metrics, "weights_sha256": row.weights_sha256, **environment("cpu"),
        "config": {"side": SIDE, "step": STEP, "least keypoints": LEAST_POINTS,
                   "right within": "0.1 of the square's side"},
    }  # fmt: skip
    write_json(options.out, result)
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

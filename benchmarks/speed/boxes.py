"""Time per image of the whole route from photo to selected box: results/speed/boxes.json.

    python benchmarks/speed/boxes.py --images FOLDER [--init WEIGHTS] [--count 20]

Stages: reading, proposals (each method), the passes over scales and flips, and the selection. The
hidden layers are random: their time does not depend on what they have learned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from proposals import selective

from surefeat.boxes.config import BoxesConfig, DetectorConfig, SelectConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import Photo
from surefeat.boxes.select import best_boxes, score_photos, select
from surefeat.core.files import choose_device, environment, write_json
from surefeat.core.image import decode
from surefeat.data.sources import PhotoLabels, find_images
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import item_bytes, propose

ROOT = Path(__file__).resolve().parents[2]
CATEGORIES = tuple(f"category {k}" for k in range(12))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of `work`, device synchronised, and its answer."""
    start = time.perf_counter()
    answer = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, answer


def stages(
    options: argparse.Namespace, config: BoxesConfig, detector: Detector
) -> dict[str, float]:
    """Seconds per image of every stage."""
    found = find_images(options.images)
    items = found[:: max(1, len(found) // options.count)][: options.count]
    spent: dict[str, float] = {}
    spent["read"], pixels = timed(
        lambda: [decode(item_bytes(item), name=item.name) for item in items]
    )
    propose(pixels[0], config.proposals)  # compiles
    spent["proposals, prim"], proposals = timed(
        lambda: [propose(image, config.proposals) for image in pixels]
    )
    spent["proposals, selective"], _ = timed(lambda: [selective(image) for image in pixels])
    label = frozenset(CATEGORIES[:1])
    photos = [
        Photo(PhotoLabels(item.name, item, label), image, (image.shape[1], image.shape[2]), each)
        for item, image, each in zip(items, pixels, proposals, strict=True)
    ]
    list(score_photos(detector, photos[:2], scales=config.select.scales[:1]))
    whole = f"{2 * len(config.select.scales)} passes"
    spent[whole], scored = timed(
        lambda: list(score_photos(detector, photos, scales=config.select.scales))
    )

    def choose() -> Any:
        power = config.select.agreement
        found = (best_boxes(each, CATEGORIES, agreement=power) for each in scored)
        return select([best for boxes in found for best in boxes], config.select)

    spent["selection"], _ = timed(choose)
    return {name: round(seconds / len(items), 5) for name, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder or tar shard")
    parser.add_argument("--init", default="none")
    parser.add_argument("--trunk", default="resnet50")
    parser.add_argument("--tap", default="res4f")
    parser.add_argument("--pooled", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--count", type=int, default=20, help="images")
    parser.add_argument("--scales", type=int, nargs="+", default=[480, 576, 688, 864, 1200])
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "speed" / "boxes.json")
    options = parser.parse_args()
    config = BoxesConfig(
        detector=DetectorConfig(
            trunk=options.trunk, tap=options.tap, pooled=options.pooled, hidden=options.hidden
        ),
        proposals=ProposalConfig(count=options.boxes),
        select=SelectConfig(scales=tuple(options.scales)),
    )
    torch.manual_seed(0)
    detector = Detector.create(config.detector, CATEGORIES, init=options.init).eval()
    table = stages(options, config, detector.to(choose_device(options.device)))
    here = environment(choose_device(options.device))
    result = {
        "row": f"{options.trunk} {options.tap}, {options.boxes} boxes", "benchmark": "boxes-speed",
        "split": f"{options.count} images", "metrics": {"seconds per image": table},
        "config": asdict(config), "weights_sha256": None,
        "commit": here["commit"], "hardware": here["hardware"], "date": here["date"],
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    write_json(options.out, result)
    print(table)


if __name__ == "__main__":
    main()

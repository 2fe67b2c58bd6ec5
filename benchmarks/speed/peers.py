"""How long the features of one photo take, beside DINOv2's networks: results/speed/peers.json.

    python benchmarks/speed/peers.py --out results/speed/peers.json

Time only: the peers are built by timm with random weights, which take as long as learned ones. Each
network sees a square photo at sizes it is used at, one after the other in every round, so that a
busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

OURS = {
    "surefeat resnet50, 320 px": ("resnet50", (320,)),
    "surefeat resnet50, 224 and 320 px": ("resnet50", (224, 320)),
    "surefeat vgg16, 320 px": ("vgg16", (320,)),
}
PEERS = {
    "DINOv2 ViT-S/14, 224 px": ("vit_small_patch14_dinov2", 224),
    "DINOv2 ViT-S/14, 518 px": ("vit_small_patch14_dinov2", 518),
    "DINOv2 ViT-B/14, 224 px": ("vit_base_patch14_dinov2", 224),
    "DINOv2 ViT-B/14, 518 px": ("vit_base_patch14_dinov2", 518),
}
"""Name -> network and size; 518 px is what they were last trained at."""
FIRST = next(iter(OURS))

Case = tuple[Callable[[], object], dict[str, float]]


def our_case(name: str, sides: tuple[int, ...], device: torch.device) -> Case:
    model = DenseFeatures.from_pretrained(name, device=device)
    photos = [torch.rand(1, 3, side, side, device=device) for side in sides]
    about = {"cells": (max(sides) // model.stride) ** 2, "megabytes": _size(model)}
    return lambda: [model.forward_with_lower(photo) for photo in photos], about


def peer_case(name: str, side: int, device: torch.device) -> Case:
    model = timm.create_model(name, pretrained=False, img_size=side, num_classes=0)
    model = model.eval().to(device)
    photo = torch.rand(1, 3, side, side, device=device)
    about = {"cells": (side // 14) ** 2, "megabytes": _size(model)}
    return lambda: model.forward_features(photo), about


def _size(model: torch.nn.Module) -> float:
    """Of the weights in half precision, as they are usually stored."""
    return round(2 * sum(each.numel() for each in model.parameters()) / 1e6, 1)


@torch.inference_mode()
def measure(cases: dict[str, Case], *, rounds: int, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of each case, and their ratio to the first in the same round."""
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):  # the first round warms up
        for name, (run, _) in cases.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                spent[name].append(1000 * (time.perf_counter() - start))
    return {
        name: about
        | {
            "ms": round(statistics.median(spent[name]), 1),
            "times the first": round(
                statistics.median(a / b for a, b in zip(spent[name], spent[FIRST], strict=True)), 2
            ),
        }
        for name, (_, about) in cases.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/speed/peers.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device")
    options = parser.parse_args()
    device = choose_device(options.device)
    cases = {name: our_case(*case, device) for name, case in OURS.items()}
    cases |= {name: peer_case(*case, device) for name, case in PEERS.items()}
    found = measure(cases, rounds=options.rounds, device=device)
    for name, row in found.items():
        print(f"{name:36}", row)
    result = {
        "row": "features of one photo", "benchmark": "speed beside peers", "split": "random photos",
        "metrics": found,
        "config": {"rounds": options.rounds, "threads": torch.get_num_threads(),
                   "timm": timm.__version__, "device": str(device)},
        "weights_sha256": {name: file_hash(model_folder(name) / WEIGHTS)
                           for name in ("resnet50", "vgg16")},
        **environment(device),
    }  # fmt: skip
    write_json(options.out, result)


if __name__ == "__main__":
    main()

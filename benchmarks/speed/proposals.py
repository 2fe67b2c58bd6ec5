"""Recall and speed of the proposals on VOC val images, beside OpenCV's selective search.

Run: python benchmarks/speed/proposals.py --data FOLDER [--images 300]
FOLDER holds voc/instances.json and voc/*.tar. Writes results/studies/proposals_recall.json.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import platform
import subprocess
import tarfile
import time
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import box_iou, boxes_from_xywh
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import propose

ROOT = Path(__file__).resolve().parents[2]
SEED = 0
COUNT = 1000
CONFIG = ProposalConfig(count=COUNT)
METHODS = ("prim", "prim_one_thread", "selective")


def selective(image: Tensor) -> Tensor:
    """All boxes of OpenCV's selective search, fast mode, in its own order."""
    search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
    search.setBaseImage(np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1]))
    search.switchToSelectiveSearchFast()
    return boxes_from_xywh(torch.from_numpy(search.process()).float())


def load(folder: Path, count: int, split: str) -> list[tuple[Tensor, Tensor]]:
    """A fixed random subset of the split: images (3, H, W) uint8, boxes that are not difficult."""
    index = json.loads((folder / "instances.json").read_text())
    records = [r for r in index["images"] if r["voc_split"] == split]
    chosen = np.random.default_rng(SEED).choice(len(records), min(count, len(records)), False)
    wanted = {records[i]["file_name"]: records[i]["id"] for i in chosen}
    boxes: dict[int, list[list[float]]] = {}
    for annotation in index["annotations"]:
        if not annotation["difficult"]:
            boxes.setdefault(annotation["image_id"], []).append(annotation["bbox"])
    found = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name in wanted else None
                if file is not None and wanted[member.name] in boxes:
                    pixels = np.array(Image.open(io.BytesIO(file.read())).convert("RGB"))
                    truth = boxes_from_xywh(torch.tensor(boxes[wanted[member.name]]))
                    found.append((torch.from_numpy(pixels).permute(2, 0, 1), truth))
    return found


def recall(best: list[Tensor]) -> dict[str, float]:
    overlaps = torch.cat(best)
    return {f"recall@{t}": round((overlaps >= t).float().mean().item(), 4) for t in (0.5, 0.7)}


def measure(data: list[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """The methods take turns on every image, so that a busy machine slows them all alike."""
    best: dict[str, list[Tensor]] = {}
    seconds = dict.fromkeys(METHODS, 0.0)
    for number, (image, truth) in enumerate(data):
        rows = {}
        for name in seconds:
            threads = torch.get_num_threads()
            torch.set_num_threads(1 if name == "prim_one_thread" else threads)
            start = time.perf_counter()
            rows[name] = selective(image) if name == "selective" else propose(image, CONFIG)
            seconds[name] += time.perf_counter() - start
            torch.set_num_threads(threads)
        every = rows.pop("selective")
        generator = torch.Generator().manual_seed(number)
        shuffled = every[torch.randperm(len(every), generator=generator)]
        rows |= {"selective_first": every[:COUNT], "selective_random": shuffled[:COUNT]}
        for name, boxes in rows.items():
            best.setdefault(name, []).append(box_iou(truth, boxes).amax(1))
    table = {name: recall(overlaps) for name, overlaps in best.items()}
    for name, total in seconds.items():
        table.setdefault(name, {})["seconds_per_image"] = round(total / len(data), 4)
    return table


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "-q", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "uncommitted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SUREFEAT_DATA", "data"))
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--split", default="val")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "studies" / "proposals_recall.json"
    )
    options = parser.parse_args()
    data = load(Path(options.data) / "voc", options.images, options.split)
    propose(data[0][0])
    table = measure(data)
    table["speed_ratio"] = {
        name: round(table["selective"]["seconds_per_image"] / table[name]["seconds_per_image"], 2)
        for name in ("prim", "prim_one_thread")
    }
    objects = sum(len(truth) for _, truth in data)
    result = {
        "row": "Randomized Prim, 1000 boxes",
        "benchmark": "VOC 2012 box recall against selective search (OpenCV, fast mode)",
        "split": f"{options.split}, {len(data)} random images (seed {SEED}), {objects} objects",
        "metrics": table,
        "config": asdict(CONFIG),
        "weights_sha256": None,
        "commit": commit(),
        "hardware": f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
        "date": datetime.date.today().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()

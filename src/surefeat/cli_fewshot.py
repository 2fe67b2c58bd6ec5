"""`surefeat evaluate pascal3d`; heavy imports inside run()."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from surefeat.eval.fewshot_settings import FewShot


@dataclass(frozen=True)
class EvaluateFewShot:
    """Keypoints from a handful of labels: rounds of growing annotation, as in the paper."""

    data: Positional[Path]
    """Folder with keypoints_train.json and keypoints_val.json, or PASCAL3D+'s own release."""
    images: Path | None = None
    """Folder or tar shards with the photos, if not beside the data."""
    rows: tuple[str, ...] = ("ours",)
    """What is measured: ours, resnet50-hc, resnet50-dilated, vgg16, res4c, res4d, or NAME=FOLDER
    for another trained model."""
    model: str | None = None
    """Of the row ours: model or run folder, or a shipped model: resnet50 (default), vgg16."""
    init: tuple[str, ...] = ("imagenet",)
    """ImageNet weights of the untrained rows: imagenet (downloaded), or files, one per trunk."""
    raw: bool = False
    """Leave the activations of untrained rows as they are, instead of unit length per layer."""
    weights: tuple[float, float] = (1.0, 1.0)
    """Of a model's descriptors and lower layer; 0 leaves one out."""
    split: Literal["val", "dev"] = "val"
    """val: train on train, measure on val. dev: both from train, to choose settings on."""
    classes: tuple[str, ...] | None = None
    """Only these, for a small trial; the result's name says so."""
    objects: int | None = None
    """At most so many per class to train and to measure on, for a small trial."""
    settings: Annotated[FewShot, arg(name="")] = field(default_factory=FewShot)
    out: Path = Path("results/pascal3d")
    """Folder for pascal3d-SPLIT-ROW.json, and cache/ for what can be continued."""
    device: str | None = None
    """cuda, cpu, mps; by default the best there is."""
    workers: int = 16
    """Threads that decode photos."""
    json: bool = False
    """Print the metrics as JSON."""

    def run(self) -> None:
        from surefeat.eval.fewshot import evaluate_fewshot

        paths = evaluate_fewshot(
            self.data, images=self.images, rows=self.rows, model=self.model, init=self.init,
            raw=self.raw, weights=self.weights, out=self.out, split=self.split,
            classes=self.classes, objects=self.objects, settings=self.settings,
            device=self.device, workers=self.workers, quiet=self.json,
        )  # fmt: skip
        self._show(paths)

    def _show(self, paths: list[Path]) -> None:
        from surefeat.eval.fewshot_tables import Measure, round_table
        from surefeat.eval.results import read_result
        from surefeat.eval.tables import markdown

        results = [read_result(path) for path in paths]
        if self.json:
            print(json.dumps({result["row"]: result["metrics"] for result in results}))
            return
        measures: tuple[Measure, ...] = ("pck@0.1 bbox", "pck area bbox")
        for measure in measures:
            print(f"{measure}, mean of classes\n\n{markdown(round_table(results, measure))}")
        print("written:", *paths)

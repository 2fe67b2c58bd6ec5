"""`surefeat data` and `surefeat export`: data sets in, models out; heavy imports inside run()."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from surefeat.cli.output import Json, Model, say


@dataclass(frozen=True)
class DataSynthetic:
    """Draw synthetic object categories with their keypoints: a folder to try things on."""

    out: Positional[Path]
    """Folder to write PNGs and keypoints.json (COCO) to."""
    count: int = 240
    """Images."""
    size: int = 128
    """Side of an image, pixels."""
    seed: int = 0
    """Another seed, other instances."""
    json: Json = False

    def run(self) -> None:
        from surefeat.data.drawn import write_folder

        write_folder(self.out, count=self.count, size=self.size, seed=self.seed)
        result = {"images": self.count, "annotations": str(self.out / "keypoints.json")}
        words = f"{self.count} images and keypoints.json in {self.out}"
        say(result, to_script=self.json, words=words)


@dataclass(frozen=True)
class DataGet:
    """Download a public benchmark and unpack it, or learn where to put a copy."""

    name: Positional[Literal["pf-pascal", "pf-willow", "spair", "pascal3d"]]
    """Of the benchmark; its folder is called so too."""
    out: Path = Path("data")
    """Folder that holds data sets."""
    json: Json = False

    def run(self) -> None:
        from surefeat.data.fetch import get

        where = get(self.name, self.out)
        say({"data": str(where)}, to_script=self.json, words=str(where))


@dataclass(frozen=True)
class DataShow:
    """Draw pairs of a benchmark with their keypoints."""

    name: Positional[Literal["pf-pascal", "pf-willow", "spair", "pairs"]]
    """pairs: a CSV list in PF-PASCAL's columns."""
    data: Positional[Path]
    """Folder of the benchmark, or the list."""
    out: Path = Path("pairs.png")
    """Picture to write."""
    images: Path | None = None
    """Where a list finds its images, if not beside it."""
    split: str = "test"
    """Which pairs."""
    count: int = 6
    """How many, spread evenly over the list."""
    json: Json = False

    def run(self) -> None:
        from surefeat.data.benchmarks import load_benchmark
        from surefeat.show.results import keypoint_pairs
        from surefeat.show.style import write_figure

        chosen_from = load_benchmark(self.name, self.data, split=self.split, images=self.images)
        pairs = chosen_from.pairs
        count = min(self.count, len(pairs))
        if count < 1:
            raise ValueError(f"count is {self.count}; draw at least 1 pair")
        chosen = [pairs[i * len(pairs) // count] for i in range(count)]
        write_figure(keypoint_pairs(chosen), self.out)
        result = {"picture": str(self.out), "shown": count, "pairs": len(pairs)}
        words = f"{count} of {len(pairs)} pairs in {self.out}"
        say(result, to_script=self.json, words=words)


@dataclass(frozen=True)
class Data:
    """Make and look at data sets."""

    what: Annotated[
        Annotated[DataSynthetic, subcommand("synthetic")]
        | Annotated[DataGet, subcommand("get")]
        | Annotated[DataShow, subcommand("show")],
        arg(name=""),
    ]


@dataclass(frozen=True)
class Export:
    """Write the extractor, or a keypoint detector, as ONNX (.onnx) or torch.export (.pt2).

    Batch and size of the images stay open.
    """

    path: Positional[Path]
    """File to write; its extension decides."""
    model: Model = None
    detector: Path | None = None
    """Folder of a keypoint detector fitted on that model: it is written with it, as ONNX."""
    json: Json = False

    def run(self) -> None:
        from surefeat.exporting import export, export_detector
        from surefeat.keypoints.detector import KeypointDetector
        from surefeat.model.network import DenseFeatures

        model = DenseFeatures.from_pretrained(self.model, device="cpu")
        if self.detector is None:
            done = export(model, self.path)
        else:
            done = export_detector(KeypointDetector.load(self.detector, model), self.path)
        say(asdict(done) | {"path": str(done.path)}, to_script=self.json)

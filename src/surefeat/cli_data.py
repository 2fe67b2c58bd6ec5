"""`surefeat data`: make, fetch and look at data sets; heavy imports inside run()."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand


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

    def run(self) -> None:
        from surefeat.data.synthetic import write_folder

        write_folder(self.out, count=self.count, size=self.size, seed=self.seed)
        print(f"{self.count} images and keypoints.json in {self.out}")


@dataclass(frozen=True)
class DataGet:
    """Download a public benchmark, checked and resumable, or learn where to put a copy."""

    name: Positional[str]
    """pf-willow, pf-pascal, spair-71k or pascal3d."""
    out: Path = Path("data")
    """Folder that holds data sets."""

    def run(self) -> None:
        from surefeat.data.fetch import get

        print(get(self.name, self.out))


@dataclass(frozen=True)
class DataShow:
    """Draw pairs of a benchmark with their keypoints."""

    name: Positional[Literal["pf-pascal", "pf-willow", "spair", "pairs"]]
    """pairs: a CSV list in PF-PASCAL's columns."""
    data: Positional[Path]
    """Folder of the benchmark, or the list."""
    out: Path = Path("pairs.png")
    """Picture to write."""
    split: str = "test"
    """Which pairs."""
    count: int = 6
    """How many, spread evenly over the list."""

    def run(self) -> None:
        from surefeat.eval.benchmarks import load_benchmark
        from surefeat.viz_results import keypoint_pairs

        pairs = load_benchmark(self.name, self.data, split=self.split).pairs
        count = min(self.count, len(pairs))
        if count < 1:
            raise ValueError(f"count is {self.count}; draw at least 1 pair")
        chosen = [pairs[i * len(pairs) // count] for i in range(count)]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        keypoint_pairs(chosen).savefig(self.out, dpi=150)
        print(f"{count} of {len(pairs)} pairs in {self.out}")


@dataclass(frozen=True)
class Data:
    """Make and look at data sets."""

    what: Annotated[
        Annotated[DataSynthetic, subcommand("synthetic")]
        | Annotated[DataGet, subcommand("get")]
        | Annotated[DataShow, subcommand("show")],
        arg(name=""),
    ]

    def run(self) -> None:
        self.what.run()

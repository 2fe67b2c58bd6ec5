"""Models of the paper's recipe, measured by the paper's own route.

    python benchmarks/experiments/paper_rows.py NAME=FOLDER ... --data PF-PASCAL --proposals FILE
        --out results/pf-pascal [--benchmark pf-willow] [--pairs N]

The package weighs layers as serves what ships; here descriptors and res4c count alike, as printed,
for regions and for points. Train the models by `recipe.py rows`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from surefeat.core.files import choose_device
from surefeat.measure.evaluate import evaluate_rows
from surefeat.measure.rows import Row, model_row

MEASURES = ("regions", "flow", "mean-flow", "published-flow", "nearest", "voting")


def paper_row(name: str, folder: Path) -> Row:
    """A trained model whose descriptors and lower layer count alike."""
    row = model_row(name, folder, device=choose_device(None))
    return replace(row, descriptor_weight=1.0, lower_weight=1.0, region_weights=(1.0, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--benchmark", choices=("pf-pascal", "pf-willow"), default="pf-pascal")
    for name in ("--data", "--proposals", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--pairs", type=int)
    args = parser.parse_args()
    rows = [paper_row(*text.split("=", 1)) for text in args.rows]
    evaluate_rows(
        args.benchmark, args.data, rows=rows, out=args.out, proposals=args.proposals,
        measures=MEASURES, shifted=(), pairs=args.pairs, quiet=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Draws docs/fewshot.png from results/pascal3d: python docs/draw_fewshot.py"""

from __future__ import annotations

from pathlib import Path

from surefeat.measure.tables import read_fewshot
from surefeat.show.curves import fewshot_figure

HERE = Path(__file__).resolve().parent
ROWS = ("ours", "without-confidence", "resnet50-hc", "vgg16", "resnet50-dilated")
"""Others differ from ours by too little to be told apart in a picture."""


def main() -> None:
    results = read_fewshot(HERE.parent / "results" / "pascal3d")
    results = [result for result in results if result["row"] in ROWS]
    fewshot_figure(results).savefig(HERE / "fewshot.png", dpi=120)


if __name__ == "__main__":
    main()

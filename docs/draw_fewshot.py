"""Draws docs/fewshot.png from results/pascal3d: python docs/draw_fewshot.py"""

from __future__ import annotations

from pathlib import Path

from surefeat.eval.fewshot_tables import read_fewshot
from surefeat.viz_fewshot import fewshot_figure

HERE = Path(__file__).resolve().parent


def main() -> None:
    results = read_fewshot(HERE.parent / "results" / "pascal3d")
    fewshot_figure(results).savefig(HERE / "fewshot.png", dpi=120)


if __name__ == "__main__":
    main()

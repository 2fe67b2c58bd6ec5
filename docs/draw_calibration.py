"""Draws docs/calibration.png from results/reliability.json: python docs/draw_calibration.py"""

from __future__ import annotations

import json
from pathlib import Path

from surefeat.show import features as viz

HERE = Path(__file__).resolve().parent


def main() -> None:
    found = json.loads((HERE.parent / "results" / "reliability.json").read_text())
    bins = found["metrics"]["calibration on val"]
    figure = viz.calibration_curve(bins["predicted"], bins["actual"], bins["count"])
    figure.savefig(HERE / "calibration.png", dpi=150)


if __name__ == "__main__":
    main()

"""surefeat.viz: the figures, by one name. Each function returns a matplotlib Figure."""

from __future__ import annotations

from surefeat.show.curves import calibration_curve, loss_surface, training_curves
from surefeat.show.features import channels, confidence_map, pca, pca_colours, views_sheet
from surefeat.show.matches import match_lines, region_matches, warped

__all__ = [
    "calibration_curve", "channels", "confidence_map", "loss_surface", "match_lines", "pca",
    "pca_colours", "region_matches", "training_curves", "views_sheet", "warped",
]  # fmt: skip

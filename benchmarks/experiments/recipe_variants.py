"""What the search for the recipe compares: settings, rows of the tables, ways of matching."""

from __future__ import annotations

from typing import Any

AT_224: dict[str, Any] = {
    "warp.size": 224, "data.side": 256, "loss.ignore_radius": 30.0, "train.steps": 1000,
    "train.decay": "cosine",
}  # fmt: skip
"""What the search began with."""
SHORT = {"train.steps": 500, "train.decay": "constant"}
WIDE = {
    "warp.rotation": 30.0, "warp.linear": 0.5, "warp.translation": 0.5, "warp.zoom": (9 / 8, 9 / 8),
}  # fmt: skip
"""The paper's warps, in the view twice too wide that the search had them in."""

VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "base": AT_224,
    "seed1": AT_224 | {"train.seed": 1},
    "short": AT_224 | SHORT | {"train.batch": 32},
    "zoom-in": AT_224 | {"warp.zoom": (0.5, 1.0)},
    "zoom-wide": AT_224 | {"warp.zoom": (0.5, 1.5)},
    "soft": AT_224 | {"warp.rotation": 8.0, "warp.linear": 0.1, "warp.translation": 0.15},
    "hard": AT_224 | {"warp.rotation": 30.0, "warp.linear": 0.35},
    "view-320": {"train.steps": 1000, "train.decay": "cosine"},
    "view-320-short": SHORT | {"train.batch": 32},
    "channels-256": {"model.channels": 256},
    "ignore-20": {"loss.ignore_radius": 20.0},
    "negatives-100": {"loss.negatives": 100},
    "colour-1": {"colour.strength": 1.0},
    "lr-3e-5": {"train.lr": 3e-5},
    "lr-3e-4": {"train.lr": 3e-4},
    "adagrad": {"train.optimiser": "adagrad", "train.lr": 1e-3},
    "view-384": {"warp.size": 384, "data.side": 448, "loss.ignore_radius": 51.0},
    "boxes": {"images": "boxes"},
    "boxes-96": {"images": "boxes", "min_side": 96},
    "boxes-224": AT_224 | SHORT | {"images": "boxes"},
    "all20": {"images": "all"},
    "wide": WIDE,
    "wide-without-confidence": WIDE | {"loss.kind": "plain"},
    "vgg16": {"images": "all", "model.trunk": "vgg16"},
    "vgg16-head": {"images": "all", "model.trunk": "vgg16", "train.trained": "head"},
    "vgg16-conv5": {"images": "all", "model.trunk": "vgg16-conv5"},
}
"""Name -> what differs from the preset `ours`. images: whole photos of 12 classes, true or weak
boxes, or photos of all classes; min_side: of boxes, as in `find_images`."""

PAPER_SLOW: dict[str, Any] = {
    "preset": "paper", "train.steps": 2000, "loss.sigma_warmup": 1000, "train.lr_warmup": 500,
    "train.lr": 1e-4,
}  # fmt: skip
"""The trunk's rate is a tenth of what is printed; rates rise for 500 steps, sigma waits."""
PAPER_SEED1, PAPER_SEED2 = (PAPER_SLOW | {"train.seed": n} for n in (1, 2))
PAPER_BOXES = PAPER_SLOW | {"images": "boxes"}
PAPER_LONG = PAPER_SLOW | {"train.steps": 6000, "train.compile": "on"}

ROWS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-seed1": {"train.seed": 1},
    "ours-seed2": {"train.seed": 2},
    "without-confidence": {"loss.kind": "plain"},
    "without-confidence-seed1": {"loss.kind": "plain", "train.seed": 1},
    "without-confidence-seed2": {"loss.kind": "plain", "train.seed": 2},
    "contrastive": {"loss.kind": "contrastive"},
    "gtbox": {"images": "boxes"},
    "gtbox-seed1": {"images": "boxes", "train.seed": 1},
    "gtbox-seed2": {"images": "boxes", "train.seed": 2},
    "weakbox": {"images": "weak"},
    "weakbox-seed1": {"images": "weak", "train.seed": 1},
    "weakbox-seed2": {"images": "weak", "train.seed": 2},
    "nonrigid": {"images": "all"},
    "vgg16-ours": {"images": "all", "model.trunk": "vgg16-conv5"},
    "paper-as-printed": {"preset": "paper", "train.steps": 2000},
    "paper": {"preset": "paper", "train.steps": 2000, "loss.sigma_warmup": 1000},
    "paper-without-confidence": {"preset": "paper", "train.steps": 2000, "loss.kind": "plain"},
    "paper-slow": PAPER_SLOW,
    "paper-slow-seed1": PAPER_SEED1,
    "paper-slow-seed2": PAPER_SEED2,
    "paper-slow-without-confidence": PAPER_SLOW | {"loss.kind": "plain"},
    "paper-slow-without-confidence-seed1": PAPER_SEED1 | {"loss.kind": "plain"},
    "paper-slow-without-confidence-seed2": PAPER_SEED2 | {"loss.kind": "plain"},
    "paper-slow-boxes": PAPER_BOXES,
    "paper-slow-boxes-without-confidence": PAPER_BOXES | {"loss.kind": "plain"},
    "paper-long": PAPER_LONG,
    "paper-long-without-confidence": PAPER_LONG | {"loss.kind": "plain"},
}
"""Row -> what differs from the recipe, or from a preset."""

Way = tuple[dict[str, Any], dict[str, Any]]
WAYS: dict[str, Way] = {
    "phi": ({"lower_weight": 0.0}, {}),
    "1:1": ({"descriptor_weight": 1.0}, {}),
    "1/2:1": ({}, {}),
    "as_it_is": ({}, {}),
    "cells_14": ({}, {"pooled_cells": 14}),
    "2:1": ({"descriptor_weight": 2.0}, {}),
    "res4d": ({"descriptor_weight": 1.0, "tap": "res4d"}, {}),
    "res4f": ({"descriptor_weight": 1.0, "tap": "res4f"}, {}),
    "unsure": ({"descriptor_weight": 1.0, "confidence": False}, {}),
    "regions_2:1": ({"descriptor_weight": 1.0, "region_weights": (2.0, 1.0)}, {}),
    "regions_1:2": ({"descriptor_weight": 1.0, "region_weights": (1.0, 2.0)}, {}),
    "mean_1:2": ({"mean_weights": (1.0, 2.0)}, {}),
    "unsure_1/2:1": ({"confidence": False}, {}),
    "cells_56": ({"descriptor_weight": 1.0}, {"pooled_cells": 56}),
    "cells_56_448": ({"descriptor_weight": 1.0}, {"pooled_cells": 56, "inputs": (448,)}),
    "pool3": ({"tap": "pool3"}, {}),
    "320": ({"descriptor_weight": 1.0}, {"inputs": (320,)}),
    "448": ({"descriptor_weight": 1.0}, {"inputs": (448,)}),
    "224+320": ({}, {"inputs": (224, 320)}),
    "224+320+448": ({}, {"inputs": (224, 320, 448)}),
    "224+448": ({"descriptor_weight": 1.0}, {"inputs": (224, 448)}),
    "320+448": ({"descriptor_weight": 1.0}, {"inputs": (320, 448)}),
}
"""Name -> what differs in the row, and in the protocol."""

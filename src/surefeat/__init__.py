"""surefeat: dense visual features with a confidence, learned from unlabelled photos.

Public names are loaded when first used, so that `import surefeat` and `surefeat --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefeat import viz
    from surefeat.core.image import load as load_image
    from surefeat.exporting import export
    from surefeat.keypoints.detector import KeypointDetector
    from surefeat.learn.pretrain import pretrain
    from surefeat.match.dense import match_dense
    from surefeat.match.points import Matches, match_many, match_points
    from surefeat.match.regions import match_regions
    from surefeat.match.relations import relate
    from surefeat.measure.evaluate import evaluate
    from surefeat.model.features import Features
    from surefeat.model.network import DenseFeatures

__version__ = "0.1.0"

_WHERE = {
    "DenseFeatures": ("surefeat.model.network", "DenseFeatures"),
    "Features": ("surefeat.model.features", "Features"),
    "KeypointDetector": ("surefeat.keypoints.detector", "KeypointDetector"),
    "Matches": ("surefeat.match.points", "Matches"),
    "evaluate": ("surefeat.measure.evaluate", "evaluate"),
    "export": ("surefeat.exporting", "export"),
    "load_image": ("surefeat.core.image", "load"),
    "match_dense": ("surefeat.match.dense", "match_dense"),
    "match_many": ("surefeat.match.points", "match_many"),
    "match_points": ("surefeat.match.points", "match_points"),
    "match_regions": ("surefeat.match.regions", "match_regions"),
    "pretrain": ("surefeat.learn.pretrain", "pretrain"),
    "relate": ("surefeat.match.relations", "relate"),
    "viz": ("surefeat.viz", None),
}

__all__ = [
    "DenseFeatures", "Features", "KeypointDetector", "Matches", "evaluate", "export", "load_image",
    "match_dense", "match_many", "match_points", "match_regions", "pretrain", "relate", "viz",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"surefeat has no {name!r}; public names: {', '.join(__all__)}")
    module, attribute = _WHERE[name]
    loaded = import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

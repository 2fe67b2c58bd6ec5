"""surefeat: dense visual features with a confidence, learned from unlabelled photos.

Public names are loaded when first used, so that `import surefeat` and `surefeat --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefeat import viz
    from surefeat.dense import match_dense
    from surefeat.eval.run import evaluate
    from surefeat.exporting import export
    from surefeat.features import Features
    from surefeat.image import load as load_image
    from surefeat.keypoints import KeypointDetector
    from surefeat.match import Matches, match_points
    from surefeat.model import DenseFeatures
    from surefeat.pretraining import pretrain
    from surefeat.regions import match_regions

__version__ = "0.1.0"

_WHERE = {
    "DenseFeatures": ("surefeat.model", "DenseFeatures"),
    "Features": ("surefeat.features", "Features"),
    "KeypointDetector": ("surefeat.keypoints", "KeypointDetector"),
    "Matches": ("surefeat.match", "Matches"),
    "evaluate": ("surefeat.eval.run", "evaluate"),
    "export": ("surefeat.exporting", "export"),
    "load_image": ("surefeat.image", "load"),
    "match_dense": ("surefeat.dense", "match_dense"),
    "match_points": ("surefeat.match", "match_points"),
    "match_regions": ("surefeat.regions", "match_regions"),
    "pretrain": ("surefeat.pretraining", "pretrain"),
    "viz": ("surefeat.viz", None),
}

__all__ = [
    "DenseFeatures", "Features", "KeypointDetector", "Matches", "evaluate", "export", "load_image",
    "match_dense", "match_points", "match_regions", "pretrain", "viz",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"surefeat has no {name!r}; public names: {', '.join(__all__)}")
    module, attribute = _WHERE[name]
    found = import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

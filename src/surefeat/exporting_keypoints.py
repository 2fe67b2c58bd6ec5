"""A keypoint detector with its feature model as one ONNX file.

Input: `crops` (B, 3, S, S) float32 RGB in [0, 1], each an object's box resized to the detector's
S x S pixels. Outputs: `points` (B, K, 2), pixels (x, y) of the crop, centres at integers; `scores`
(B, K) in [0, 1]; `heatmaps` (B, K, h, w). K counts the keypoints of all categories in turn.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from surefeat.exporting import LARGEST, TOLERANCE, Exported, metadata
from surefeat.geometry import grid_to_pixel
from surefeat.keypoint_head import peaks
from surefeat.keypoint_views import side_by_side
from surefeat.keypoints import KeypointDetector
from surefeat.runs import write_bytes

OUTPUTS = ("points", "scores", "heatmaps")


class Finder(nn.Module):
    """Crops (B, 3, S, S) in [0, 1] -> points, scores and heat maps, as tensors."""

    def __init__(self, detector: KeypointDetector) -> None:
        super().__init__()
        self.model, self.head = detector.model, detector.head

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps, lower = self.model.forward_with_lower(crops)
        heat = self.head(side_by_side(maps, lower)).sigmoid()
        cells, scores = peaks(heat)
        return grid_to_pixel(cells, crops.shape[-1] / heat.shape[-1]), scores, heat


@torch.no_grad()
def export_detector(detector: KeypointDetector, path: str | Path) -> Exported:
    """Write a detector as ONNX, any number of crops at once, after a run that compares the two.

    The metadata hold `size` (S) and `categories` (JSON: names and keypoints) beside the model's.
    """
    path = Path(path)
    if path.suffix != ".onnx" or path.is_dir():
        raise ValueError(f"{path}: a detector is written as ONNX; pass a file ending in .onnx")
    side = detector.config.size
    crops = torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    names = json.dumps([asdict(category) for category in detector.categories])
    about = metadata(detector.model) | {"size": str(side), "categories": names}
    # A copy: the caller's detector keeps its device.
    finder = copy.deepcopy(Finder(detector)).cpu().float().eval()
    data, again = _onnx(finder, crops, about)
    difference = _difference(finder(crops), again)
    if not difference <= TOLERANCE:
        what = f"the exported file differs from the detector by {difference:.2g}"
        raise RuntimeError(f"{what}, more than {TOLERANCE:g}; nothing was written to {path}")
    write_bytes(path, data)
    return Exported(path, "onnx", len(data), difference)


def _onnx(finder: Finder, crops: Tensor, about: dict[str, str]) -> tuple[bytes, list[object]]:
    """The file, and what it says of the crops, of which it has seen the first two."""
    try:
        import onnx
        import onnxruntime
        import onnxscript.optimizer
    except ImportError as error:
        fix = "pip install 'surefeat[export]' onnxruntime"
        raise ImportError(f"exporting a detector needs onnx and onnxruntime: {fix}") from error

    batch = {"crops": {0: torch.export.Dim("batch", min=1)}}
    program = torch.onnx.export(
        torch.export.export(finder, (crops[:2],), dynamic_shapes=batch), input_names=["crops"],
        output_names=list(OUTPUTS), dynamo=True, verbose=False,
    )  # fmt: skip
    assert program is not None
    onnxscript.optimizer.optimize_ir(
        program.model, input_size_limit=LARGEST, output_size_limit=LARGEST
    )
    proto = program.model_proto
    onnx.helper.set_model_props(proto, about)
    proto.doc_string = __doc__ or ""
    data: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, session.run(list(OUTPUTS), {"crops": crops.numpy()})


def _difference(mine: tuple[Tensor, ...], other: list[object]) -> float:
    """Largest difference, relative where values exceed 1."""
    pairs = [(each, torch.as_tensor(again)) for each, again in zip(mine, other, strict=True)]
    return max(float(((a - b).abs() / a.abs().clamp_min(1)).max()) for a, b in pairs)

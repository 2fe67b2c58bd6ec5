"""A model as one file for other programs: ONNX (.onnx) or torch.export (.pt2), batch and size open.

Input: `images` (B, 3, H, W) float32 RGB in [0, 1], H and W multiples of the stride. The files
themselves refuse other sizes, and a .pt2 also less than two cells a side. Outputs: `descriptors`
(B, C, h, w), unit length along C; `uncertainty` (B, h, w), sigma; `lower` (B, D, h', w'), unit
length along D. h = H / stride, w = W / stride.

A keypoint detector with its feature model as one ONNX file.

Input: `crops` (B, 3, S, S) float32 RGB in [0, 1], each an object's box resized to the detector's
S x S pixels. Outputs: `points` (B, K, 2), pixels (x, y) of the crop, centres at integers; `scores`
(B, K) in [0, 1]; `heatmaps` (B, K, h, w). K counts the keypoints of all categories in turn.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat import __version__
from surefeat.core.files import write_bytes
from surefeat.core.geometry import grid_to_pixel
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.head import peaks
from surefeat.keypoints.views import side_by_side
from surefeat.model.network import DenseFeatures

Format = Literal["onnx", "pt2"]

Outputs = tuple[Tensor, Tensor, Tensor]

OUTPUTS = ("descriptors", "uncertainty", "lower")

TOLERANCE = 1e-4
"""Largest difference to the model itself that a file may have, relative where values exceed 1."""

LARGEST = 2**31 - 1
"""Bytes of an ONNX file without external data: protobuf has no larger messages."""

ABOUT = "surefeat.json"
"""Extra file of a .pt2 archive that holds what `metadata` says."""

_LOG = logging.getLogger(__name__)

# (batch, rows, columns) in cells: what files are traced with, and what they are checked on.
_TRACED, _CHECKED = (2, 5, 7), ((2, 10, 14), (1, 6, 4), (3, 2, 9))

_INSTALL = "ONNX export needs onnx and onnxscript: pip install 'surefeat[export]'"


@dataclass(frozen=True)
class Exported:
    """The file that was written."""

    path: Path
    format: Format
    bytes: int
    difference: float | None
    """Largest one to the model on sizes it was not traced with; None without onnxruntime."""


class Extractor(nn.Module):
    """Images (B, 3, H, W) in [0, 1] -> descriptors, uncertainty and lower layer, as tensors."""

    def __init__(self, model: DenseFeatures) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Outputs:
        height, width, stride = *images.shape[-2:], self.model.stride
        # Traced, this becomes a condition that torch.export checks at every call.
        if height % stride or width % stride:
            raise ValueError(f"height and width must be multiples of {stride}; resize the images")
        maps, lower = self.model.forward_with_lower(images)
        return maps.descriptors, maps.uncertainty, F.normalize(lower.float(), dim=1)


def export(model: DenseFeatures, path: str | Path, *, format: Format | None = None) -> Exported:  # noqa: A002
    """Write the model as ONNX or torch.export, by the ending of `path` unless `format` says it.

    What was written is run and compared with the model before the file appears; ONNX only where
    onnxruntime is installed.
    """
    path = Path(path)
    kind = format or path.suffix.removeprefix(".")
    if kind not in ("onnx", "pt2"):
        raise ValueError(f"{path}: unknown format; let it end in .onnx or .pt2, or pass format=")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass a file name in it")
    # A copy: the caller's model keeps its device and mode.
    extractor = Extractor(copy.deepcopy(model).cpu().float().eval())
    data = (_onnx if kind == "onnx" else _pt2)(extractor, metadata(model))
    again = _run_onnx(data) if kind == "onnx" else _run_pt2(data)
    difference = None if again is None else _difference(extractor, again)
    if difference is not None and not difference <= TOLERANCE:
        raise RuntimeError(
            f"the exported file differs from the model by {difference:.2g}, more than "
            f"{TOLERANCE:g}; nothing was written to {path}; try the other format"
        )
    write_bytes(path, data)
    return Exported(path, "onnx" if kind == "onnx" else "pt2", len(data), difference)


def metadata(model: DenseFeatures) -> dict[str, str]:
    """What a program needs beside the file. sha256 is that of save_pretrained's weights."""
    from safetensors.torch import save

    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    return {
        "surefeat": __version__,
        "trunk": model.config.trunk,
        "lower": model.config.lower,
        "stride": str(model.stride),
        "longest_side": str(model.config.longest_side),
        "sha256": hashlib.sha256(save(state)).hexdigest(),
    }


@torch.no_grad()
def _trace(extractor: Extractor) -> torch.export.ExportedProgram:
    stride = extractor.model.stride
    batch = torch.export.Dim("batch", min=1)
    # torch.export takes a size of one for a constant, so that open sizes start at two.
    rows, columns = (torch.export.Dim(name, min=2) for name in ("rows", "columns"))
    try:
        return torch.export.export(
            extractor, (_images(_TRACED, stride),),
            dynamic_shapes={"images": {0: batch, 2: stride * rows, 3: stride * columns}},
        )  # fmt: skip
    except Exception as error:  # torch has dozens of kinds for what it cannot trace
        what = f"trunk {extractor.model.config.trunk} cannot be exported"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{what} ({reason}); resnet50, vgg16 and small can be") from error


def _pt2(extractor: Extractor, about: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_trace(extractor), buffer, extra_files={ABOUT: json.dumps(about)})
    return buffer.getvalue()


def _onnx(extractor: Extractor, about: dict[str, str]) -> bytes:
    try:
        import onnx
        import onnxscript.optimizer
    except ImportError as error:
        raise ImportError(_INSTALL) from error

    program = torch.onnx.export(
        _trace(extractor), input_names=["images"], output_names=list(OUTPUTS), dynamo=True,
        verbose=False,
    )  # fmt: skip
    assert program is not None
    # By default only small constants are folded. Without a limit the batch norms, which are scales
    # of the filters already, and the head's padding vanish: plain convolutions remain.
    onnxscript.optimizer.optimize_ir(
        program.model, input_size_limit=LARGEST, output_size_limit=LARGEST
    )
    proto = program.model_proto
    _name_sizes(proto.graph)
    _refuse_other_sizes(proto.graph, extractor.model.stride)
    onnx.helper.set_model_props(proto, about)
    proto.doc_string = __doc__ or ""
    if proto.ByteSize() > LARGEST:
        raise ValueError(f"the model has {proto.ByteSize():,} bytes, too many for ONNX; write .pt2")
    onnx.checker.check_model(proto)
    data: bytes = proto.SerializeToString()
    return data


def _name_sizes(graph: Any) -> None:
    """Words instead of the tracer's symbols for the open sizes."""
    for value in (*graph.input, *graph.output):
        words = {0: "batch", -2: "rows", -1: "columns"}
        if value.name == "images":
            words |= {-2: "height", -1: "width"}
        elif value.name == "lower":
            words |= {-2: "lower_rows", -1: "lower_columns"}
        for axis, word in words.items():
            value.type.tensor_type.shape.dim[axis].dim_param = word
    del graph.value_info[:]  # intermediate sizes, still in the tracer's symbols


def _refuse_other_sizes(graph: Any, stride: int) -> None:
    """Make running the graph fail unless height and width are multiples of the stride.

    ONNX has no assertions. A Reshape that cannot be done stops the run, and the error names the
    node; its sum times zero is added to the images, or else it would be pruned.
    """
    from onnx import helper, numpy_helper

    for node in graph.node:
        node.input[:] = ["checked.images" if name == "images" else name for name in node.input]
    constants = {"first": 0, "cells": [0, 0, -1, stride], "zero": 0.0}
    graph.initializer.extend(
        numpy_helper.from_array(torch.tensor(value).numpy(), f"checked.{name}")
        for name, value in constants.items()
    )
    checks, images = [], "images"
    for side, other_axis in (("height", 3), ("width", 2)):
        made = [f"checked.{side}.{step}" for step in ("line", "cells", "sum", "zero", "images")]
        said = f"{side}_must_be_a_multiple_of_{stride}"
        steps: list[tuple[str, list[str], dict[str, Any]]] = [
            ("Gather", ["images", "checked.first"], {"axis": other_axis}),
            ("Reshape", [made[0], "checked.cells"], {"name": said}),
            ("ReduceSum", [made[1]], {"keepdims": 0}),
            ("Mul", [made[2], "checked.zero"], {}),
            ("Add", [images, made[3]], {}),
        ]
        for (kind, inputs, more), output in zip(steps, made, strict=True):
            checks.append(helper.make_node(kind, inputs, [output], **more))
        images = made[-1]
    checks[-1].output[0] = "checked.images"
    nodes = [*checks, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _run_onnx(data: bytes) -> Callable[[Tensor], Outputs] | None:
    try:
        import onnxruntime
    except ImportError:
        _LOG.warning("onnxruntime is not installed: the file is written unchecked")
        return None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Outputs:
        found = session.run(list(OUTPUTS), {"images": images.numpy()})
        descriptors, uncertainty, lower = (torch.from_numpy(each) for each in found)
        return descriptors, uncertainty, lower

    return run


def _run_pt2(data: bytes) -> Callable[[Tensor], Outputs]:
    return torch.export.load(io.BytesIO(data)).module()


@torch.no_grad()
def _difference(extractor: Extractor, again: Callable[[Tensor], Outputs]) -> float:
    """Largest difference on sizes that the file was not traced with; infinite if shapes differ."""
    worst = 0.0
    for shape in _CHECKED:
        images = _images(shape, extractor.model.stride)
        for mine, other in zip(extractor(images), again(images), strict=True):
            if mine.shape != other.shape:
                return float("inf")
            worst = max(worst, float(((mine - other).abs() / mine.abs().clamp_min(1)).max()))
    return worst


def _images(cells: tuple[int, int, int], stride: int) -> Tensor:
    shape = (cells[0], 3, stride * cells[1], stride * cells[2])
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


DETECTOR_OUTPUTS = ("points", "scores", "heatmaps")


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
    data, again = _detector_onnx(finder, crops, about)
    difference = _detector_difference(finder(crops), again)
    if not difference <= TOLERANCE:
        what = f"the exported file differs from the detector by {difference:.2g}"
        raise RuntimeError(f"{what}, more than {TOLERANCE:g}; nothing was written to {path}")
    write_bytes(path, data)
    return Exported(path, "onnx", len(data), difference)


def _detector_onnx(
    finder: Finder, crops: Tensor, about: dict[str, str]
) -> tuple[bytes, list[object]]:
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
        output_names=list(DETECTOR_OUTPUTS), dynamo=True, verbose=False,
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
    return data, session.run(list(DETECTOR_OUTPUTS), {"crops": crops.numpy()})


def _detector_difference(mine: tuple[Tensor, ...], other: list[object]) -> float:
    """Largest difference, relative where values exceed 1."""
    pairs = [(each, torch.as_tensor(again)) for each, again in zip(mine, other, strict=True)]
    return max(float(((a - b).abs() / a.abs().clamp_min(1)).max()) for a, b in pairs)

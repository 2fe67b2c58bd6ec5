"""A model or a keypoint detector as one file for other programs: ONNX (.onnx), torch.export (.pt2).

A model takes `images` (B, 3, H, W) float32 RGB in [0, 1], batch and size open, H and W multiples of
the stride: a .pt2 refuses others, and less than two cells a side; an .onnx does not check. It gives
`descriptors` (B, C, h, w), unit length along C; `uncertainty` (B, h, w), sigma; `lower`
(B, D, h', w'), unit length along D. h = H / stride, w = W / stride.

A detector takes `crops` (B, 3, S, S) float32 RGB in [0, 1], each an object's box resized to the
detector's S x S pixels. It gives `points` (B, K, 2), pixels (x, y) of the crop, centres at
integers; `scores` (B, K) in [0, 1]; `heatmaps` (B, K, h, w). K counts the keypoints of all
categories in turn.
"""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefeat import __version__
from surefeat.core.files import write_bytes
from surefeat.core.geometry import grid_to_pixel
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.head import peaks
from surefeat.keypoints.views import side_by_side
from surefeat.model.network import DenseFeatures

Format = Literal["onnx", "pt2"]

Outputs = Sequence[Tensor]

Sizes = Mapping[str, Mapping[int, str]]

TOLERANCE = 1e-4
"""Largest difference to the model itself that a file may have, relative where values exceed 1."""

LARGEST = 2**31 - 1
"""Bytes of an ONNX file without external data: protobuf has no larger messages."""

ABOUT = "surefeat.json"
"""Extra file of a .pt2 archive that holds what `metadata` says."""

_LOG = logging.getLogger(__name__)

# (batch, rows, columns) in cells: what files are traced with, and what they are checked on.
_TRACED, _CHECKED = (2, 5, 7), ((2, 10, 14), (1, 6, 4), (3, 2, 9))


# Words for the open sizes of input and outputs in an ONNX file.
_MODEL_SIZES = {
    "images": {0: "batch", 2: "height", 3: "width"},
    "descriptors": {0: "batch", 2: "rows", 3: "columns"},
    "uncertainty": {0: "batch", 1: "rows", 2: "columns"},
    "lower": {0: "batch", 2: "lower_rows", 3: "lower_columns"},
}
_DETECTOR_SIZES = {name: {0: "batch"} for name in ("crops", "points", "scores", "heatmaps")}


@dataclass(frozen=True)
class Exported:
    """The file that was written."""

    path: Path
    format: Format
    bytes: int
    difference: float | None
    """Largest one to the model on inputs it was not traced with; None without onnxruntime."""


class Extractor(nn.Module):
    """Images (B, 3, H, W) in [0, 1] -> descriptors, uncertainty and lower layer, as tensors."""

    def __init__(self, model: DenseFeatures) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        height, width, stride = *images.shape[-2:], self.model.stride
        # Traced, this becomes a condition that torch.export checks at every call.
        if height % stride or width % stride:
            raise ValueError(f"height and width must be multiples of {stride}; resize the images")
        maps, lower = self.model.forward_with_lower(images)
        return maps.descriptors, maps.uncertainty, lower


class Finder(nn.Module):
    """Crops (B, 3, S, S) in [0, 1] -> points, scores and heat maps, as tensors."""

    def __init__(self, detector: KeypointDetector) -> None:
        super().__init__()
        self.model, self.head = detector.model, detector.head

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps, layers = self.model.forward_with_layers(crops)
        heat = self.head(side_by_side(maps, layers)).sigmoid()
        cells, scores = peaks(heat)
        return grid_to_pixel(cells, crops.shape[-1] / heat.shape[-1]), scores, heat


@torch.no_grad()
def export(model: DenseFeatures, path: str | Path) -> Exported:
    """Write the model as ONNX (.onnx) or torch.export (.pt2), by the ending of `path`.

    What was written is run and compared with the model before the file appears; ONNX only where
    onnxruntime is installed.
    """
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"{path}: unknown format; let it end in .onnx or .pt2")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass a file name in it")
    # A copy: the caller's model keeps its device and mode.
    extractor = Extractor(copy.deepcopy(model).cpu().float().eval())
    stride = model.stride
    # torch.export takes a size of one for a constant, so that open sizes start at two.
    rows, columns = (torch.export.Dim(name, min=2) for name in ("rows", "columns"))
    program = _trace(
        extractor, _images(_TRACED, stride), {2: stride * rows, 3: stride * columns},
        name=f"trunk {model.config.trunk}",
    )  # fmt: skip
    examples = [_images(cells, stride) for cells in _CHECKED]
    if path.suffix == ".onnx":
        data = _onnx(program, _MODEL_SIZES, metadata(model))
        return _write(path, "onnx", data, extractor, _run_onnx(data), examples)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={ABOUT: json.dumps(metadata(model))})
    data = buffer.getvalue()
    run = torch.export.load(io.BytesIO(data)).module()
    return _write(path, "pt2", data, extractor, run, examples)


@torch.no_grad()
def export_detector(detector: KeypointDetector, path: str | Path) -> Exported:
    """Write a detector as ONNX, any number of crops at once, compared as `export` does.

    The metadata hold `size` (S) and `categories` (JSON: names and keypoints) beside the model's.
    """
    path = Path(path)
    if path.suffix != ".onnx" or path.is_dir():
        raise ValueError(f"{path}: a detector is written as ONNX; pass a file ending in .onnx")
    side = detector.config.size
    crops = torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    finder = copy.deepcopy(Finder(detector)).cpu().float().eval()
    program = _trace(finder, crops[:2], {}, name="this detector")
    names = json.dumps([asdict(category) for category in detector.categories])
    about = metadata(detector.model) | {"size": str(side), "categories": names}
    data = _onnx(program, _DETECTOR_SIZES, about)
    return _write(path, "onnx", data, finder, _run_onnx(data), [crops])


def metadata(model: DenseFeatures) -> dict[str, str]:
    """What a program needs beside the file.

    sha256: of the weights, see DenseFeatures.weights_hash.
    """
    return {
        "surefeat": __version__,
        "trunk": model.config.trunk,
        "lower": "+".join(model.lower),
        "stride": str(model.stride),
        "longest_side": str(model.config.longest_side),
        "sha256": model.weights_hash(),
    }


def _trace(
    module: nn.Module, example: Tensor, open_sizes: dict[int, Any], *, name: str
) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch", min=1), **open_sizes},)
    try:
        return torch.export.export(module, (example,), dynamic_shapes=shapes)
    except Exception as error:  # torch has dozens of kinds for what it cannot trace
        what = f"{name} cannot be exported ({str(error).strip().splitlines()[0]})"
        raise ValueError(f"{what}; resnet50, vgg16 and small can be") from error


def _onnx(program: torch.export.ExportedProgram, sizes: Sizes, about: dict[str, str]) -> bytes:
    """sizes: by name the open ones of the input, then of the outputs."""
    try:
        import onnx
        import onnxscript.optimizer
    except ImportError as error:
        fix = "pip install 'surefeat[export]'"
        raise ImportError(f"ONNX export needs onnx and onnxscript: {fix}") from error

    given, *outputs = sizes
    made = torch.onnx.export(
        program, input_names=[given], output_names=outputs, dynamo=True, verbose=False
    )
    assert made is not None
    # By default only small constants are folded. Without a limit the batch norms, which are scales
    # of the filters already, and the head's padding vanish: plain convolutions remain.
    onnxscript.optimizer.optimize_ir(
        made.model, input_size_limit=LARGEST, output_size_limit=LARGEST
    )
    proto = made.model_proto
    # Words instead of the tracer's symbols; intermediate sizes, still in symbols, go.
    for value in (*proto.graph.input, *proto.graph.output):
        for axis, word in sizes[value.name].items():
            value.type.tensor_type.shape.dim[axis].dim_param = word
    del proto.graph.value_info[:]
    onnx.helper.set_model_props(proto, about)
    proto.doc_string = __doc__ or ""
    if proto.ByteSize() > LARGEST:
        raise ValueError(f"the model has {proto.ByteSize():,} bytes, too many for ONNX; write .pt2")
    onnx.checker.check_model(proto)
    data: bytes = proto.SerializeToString()
    return data


def _run_onnx(data: bytes) -> Callable[[Tensor], Outputs] | None:
    try:
        import onnxruntime
    except ImportError:
        _LOG.warning("onnxruntime is not installed: the file is written unchecked")
        return None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda x: [torch.as_tensor(out) for out in session.run(None, {given.name: x.numpy()})]


def _write(
    path: Path, kind: Format, data: bytes, module: nn.Module,
    run: Callable[[Tensor], Outputs] | None, examples: Sequence[Tensor],
) -> Exported:  # fmt: skip
    """Write the file if it gives what the module gives on inputs it was not traced with."""
    difference = None
    if run is not None:
        difference = max(_difference(module(x), run(x)) for x in examples)
        if not difference <= TOLERANCE:
            what = f"the exported file differs from the model by {difference:.2g}"
            raise RuntimeError(f"{what}, more than {TOLERANCE:g}; nothing was written to {path}")
    write_bytes(path, data)
    return Exported(path, kind, len(data), difference)


def _difference(mine: Outputs, other: Outputs) -> float:
    """Largest difference, relative where values exceed 1; infinite if shapes differ."""
    if [out.shape for out in mine] != [out.shape for out in other]:
        return float("inf")
    pairs = zip(mine, other, strict=True)
    return max(float(((a - b).abs() / a.abs().clamp_min(1)).max()) for a, b in pairs)


def _images(cells: tuple[int, int, int], stride: int) -> Tensor:
    batch, rows, columns = cells
    shape = (batch, 3, stride * rows, stride * columns)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))

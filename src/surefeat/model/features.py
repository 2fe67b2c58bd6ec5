"""Features of one image: descriptors, confidence, the frame they live in; pooled over boxes.

An image seen in several ways becomes one set of features whose scores are the mean of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import (
    from_dict,
    pack_tensors,
    read_tensor_metadata,
    read_tensors,
    to_dict,
    write_bytes,
)
from surefeat.core.geometry import Frame, cell_centres, clip_boxes, pixel_to_grid, sample
from surefeat.core.image import ImageLike, load

if TYPE_CHECKING:
    from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Reliability, last_channels

Layer = Literal["descriptors", "lower"]

Pooling = Literal["max", "mean"]

# The file says what it is, so that another safetensors file is refused in words.
_FORMAT = "surefeat-features-1"


@dataclass(frozen=True)
class Features:
    """What the network knows of one image; all questions are asked in original pixels."""

    descriptors: Tensor
    """(C, h, w), unit length along C."""
    uncertainty: Tensor
    """(h, w): sigma; small where the descriptor can be trusted."""
    lower: Tensor
    """(D, h', w'): the lower layer matching adds, unit length along D."""
    frame: Frame
    """Original and network size of the image."""
    stride: int
    """Network pixels per cell of `descriptors`."""
    name: str = ""
    """Where the image came from."""
    reliability: Reliability | None = None
    """What the model knows of its own matches; match_points reads it."""
    common: Tensor | None = None
    """(h, w): each cell's highest similarity with the model's cohort, places of other photos, by
    the lower layers alone; None: the model has none."""
    common_kind: Tensor | None = None
    """(h, w): the same by the last of the lower layers, which tells kinds of things."""
    last: int = 0
    """How many channels of `lower` are that layer's, as the cohort says; 0: all."""

    @property
    def confidence(self) -> Tensor:
        """(h, w): 1/sigma, the paper's confidence."""
        return self.uncertainty.reciprocal()

    def cells(self, points: Tensor, *, stride: float | None = None) -> Tensor:
        """Original pixels (..., 2) -> cells (..., 2) of a map with this stride."""
        return pixel_to_grid(self.frame.to_network(points), stride or self.stride)

    def at(self, points: Tensor) -> Tensor:
        """Descriptors at points: (N, 2) original pixels (x, y) -> (N, C), unit length.

        Convention: pixel centres at integers; outside the image the border value is used.
        """
        return F.normalize(self._read(self.descriptors, points), dim=-1)

    def lower_at(self, points: Tensor) -> Tensor:
        """The lower layer at points: (N, 2) original pixels -> (N, D), unit length."""
        return F.normalize(self._read(self.lower, points), dim=-1)

    def kind_at(self, points: Tensor) -> Tensor:
        """The last of the lower layers, which tells kinds of things: (N, 2) -> (N, last)."""
        return last_channels(self.lower_at(points), self.last)

    def confidence_at(self, points: Tensor) -> Tensor:
        """1/sigma at points: (N, 2) original pixels -> (N,)."""
        return self._read(self.uncertainty[None], points)[:, 0].reciprocal()

    def common_at(self, points: Tensor) -> Tensor:
        """`common` at points: (N, 2) original pixels -> (N,)."""
        if self.common is None:
            raise ValueError("the model of these features has no cohort of other photos' places")
        return self._read(self.common[None], points)[:, 0]

    def common_kind_at(self, points: Tensor) -> Tensor:
        """`common_kind` at points: (N, 2) original pixels -> (N,)."""
        if self.common_kind is None:
            raise ValueError("the model of these features has no cohort of other photos' places")
        return self._read(self.common_kind[None], points)[:, 0]

    def layer(self, name: Layer, *, confidence: bool = False) -> Tensor:
        """(C, h, w) or (D, h', w'); with `confidence`, descriptors are scaled by 1/sigma."""
        if name == "lower":
            return self.lower
        return self.descriptors * self.confidence if confidence else self.descriptors

    def pool(
        self,
        boxes: object,
        *,
        size: int = 7,
        layer: Layer = "descriptors",
        confidence: bool = False,
        pooling: Pooling = "max",
    ) -> Tensor:
        """ROI pooling: inclusive boxes (N, 4), original pixels -> (N, C, size, size).

        Convention: see `bin_regions`. With `confidence`, descriptors are scaled by 1/sigma first.
        pooling: a bin keeps the maximum of its cells, or their mean.
        """
        maps = self.layer(layer, confidence=confidence)
        index, bins = bin_regions(self, boxes, size=size, cells=(maps.shape[1], maps.shape[2]))
        pooled = pool_bins(maps, bins, pooling)[index]
        return pooled.transpose(1, 2).reshape(len(index), maps.shape[0], size, size)

    def _read(self, maps: Tensor, points: Tensor) -> Tensor:
        points = points.to(maps.device, torch.float32)
        # A lower layer may be finer than the descriptors; its stride follows from its size.
        stride = self.frame.network[1] / maps.shape[-1]
        return sample(maps[None].float(), self.cells(points, stride=stride)[None])[0]

    def to(self, device: torch.device | str) -> Features:
        """The same features on another device."""
        return replace(
            self,
            descriptors=self.descriptors.to(device),
            uncertainty=self.uncertainty.to(device),
            lower=self.lower.to(device),
            common=None if self.common is None else self.common.to(device),
            common_kind=None if self.common_kind is None else self.common_kind.to(device),
        )

    def save(self, path: str | Path, *, photo: str = "") -> None:
        """Write a .safetensors file in half precision, whole or not at all.

        photo: what `saved_for` gives back, to tell whether the photo is still the same.
        """
        tensors = {
            "descriptors": self.descriptors.half(),
            "uncertainty": self.uncertainty.float(),
            "lower": self.lower.half(),
        }
        for name in ("common", "common_kind"):
            if (values := getattr(self, name)) is not None:
                tensors[name] = values.float()
        about = {"original": self.frame.original, "network": self.frame.network,
                 "stride": self.stride, "name": self.name, "last": self.last,
                 "reliability": self.reliability and to_dict(self.reliability)}  # fmt: skip
        meta = {"format": _FORMAT, "about": json.dumps(about), "photo": photo}
        write_bytes(Path(path), pack_tensors(tensors, meta))

    @staticmethod
    def load(path: str | Path) -> Features:
        """Read what `save` wrote."""
        stored, meta = read_tensors(Path(path))
        if meta.get("format") != _FORMAT:
            raise ValueError(f"{path} holds no surefeat features; write it with Features.save")
        try:
            about = json.loads(meta["about"])
            names = ("descriptors", "uncertainty", "lower")
            descriptors, uncertainty, lower = (stored[name].float() for name in names)
            frame = Frame(tuple(about["original"]), tuple(about["network"]))
            # Files of before the last layer was compared by itself know nothing that holds now.
            known = about.get("reliability") if "last" in about else None
            reliability = None if known is None else from_dict(Reliability, known)
            rest = (frame, about["stride"], about["name"], reliability)
            common, kind = (
                stored[name].float() if name in stored and "last" in about else None
                for name in ("common", "common_kind")
            )
            return Features(
                descriptors, uncertainty, lower, *rest, common=common, common_kind=kind,
                last=about.get("last", 0),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            fix = "write it anew with Features.save"
            raise ValueError(f"{path} holds no whole features ({error!r}); {fix}") from error


def saved_for(path: str | Path) -> str | None:
    """What `Features.save` was told of the photo; None where there is no whole features file."""
    try:
        meta = read_tensor_metadata(Path(path))
    except (ValueError, OSError):
        return None
    return meta.get("photo") if meta.get("format") == _FORMAT else None


def compare_with(cohort: Cohort, features: Features) -> Features:
    """The same features, every cell compared with a cohort of the same model."""
    size = (features.descriptors.shape[1], features.descriptors.shape[2])
    device = features.descriptors.device
    centres = cell_centres(size=size, stride=features.stride, device=device)
    points = features.frame.to_original(centres)
    lower = features.lower_at(points)
    return replace(
        features, common=cohort.nearest(lower).reshape(size),
        common_kind=cohort.nearest_kind(lower).reshape(size), last=cohort.last,
    )  # fmt: skip


def box_cells(boxes: Tensor, sizes: Tensor, shapes: Tensor) -> Tensor:
    """Inclusive boxes (..., R, 4), original pixels -> whole cells (..., R, 4), inclusive, float.

    sizes (..., 2): (height, width) of the originals; shapes (..., 2): rows and columns of the maps
    they fill. Convention: a box's outer edges snap to the nearest cell edges; a box that vanishes
    by this takes the one cell its centre lies in.
    """
    pixels, cells = (t.float().flip(-1)[..., None, :] for t in (sizes, shapes))
    first, last = boxes[..., :2], boxes[..., 2:]
    # Products first: for whole pixels they are exact, and so is what lies on a cell's edge.
    start = (first * cells / pixels + 0.5).floor()
    end = ((last + 1) * cells / pixels + 0.5).floor() - 1
    middle = ((first + last + 1) * cells / (2 * pixels)).floor()
    gone = end < start
    corners = (torch.where(gone, middle, start), torch.where(gone, middle, end))
    return torch.cat([torch.minimum(c.clamp_min(0), cells - 1) for c in corners], dim=-1)


def bin_regions(
    features: Features, boxes: object, *, size: int, cells: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The bins of ROI pooling: index (N, size * size) into the distinct bins (U, 4).

    A bin is y0, y1, x0, x1: the cells y0 <= y < y1, x0 <= x < x1; `cells` are the map's rows
    and columns. On a coarse map many bins coincide, so each is pooled, and multiplied, once.
    Convention: boxes snap to cells as in `box_cells`. Of n cells, bin k of `size` takes
    floor(k n / size) up to ceil((k+1) n / size), so none is empty and neighbours may share a cell.
    """
    original = features.frame.original
    stacked = stack_boxes(boxes, size=original).to(features.descriptors.device)
    snapped = box_cells(stacked, stacked.new_tensor(original), stacked.new_tensor(cells)).long()
    return bins_of_cells(snapped, size=size, cells=cells)


def published_bins(
    features: Features, boxes: object, *, size: int, cells: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The same bins as SCNet's code has them, which the paper was evaluated with.

    Convention: with corners counted from 1, cells round(x1 / stride) - 1 to round(x2 / stride) - 1,
    at least one; what lies outside the map is left out of a bin, which may then be empty.
    """
    (height, width), device = features.frame.original, features.descriptors.device
    stacked = stack_boxes(boxes, size=(height, width)).to(device) + 1
    share = stacked.new_tensor([cells[1] / width, cells[0] / height] * 2)
    snapped = (stacked * share + 0.5).floor().long() - 1
    return bins_of_cells(snapped, size=size, cells=cells)


def bins_of_cells(
    snapped: Tensor, *, size: int, cells: tuple[int, int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Boxes (N, 4) in whole cells, inclusive -> as `bin_regions`; cut to the map's cells."""
    k = torch.arange(size, device=snapped.device)
    start, count = snapped[:, :2, None], (snapped[:, 2:] - snapped[:, :2] + 1)[..., None]
    edges = torch.stack([start + k * count // size, start - (-(k + 1) * count) // size], dim=-1)
    most = torch.tensor([cells[1], cells[0]], device=snapped.device)[:, None, None]
    columns, rows = torch.minimum(edges.clamp_min(0), most).unbind(1)
    rows = rows[:, :, None].expand(-1, -1, size, -1)
    columns = columns[:, None].expand(-1, size, -1, -1)
    every = torch.cat([rows, columns], dim=-1).reshape(-1, 4)
    # One whole number per bin: sorting numbers is far quicker than sorting rows.
    base = max(cells) + 1
    powers = torch.tensor([base**3, base**2, base, 1], device=every.device)
    keys, index = torch.unique((every * powers).sum(-1), return_inverse=True)
    bins = keys[:, None] // powers % base
    return index.reshape(-1, size * size), bins


def pool_bins(maps: Tensor, bins: Tensor, pooling: Pooling = "max") -> Tensor:
    """Maxima or means of maps (C, h, w) over bins (U, 4) of cells -> (U, C), float32.

    An empty bin is 0.
    """
    if pooling not in ("max", "mean"):
        raise ValueError(f"pooling is {pooling!r}; choose 'max' or 'mean'")
    slide = F.max_pool2d if pooling == "max" else F.avg_pool2d
    planes = maps.float()[None].contiguous(memory_format=torch.channels_last)
    if not len(bins):
        return planes.new_empty(0, planes.shape[1])
    # Sorted by size on the host, which waits for the device once and not for every size.
    here = bins.cpu()
    extents = here[:, 1::2] - here[:, ::2]
    kinds, kind_of = torch.unique(extents, dim=0, return_inverse=True)
    order = kind_of.argsort().to(bins.device)
    parts = []
    # Bins have few sizes; a window sliding over all is ten times quicker than reading every cell.
    groups = torch.split(bins[order], kind_of.bincount().tolist())
    for extent, own in zip(kinds.tolist(), groups, strict=True):
        if not min(extent):
            parts.append(planes.new_zeros(len(own), planes.shape[1]))
            continue
        slid = slide(planes, tuple(extent), stride=1)[0].permute(1, 2, 0)
        parts.append(slid[own[:, 0], own[:, 2]])
    sorted_bins = torch.cat(parts)
    return torch.empty_like(sorted_bins).index_copy_(0, order, sorted_bins)


def stack_boxes(boxes: object, *, size: tuple[int, int]) -> Tensor:
    """Boxes as users write them -> (N, 4) float32, inclusive, cut to an image of (height, width).

    Inverted boxes, those wholly outside and those with NaN are an error that names the first.
    """
    tensor = torch.as_tensor(boxes, dtype=torch.float32)
    tensor = tensor.reshape(-1, 4) if tensor.numel() in (0, 4) else tensor
    if tensor.ndim != 2 or tensor.shape[1] != 4:
        raise ValueError(f"boxes must be (N, 4) as x1, y1, x2, y2; got {tuple(tensor.shape)}")
    height, width = size
    x1, y1, x2, y2 = tensor.unbind(-1)
    # Written as what is right, so that NaN is wrong.
    upright = (x1 <= x2) & (y1 <= y2) & tensor.isfinite().all(-1)
    inside = (x2 >= 0) & (y2 >= 0) & (x1 <= width - 1) & (y1 <= height - 1)
    for good, fault in ((upright, "is empty or inverted"), (inside, "lies outside")):
        if not bool(good.all()):
            index = int((~good).nonzero()[0])
            shown = ", ".join(f"{value:g}" for value in tensor[index].tolist())
            raise ValueError(
                f"box {index} ({shown}) {fault}; boxes are x1, y1, x2, y2 with x1 <= x2 and "
                f"y1 <= y2, in pixels of the image, which is {width} x {height} (width x height)"
            )
    return clip_boxes(tensor, size=size)


def stack_points(points: object) -> Tensor:
    """Points as users write them (list, array, tensor) -> (N, 2) float32, or an error."""
    tensor = torch.as_tensor(points, dtype=torch.float32)
    tensor = tensor.reshape(-1, 2) if tensor.numel() in (0, 2) else tensor
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ValueError(f"points must be (N, 2) as x, y in pixels; got {tuple(tensor.shape)}")
    return tensor


def slower_sides(longest_side: int) -> tuple[int, int]:
    """The longest sides at which the slower way sees an image, network pixels."""
    return longest_side, longest_side * 7 // 5


def extract_slowly(
    model: DenseFeatures, images: Sequence[ImageLike], *, longest_side: int, batch: int
) -> list[Features]:
    """Images seen at two sides, each as it is and mirrored, joined."""
    done = list[Features]()
    for start in range(0, len(images), batch):  # so few are held in memory, mirrored
        some, parts = images[start : start + batch], []
        turned = [load(image).flip(-1) for image in some]
        for side in slower_sides(longest_side):
            parts.append(model.extract(some, longest_side=side, batch=batch))
            mirrored = model.extract(turned, longest_side=side, batch=batch)
            parts.append([turn(one) for one in mirrored])
        done += [join_scales(each) for each in zip(*parts, strict=True)]
    return done


def turn(features: Features) -> Features:
    """The maps of a mirrored image, turned to lie where the image as it is has the same things."""
    return replace(
        features, descriptors=features.descriptors.flip(-1),
        uncertainty=features.uncertainty.flip(-1), lower=features.lower.flip(-1),
    )  # fmt: skip


def join_scales(parts: Sequence[Features]) -> Features:
    """Features of one image at several sizes, or turned, -> one, in the frame of the largest.

    Descriptors and lower layers lie side by side, each of equal length, on the finest map among
    them; so an inner product is the mean over the parts. Sigma is the mean too. What a model knows
    of its matches' probability holds for one size, so it is left out.
    """
    if len(parts) == 1:
        return parts[0]
    largest = max(parts, key=lambda part: part.frame.network)
    sigma = _at_one_size([part.uncertainty[None] for part in parts])
    return replace(
        largest,
        descriptors=_side_by_side([part.descriptors for part in parts]),
        uncertainty=torch.stack(sigma).mean(0)[0],
        lower=_side_by_side([part.lower for part in parts]),
        reliability=None,
        common=None,
        common_kind=None,
        last=0,
    )


def _side_by_side(maps: Sequence[Tensor]) -> Tensor:
    """Maps (C_i, h_i, w_i) -> (sum C_i, h, w), unit length along the channels."""
    grown = torch.cat([F.normalize(layer, dim=0) for layer in _at_one_size(maps)])
    return F.normalize(grown, dim=0)


def _at_one_size(maps: Sequence[Tensor]) -> list[Tensor]:
    """Maps (C_i, h_i, w_i) at the size of the finest, bilinear."""
    height, width = max(layer.shape[-2:] for layer in maps)
    return [
        F.interpolate(layer[None], size=(height, width), mode="bilinear", align_corners=False)[0]
        for layer in maps
    ]

"""Boxes that may hold objects, for one image: Randomized Prim, selective search or a grid.

Prim and selective search need OpenCV's contrib modules and numba:
`pip install 'surefeat[proposals]'`. Boxes computed elsewhere serve as well: whatever takes boxes
takes a plain (N, 4) tensor.

One file with the proposals of a benchmark's images, shared by all rows and machines.

Boxes are kept under the hash of the image file's bytes, in quarter pixels: 4 MB for 500 images. A
machine without OpenCV can measure with a file made elsewhere.

The proposals of many images in one compact file, made once, resumable, read anywhere.

Boxes are kept under the hash of the image file's bytes, in whole pixels, compressed: about 4 KB for
1000 boxes. A machine without OpenCV's contrib modules can learn with a file made elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import write_bytes, write_tensors
from surefeat.core.geometry import Frame, clip_boxes
from surefeat.core.image import ImageError, decode, read_bytes
from surefeat.data.items import Item
from surefeat.match.config import ProposalConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

Method = Literal["prim", "selective", "grid"]

CACHE_VERSION = 1
"""Part of every cache key: raised when the same settings begin to give other boxes."""


@dataclass(frozen=True)
class PrimSettings:
    """Randomized Prim: what the sampler's definition leaves free. Tuned on VOC train images."""

    side: int = 320
    """Longest side of the image that is segmented, px; larger ones are shrunk. 256 loses 3 recall
    at 0.5."""
    sigma: float = 0.8
    """Blur before the segmentation, px (Manen et al.)."""
    scale: float = 100.0
    """k of the graph segmentation (Manen et al.)."""
    smallest: int = 50
    """Smallest superpixel, px of the shrunk image; Manen et al. have 100 at full size."""
    draws: int = 2500
    """Trees per colour space. 1,500 instead of 1,000 gained 2 points of recall at 0.5."""
    border: float = 0.0
    """Boxes that reach into this outer share of the image are dropped. Proposal Flow drops 0.01; on
    VOC, where the frame cuts many objects, that costs 11 points of recall at 0.5, 20 at 0.7."""
    overlaps: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)
    """The boxes are kept coarse to fine (prim.spread); (1.0,) keeps them simply at random."""


@dataclass(frozen=True)
class GridSettings:
    """A plain grid of boxes."""

    scales: tuple[float, ...] = (0.1, 0.2, 0.35, 0.55, 0.8)
    """Square root of a box's share of the image."""
    aspects: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Width over height, relative to the image's own."""
    step: float = 0.3
    """Distance of neighbours in box sides."""


PRIM, GRID = PrimSettings(), GridSettings()


def propose(
    image: Tensor,
    *,
    method: Method = "prim",
    count: int = 1000,
    seed: int = 0,
    cache: Path | None = None,
    prim: PrimSettings = PRIM,
    grid: GridSettings = GRID,
) -> Tensor:
    """Image (3, H, W) uint8 RGB -> at most `count` different boxes (N, 4) float32, N >= 1.

    Fewer come back where fewer can be found. An image without structure, down to a single pixel,
    gives the box of the whole image. `cache` is a folder: the boxes are kept there under a hash of
    the image and the settings. The same seed gives the same boxes.
    Convention: inclusive boxes in the image's pixels.
    """
    if image.dim() != 3 or image.shape[0] != 3 or image.dtype != torch.uint8 or not image.numel():
        raise ValueError(
            f"an image is (3, H, W) uint8, got {tuple(image.shape)} {image.dtype};"
            " load it with surefeat.load_image or repeat a grey channel three times"
        )
    if method not in ("prim", "selective", "grid") or count < 1:
        raise ValueError(
            f"method {method!r}, count {count}: use prim, selective or grid and 1 or more"
        )
    settings = {"prim": asdict(prim), "grid": asdict(grid), "selective": {}}[method]
    key = {"version": CACHE_VERSION, "method": method, "count": count, "seed": seed, **settings}
    path = None if cache is None else cache / f"{_content_hash(image, key)}.safetensors"
    if path is not None and path.exists():
        return _load(path)
    if method == "prim":
        boxes = _prim(image, count, seed, prim)
    elif method == "selective":
        boxes = _selective(image, count)
    else:
        boxes = _grid((image.shape[1], image.shape[2]), count, seed, grid)
    if path is not None:
        _save(boxes, path)
    return boxes


def _prim(image: Tensor, count: int, seed: int, settings: PrimSettings) -> Tensor:
    import numpy as np

    cv2 = _contrib()
    from surefeat.match import prim

    pixels = np.ascontiguousarray(image.cpu().permute(1, 2, 0).numpy())
    height, width = pixels.shape[:2]
    shrink = min(1.0, settings.side / max(height, width))
    small = (max(1, round(height * shrink)), max(1, round(width * shrink)))
    if small != (height, width):
        pixels = cv2.resize(pixels, small[::-1], interpolation=cv2.INTER_AREA)
    spaces = _colour_spaces(pixels)

    def draw(index: int) -> NDArray[np.int64]:
        segmentation = cv2.ximgproc.segmentation.createGraphSegmentation(
            settings.sigma, settings.scale, settings.smallest
        )
        graph = prim.build_graph(segmentation.processImage(spaces[index]), spaces[0])
        return prim.draw(graph, settings.draws, np.random.default_rng([seed, index]))

    with ThreadPoolExecutor(min(len(spaces), torch.get_num_threads())) as pool:
        drawn = np.concatenate(list(pool.map(draw, range(len(spaces)))))
    boxes = _without_border(_distinct(drawn), small, settings.border).astype(np.float64)
    boxes = np.random.default_rng([seed, len(spaces)]).permutation(boxes)
    boxes = boxes[prim.spread(boxes, np.array(settings.overlaps), count)]
    # From the shrunk image's pixels back to the original's: the outer edges are mapped.
    back = Frame(original=small, network=(height, width))
    return back.boxes_to_network(torch.from_numpy(boxes)).float()


def _colour_spaces(pixels: Pixels) -> list[Pixels]:
    """RGB (H, W, 3) -> Lab, opponent, rg + intensity and HSV, each (H, W, 3) in 0..255."""
    import cv2
    import numpy as np

    red, green, blue = (pixels[..., i].astype(np.float32) for i in range(3))
    total = red + green + blue
    opponent = [(red - green) / 2 + 127.5, (red + green - 2 * blue) / 4 + 127.5, total / 3]
    chroma = [255 * red / np.maximum(total, 1), 255 * green / np.maximum(total, 1), total / 3]
    return [
        np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2LAB), dtype=np.uint8),
        np.stack(opponent, axis=-1).astype(np.uint8),
        np.stack(chroma, axis=-1).astype(np.uint8),
        np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL), dtype=np.uint8),
    ]


def _distinct(boxes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every box once, sorted. One number per box sorts ten times as fast as rows do."""
    import numpy as np

    keys = np.unique(boxes @ (1 << np.array([48, 32, 16, 0])))
    unpacked: NDArray[np.int64] = (keys[:, None] >> np.array([48, 32, 16, 0])) & 0xFFFF
    return unpacked


def _without_border(
    boxes: NDArray[np.int64], size: tuple[int, int], share: float
) -> NDArray[np.int64]:
    """Boxes clear of the outer share of the image; all of them if none is, or if share is 0."""
    height, width = size
    left, top = share * width, share * height
    clear = (boxes[:, 0] >= left) & (boxes[:, 1] >= top)
    clear &= (boxes[:, 2] <= width - 1 - left) & (boxes[:, 3] <= height - 1 - top)
    return boxes[clear] if share > 0 and clear.any() else boxes


def _selective(image: Tensor, count: int) -> Tensor:
    """OpenCV's selective search, fast mode; the first `count` in its own order."""
    import numpy as np

    search = _contrib().ximgproc.segmentation.createSelectiveSearchSegmentation()
    search.setBaseImage(np.ascontiguousarray(image.cpu().permute(1, 2, 0).numpy()[..., ::-1]))
    search.switchToSelectiveSearchFast()
    x, y, width, height = torch.from_numpy(search.process()[:count]).float().unbind(-1)
    return torch.stack([x, y, x + width - 1, y + height - 1], dim=-1)


def _grid(size: tuple[int, int], count: int, seed: int, settings: GridSettings) -> Tensor:
    """Boxes of every scale and aspect at regular steps; `count` at random if there are more."""
    height, width = size
    found = []
    for scale in settings.scales:
        for aspect in settings.aspects:
            sides = (scale * width * aspect**0.5, scale * height / aspect**0.5)
            w, h = (max(1, min(n, round(s))) for n, s in zip((width, height), sides, strict=True))
            spots = [
                torch.linspace(0, n - s, 1 + max(0, round((n - s) / (settings.step * s)))).round()
                for n, s in ((width, w), (height, h))
            ]
            corners = torch.cartesian_prod(*spots)
            found.append(torch.cat([corners, corners + torch.tensor([w - 1.0, h - 1.0])], dim=1))
    boxes: Tensor = torch.unique(torch.cat(found), dim=0)
    order = torch.randperm(len(boxes), generator=torch.Generator().manual_seed(seed))
    return boxes[order[:count]]


def _contrib() -> Any:
    """OpenCV with its contrib modules, and numba, or an error that says how to get them."""
    try:
        import cv2
        import numba  # noqa: F401

        cv2.ximgproc.segmentation  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "proposals need numba and OpenCV's contrib modules: pip install 'surefeat[proposals]'"
            " (a plain opencv-python beside it hides the contrib modules: uninstall that one);"
            " method='grid' needs neither"
        ) from error
    return cv2


def _content_hash(image: Tensor, settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([list(image.shape), settings], sort_keys=True).encode())
    digest.update(image.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _load(path: Path) -> Tensor:
    from safetensors.torch import load_file

    boxes: Tensor = load_file(path)["boxes"]
    return boxes


def _save(boxes: Tensor, path: Path) -> None:
    write_tensors(path, {"boxes": boxes})


_BENCHMARK_FORMAT = "surefeat-proposals-1"

_PARTS = 4  # of a pixel

_BENCHMARK_SAVE_EVERY = 50


@dataclass(frozen=True)
class ProposalSettings:
    """Which proposals; the same for all rows (method, section 3)."""

    count: int = 1000
    """Randomized Prim boxes per image [P]."""
    seed: int = 0
    """Of their drawing."""

    def text(self) -> str:
        """All that decides the boxes."""
        return json.dumps(
            {"version": CACHE_VERSION, "method": "prim", **asdict(self), **asdict(PRIM)},
            sort_keys=True,
        )


def proposals_of(
    images: Iterable[Path], settings: ProposalSettings, *, file: Path, quiet: bool = False
) -> dict[Path, Tensor]:
    """Boxes (N, 4) float32 of every image, inclusive, original pixels.

    What `file` lacks is computed and added to it, every 50 images, so it can be interrupted.
    """
    known = load_file(file, settings) if file.exists() else {}
    paths = sorted(set(images))
    content = {path: read_bytes(path) for path in paths}
    keys = {path: hashlib.sha256(content[path]).hexdigest()[:32] for path in paths}
    missing = [path for path in paths if keys[path] not in known]
    bar = tqdm(missing, desc="proposals", disable=quiet or not missing, leave=False)
    for number, path in enumerate(bar, start=1):
        pixels = decode(content[path], name=str(path))
        boxes = propose(pixels, count=settings.count, seed=settings.seed)
        known[keys[path]] = (boxes * _PARTS).round() / _PARTS
        if number % _BENCHMARK_SAVE_EVERY == 0 or number == len(missing):
            save_file(known, settings, file)
    return {path: known[keys[path]] for path in paths}


def load_file(file: Path, settings: ProposalSettings) -> dict[str, Tensor]:
    """Hash of an image file -> boxes; ValueError if the file is of other settings."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it and run again") from error
    if about.get("format") != _BENCHMARK_FORMAT:
        raise ValueError(f"{file} holds no proposals; pass a file that surefeat evaluate wrote")
    if about.get("settings") != settings.text():
        raise ValueError(
            f"{file} holds proposals of other settings ({about.get('settings')}); pass another "
            "--proposals file or the same count and seed"
        )
    return {key: boxes.float() / _PARTS for key, boxes in found.items()}


def save_file(boxes: dict[str, Tensor], settings: ProposalSettings, file: Path) -> None:
    """Write all boxes, whole or not at all."""
    from safetensors.torch import save

    packed = {}
    for key, found in sorted(boxes.items()):
        parts = (found * _PARTS).round()
        fits = bool(parts.abs().max() < torch.iinfo(torch.int16).max)
        packed[key] = parts.to(torch.int16 if fits else torch.int32).contiguous()
    write_bytes(file, save(packed, {"format": _BENCHMARK_FORMAT, "settings": settings.text()}))


_FORMAT = "surefeat-box-proposals-1"

_SAVE_EVERY = 200


def propose_for(image: Tensor, config: ProposalConfig) -> Tensor:
    """Image (3, H, W) uint8 -> its boxes (N, 4), in whole pixels, as the file keeps them."""
    boxes = propose(image, method=config.method, count=config.count, seed=config.seed)
    return clip_boxes(boxes.round(), size=(image.shape[1], image.shape[2]))


def item_bytes(item: Item) -> bytes:
    """The bytes of an item's image file."""
    place = item.read
    if place.refused:
        raise ImageError(f"{item.name}: {place.refused}")
    return read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)


def key_of(content: bytes) -> str:
    """What an image's proposals are kept under."""
    return hashlib.sha256(content).hexdigest()[:32]


def make_proposals(
    items: Sequence[Item],
    config: ProposalConfig,
    *,
    file: Path,
    workers: int = 2,
    quiet: bool = False,
) -> int:
    """Add to `file` the proposals it lacks, saving every 200 images; -> how many were added.

    Images that cannot be read are left out: reading them later says why.
    """
    known = read_proposals(file, config) if file.exists() else {}

    def work(item: Item) -> tuple[str, Tensor | None]:
        try:
            content = item_bytes(item)
            key = key_of(content)
            if key in known:
                return key, None
            return key, propose_for(decode(content, name=item.name), config)
        except ImageError:
            return "", None

    added = 0
    with ThreadPoolExecutor(workers) as pool:
        # In short lists, so that an interruption need not wait for all that is queued.
        bar = tqdm(total=len(items), desc="proposals", unit="img", disable=quiet)
        for start in range(0, len(items), _SAVE_EVERY):
            part = items[start : start + _SAVE_EVERY]
            done = {key: found for key, found in pool.map(work, part) if found is not None}
            known.update(done)
            added += len(done)
            bar.update(len(part))
            if done:
                write_proposals(known, config, file)
        bar.close()
    return added


def write_proposals(found: dict[str, Tensor], config: ProposalConfig, file: Path) -> None:
    """Write all proposals, whole or not at all."""
    keys = sorted(found)
    boxes = [found[key] for key in keys]
    stacked = torch.cat([torch.zeros(0, 4), *boxes]).round().numpy()
    arrays: dict[str, Any] = {
        "format": np.array(_FORMAT), "settings": np.array(settings_text(config)),
        "keys": np.array(keys, dtype="U32"), "counts": np.array([len(b) for b in boxes], np.int32),
        # Column by column: neighbours are alike, which compresses better.
        "boxes": np.ascontiguousarray(stacked.T.astype(np.uint16)),
    }  # fmt: skip
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes(file, buffer.getvalue())


def read_proposals(file: Path, config: ProposalConfig | None = None) -> dict[str, Tensor]:
    """Hash of an image file -> its boxes (N, 4) float32, inclusive, original pixels.

    ValueError if they are of other settings.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no proposals at {file}; make them with `surefeat boxes propose`")
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
        if str(arrays["format"]) != _FORMAT:
            raise KeyError("format")
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file} is damaged or holds no proposals ({error}); remove it and run again"
        ) from error
    said = str(arrays["settings"])
    if config is not None and said != settings_text(config):
        raise ValueError(
            f"{file} holds proposals of other settings ({said}); pass another --proposals-file, or "
            "the same method, count and seed"
        )
    ends = np.cumsum(arrays["counts"])[:-1].tolist()
    boxes = torch.from_numpy(arrays["boxes"].astype(np.float32).T.copy()).tensor_split(ends)
    keys = [str(key) for key in arrays["keys"]]
    return dict(zip(keys, boxes, strict=True))


def settings_text(config: ProposalConfig) -> str:
    """All that decides the boxes."""
    return json.dumps({"version": CACHE_VERSION, **asdict(config)}, sort_keys=True)

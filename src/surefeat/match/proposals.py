"""Boxes that may hold objects: made for an image, kept for many in one file.

Randomized Prim needs OpenCV's contrib modules and numba: `pip install 'surefeat[proposals]'`. The
file is an SQLite database that grows by what is added, so making it can be interrupted; it holds
its settings, and a machine without OpenCV can read it.

Convention: inclusive boxes (N, 4), x1, y1, x2, y2, original pixels of the image.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import check_settings, to_dict
from surefeat.core.geometry import Frame
from surefeat.core.image import ImageError, decode, decoded, image_threads, problem, read_bytes
from surefeat.data.decode import Item, Place
from surefeat.match.config import ProposalConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

DEFAULT = ProposalConfig()

_FORMAT = "surefeat-proposals-2"

# Raised when the same settings begin to give other boxes.
_VERSION = 1

_PARTS = 4  # of a pixel: what the file keeps

_SAVE_EVERY = 50


def propose(image: Tensor, config: ProposalConfig = DEFAULT) -> Tensor:
    """Image (3, H, W) uint8 RGB -> at most `config.count` different boxes (N, 4) float32, N >= 1.

    Fewer come back where fewer can be found. An image without structure, down to a single pixel,
    gives the box of the whole image. The same seed gives the same boxes.
    """
    if image.dim() != 3 or image.shape[0] != 3 or image.dtype != torch.uint8 or not image.numel():
        raise ValueError(
            f"an image is (3, H, W) uint8, got {tuple(image.shape)} {image.dtype};"
            " load it with surefeat.load_image or repeat a grey channel three times"
        )
    _check_settings(config)
    cv2 = _contrib()
    from surefeat.match import prim

    pixels = np.ascontiguousarray(image.cpu().permute(1, 2, 0).numpy())
    height, width = pixels.shape[:2]
    shrink = min(1.0, config.side / max(height, width))
    small = (max(1, round(height * shrink)), max(1, round(width * shrink)))
    if small != (height, width):
        pixels = cv2.resize(pixels, small[::-1], interpolation=cv2.INTER_AREA)
    spaces = _colour_spaces(pixels)

    def draw(index: int) -> NDArray[np.int64]:
        segmentation = cv2.ximgproc.segmentation.createGraphSegmentation(
            config.blur, config.scale, config.superpixel
        )
        graph = prim.build_graph(segmentation.processImage(spaces[index]), spaces[0])
        return prim.draw(graph, config.draws, np.random.default_rng([config.seed, index]))

    with ThreadPoolExecutor(min(len(spaces), torch.get_num_threads())) as pool:
        drawn = np.concatenate(list(pool.map(draw, range(len(spaces)))))
    boxes = _distinct(drawn).astype(np.float64)
    boxes = np.random.default_rng([config.seed, len(spaces)]).permutation(boxes)
    boxes = boxes[prim.spread(boxes, np.array(config.overlaps), config.count)]
    # From the shrunk image's pixels back to the original's: the outer edges are mapped.
    back = Frame(original=small, network=(height, width))
    return back.boxes_to_network(torch.from_numpy(boxes)).float()


def _check_settings(config: ProposalConfig) -> None:
    least = dict.fromkeys((f"proposals.{n}" for n in ("count", "side", "draws", "superpixel")), 1)
    most = {"proposals.side": 32_767, "proposals.blur": 100, "proposals.draws": 1_000_000}
    check_settings(config, least=least, most=most, above="proposals.")


def _colour_spaces(pixels: Pixels) -> list[Pixels]:
    """RGB (H, W, 3) -> Lab, opponent, rg + intensity and HSV, each (H, W, 3) in 0..255."""
    import cv2

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
    keys = np.unique(boxes @ (1 << np.array([48, 32, 16, 0])))
    unpacked: NDArray[np.int64] = (keys[:, None] >> np.array([48, 32, 16, 0])) & 0xFFFF
    return unpacked


def _contrib() -> Any:
    """OpenCV with its contrib modules, and numba, or an error that says how to get them."""
    try:
        import cv2
        import numba  # noqa: F401

        cv2.ximgproc.segmentation  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "proposals need numba and OpenCV's contrib modules: pip install 'surefeat[proposals]'"
            " (a plain opencv-python beside it hides the contrib modules: uninstall that one)"
        ) from error
    return cv2


def item_bytes(item: Item) -> bytes:
    """The bytes of an item's image file."""
    place = item.read
    if place.refused:
        raise problem(item.name, place.refused)
    return read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)


def key_of(content: bytes) -> str:
    """What an image's proposals are kept under: it finds them again under any name."""
    return hashlib.sha256(content).hexdigest()[:32]


def make_proposals(
    items: Sequence[Item],
    config: ProposalConfig,
    *,
    file: Path,
    workers: int = 2,
    quiet: bool = False,
) -> int:
    """Add to `file` the proposals it lacks, saving every 50 images; -> how many were added.

    Images that cannot be read are left out: reading them later says why.
    """
    _check_settings(config)
    if workers < 1:
        raise ValueError(f"workers is {workers}; use at least 1")
    with _opened(file, config, write=True) as store:
        known = {key for (key,) in store.execute("SELECT image FROM proposals")}

    def work(item: Item) -> tuple[str, Tensor | None]:
        try:
            content = item_bytes(item)
            key = key_of(content)
            if key in known:
                return key, None
            with decoded(content, name=item.name) as pixels:
                return key, propose(pixels, config)
        except ImageError:
            return "", None

    added = 0
    bar = progress.bar(total=len(items), desc="proposals", unit="img", quiet=quiet, leave=False)
    with image_threads(workers) as pool, bar:
        # In short lists, so that an interruption need not wait for all that is queued.
        for start in range(0, len(items), _SAVE_EVERY):
            part = items[start : start + _SAVE_EVERY]
            made = {key: boxes for key, boxes in pool.map(work, part) if boxes is not None}
            if made:
                write_proposals(made, config, file)
            known.update(made)
            added += len(made)
            bar.update(len(part))
    return added


def proposals_of(
    images: Iterable[Path], config: ProposalConfig, *, file: Path, quiet: bool = False
) -> dict[Path, Tensor]:
    """Boxes (N, 4) of every image file; what `file` lacks is made and added to it."""
    paths = sorted(set(images))
    items = [Item(str(path), Place(str(path))) for path in paths]
    make_proposals(items, config, file=file, quiet=quiet)
    known = read_proposals(file, config)
    boxes = {}
    for path in paths:
        content = read_bytes(path)
        if key_of(content) not in known:
            decode(content, name=str(path))  # says what is wrong with it
        boxes[path] = known[key_of(content)]
    return boxes


def write_proposals(boxes: Mapping[str, Tensor], config: ProposalConfig, file: Path) -> None:
    """Add boxes (N, 4) by the key of their image, all or none; quarter pixels are kept."""
    # Column by column: neighbours are alike, which compresses better.
    columns = {k: (b.double() * _PARTS).round().numpy().T.astype("<i4") for k, b in boxes.items()}
    rows = [(key, zlib.compress(parts.tobytes())) for key, parts in columns.items()]
    with _opened(file, config, write=True) as store, store:
        store.executemany("INSERT OR REPLACE INTO proposals VALUES (?, ?)", rows)


def read_proposals(file: Path, config: ProposalConfig | None = None) -> dict[str, Tensor]:
    """Key of an image -> its boxes (N, 4) float32; ValueError if they are of other settings."""
    if not file.is_file():
        raise FileNotFoundError(f"no proposals at {file}; make them with `surefeat boxes propose`")
    boxes = {}
    with _opened(file, config) as store:
        for key, packed in store.execute("SELECT image, boxes FROM proposals"):
            parts = np.frombuffer(zlib.decompress(packed), "<i4").reshape(4, -1).T
            boxes[key] = torch.from_numpy(parts.astype(np.float32) / _PARTS)
    return boxes


@contextmanager
def _opened(
    file: Path, config: ProposalConfig | None, *, write: bool = False
) -> Iterator[sqlite3.Connection]:
    """The file's connection, after a check of its settings; to write, a missing file is begun."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(file))
    if write:
        file.parent.mkdir(parents=True, exist_ok=True)
    place = file.absolute().as_uri() + ("" if write else "?mode=ro")
    try:
        # Others that write at the same time are waited for.
        with closing(sqlite3.connect(place, uri=True, timeout=60)) as store:
            if write and config is not None:
                _begin(store, config)
            _check(store, config, file)
            yield store
    except (sqlite3.Error, zlib.error, TypeError) as error:
        if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
            raise OSError(f"{file}: {error}; is the disk full, or the file in use?") from error
        raise ValueError(
            f"{file} is damaged or holds no proposals ({error}); remove it, or pass another file"
        ) from error


def _begin(store: sqlite3.Connection, config: ProposalConfig) -> None:
    """Give a new file its tables and settings, all or none."""
    with store:
        store.execute("BEGIN IMMEDIATE")
        if store.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            store.execute("CREATE TABLE about (format TEXT, settings TEXT)")
            store.execute("CREATE TABLE proposals (image TEXT PRIMARY KEY, boxes BLOB)")
            store.execute("INSERT INTO about VALUES (?, ?)", (_FORMAT, settings_text(config)))


def _check(store: sqlite3.Connection, config: ProposalConfig | None, file: Path) -> None:
    kind, said = store.execute("SELECT format, settings FROM about").fetchone() or ("", "")
    if kind != _FORMAT:
        raise ValueError(f"{file} holds proposals of another version; remove it and run again")
    if config is not None and said != settings_text(config):
        raise ValueError(
            f"{file} holds proposals of other settings ({said}); pass another file for these, or "
            "the same settings"
        )


def settings_text(config: ProposalConfig) -> str:
    """All that decides the boxes."""
    return json.dumps({"version": _VERSION, **to_dict(config)}, sort_keys=True)

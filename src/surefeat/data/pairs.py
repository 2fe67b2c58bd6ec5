"""Pairs of images with common keypoints, and the list format they are read from.

Convention: points are (x, y) in the image's own original pixels, pixel centres at integers, the
first pixel 0. Lists that count from 1 (Matlab's) are converted here, once.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefeat.core.image import image_size

COLUMNS = ("source_image", "target_image", "class", "XA", "YA", "XB", "YB")
"""PF-PASCAL's columns; coordinates are lists separated by semicolons."""

MISSING = -1.0
"""Public lists pad keypoints that are not there with x = y = -1 (in the file's own numbers)."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two images of one category and the keypoints they have in common."""

    image0: Path
    image1: Path
    category: str
    points0: Tensor
    """(N, 2) original pixels of image 0; NaN where the keypoint is missing."""
    points1: Tensor
    """(N, 2) original pixels of image 1; NaN where the keypoint is missing."""
    visible: Tensor
    """(N,) bool: in both images."""
    size0: tuple[int, int]
    """(height, width) of image 0, EXIF rotation applied."""
    size1: tuple[int, int]
    """(height, width) of image 1."""
    name: str
    box0: Tensor | None = None
    """(4,) inclusive object box in image 0, where the data set has one."""
    box1: Tensor | None = None

    def common(self) -> tuple[Tensor, Tensor]:
        """The keypoints visible in both images: (V, 2) and (V, 2) original pixels."""
        return self.points0[self.visible], self.points1[self.visible]


def list_rows(path: Path, required: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a CSV list, each with "file, line n" for messages; refuses ragged rows."""
    if not path.is_file():
        raise ValueError(f"there is no pair list {path}; put it there or pass another")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            missing = [c for c in required if c not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"{path}, line 1: no column {', '.join(missing)}; "
                    f"the first line must name {','.join(required)}"
                )
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where}: wants {len(reader.fieldnames or ())} fields")
                yield where, row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from error
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}; correct it") from error


def parse_points(row: dict[str, str], x: str, y: str, *, first_pixel: int) -> Tensor:
    """Columns x and y of a row -> (N, 2) pixels counted from 0, NaN where missing."""
    numbers = []
    for column in (x, y):
        try:
            numbers.append([float(part) for part in row[column].split(";")])
        except ValueError:
            wanted = "numbers separated by semicolons"
            raise ValueError(f"{column} must be {wanted}, not {row[column]!r}") from None
    if len(numbers[0]) != len(numbers[1]):
        raise ValueError(f"{x} has {len(numbers[0])} numbers and {y} has {len(numbers[1])}")
    points = torch.tensor(numbers, dtype=torch.float64).T
    if bool(points.isinf().any()):
        raise ValueError(f"{x} or {y} holds an infinite number")
    points[points.isnan().any(-1) | (points == MISSING).all(-1)] = torch.nan
    return (points - first_pixel).float()


def load_pairs(
    path: str | Path,
    images: str | Path | None = None,
    *,
    first_pixel: int = 0,
    tolerance: float = 0.0,
    category: Callable[[str], str] = str,
) -> list[Pair]:
    """Pairs of any list in PF-PASCAL's columns (COLUMNS; further ones are ignored).

    Image names are relative to `images` (default: the list's folder). Coordinates are pixels of
    the image files themselves, the first pixel's centre being `first_pixel`; points may lie up
    to `tolerance` pixels outside. x = y = -1 or nan marks a missing keypoint. `category` turns the
    class column into a name and raises ValueError for a class it does not know.
    """
    path = Path(path)
    folder = path.parent if images is None else Path(images)
    pairs = []
    for where, row in list_rows(path, COLUMNS):
        with located(where):
            name = category(row["class"].strip())
            if not name:
                raise ValueError("the class is empty; name one")
            if is_mirrored(row):
                raise ValueError("mirrored pairs (flip=1) have no image files; remove the row")
            points0 = parse_points(row, "XA", "YA", first_pixel=first_pixel)
            points1 = parse_points(row, "XB", "YB", first_pixel=first_pixel)
        image0, image1 = folder / row["source_image"], folder / row["target_image"]
        pairs.append(make_pair(image0, image1, name, points0, points1, tolerance, where))
    if not pairs:
        raise ValueError(f"{path}: the list holds no pairs")
    return pairs


def is_mirrored(row: dict[str, str]) -> bool:
    """Whether a row of PF-PASCAL's lists is of a pair turned left to right."""
    return row.get("flip", "0").strip() not in ("", "0")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of what is done inside begin with the place they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def make_pair(
    image0: Path, image1: Path, category: str, points0: Tensor, points1: Tensor, tolerance: float,
    where: str, boxes: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Pair:  # fmt: skip
    """A checked Pair from two (N, 2) point lists, NaN where missing; errors begin with `where`."""
    with located(where):
        if len(points0) != len(points1):
            raise ValueError(f"{len(points0)} points in image 0 and {len(points1)} in image 1")
        size0, size1 = _existing_size(image0), _existing_size(image1)
    for number, (points, size) in enumerate(((points0, size0), (points1, size1))):
        with located(f"{where}, image {number}"):
            _check_inside(points, size, tolerance)
    visible = (points0.isfinite() & points1.isfinite()).all(-1)
    if not bool(visible.any()):
        raise ValueError(f"{where}: no keypoint is in both images; remove the pair")
    name = f"{category}/{image0.stem}-{image1.stem}"
    return Pair(image0, image1, category, points0, points1, visible, size0, size1, name, *boxes)


def _existing_size(image: Path) -> tuple[int, int]:
    if not image.exists():
        raise ValueError(f"there is no image {image}; check the folder the list belongs to")
    return image_size(image)


def _check_inside(points: Tensor, size: tuple[int, int], tolerance: float) -> None:
    """ValueError if a point (N, 2) lies more than `tolerance` pixels outside the image's edges."""
    height, width = size
    edge = torch.tensor([width - 0.5, height - 0.5], dtype=points.dtype)
    beyond = torch.maximum(-0.5 - points, points - edge).amax(-1)
    if bool((beyond > tolerance).any()):
        worst = int(beyond.nan_to_num(-1).argmax())
        x, y = points[worst].tolist()
        raise ValueError(
            f"point {worst + 1} at ({x:g}, {y:g}), counted from 0, lies outside the image of "
            f"{width} x {height} pixels; correct the list or use the images it was made for"
        )

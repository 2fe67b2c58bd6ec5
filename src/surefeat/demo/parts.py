"""What a visitor has on the page's tab for parts: photos, clicks, and how they are drawn.

Convention: the page shows photos with a longest side of 800 pixels; places are kept in the photos'
own pixels. Each photo is one object, seen whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.core.image import decode, read_bytes, resize
from surefeat.data.items import Place
from surefeat.data.keypoints import KeypointSet, Labelled, make_category
from surefeat.demo.pictures import SHOWN, disc, to_pil
from surefeat.show.style import PALETTE

# Numbers are white, which does not show on yellow.
_COLOURS = tuple(colour for colour in PALETTE if colour != "#f0e442")

# Pixels below a found photo, where the page puts its caption.
_MARGIN = 80


@dataclass(frozen=True, eq=False)
class PartPhoto:
    """A photo and the parts clicked in it."""

    name: str
    path: str
    pixels: Tensor
    """(3, h, w) uint8, as shown."""
    frame: Frame
    """From the photo's own pixels (original) to those shown (network)."""
    places: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Clicked parts, original pixels."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What one visitor has on the tab; never shared with another."""

    names: tuple[str, ...] = ()
    photos: tuple[PartPhoto, ...] = ()
    at: int = 0
    """The photo that is shown."""

    def missing(self) -> list[str]:
        """Parts that have no place yet in the photo that is shown."""
        placed = self.photos[self.at].places if self.photos else {}
        return [name for name in self.names if name not in placed]

    def labelled(self, photos: list[PartPhoto]) -> KeypointSet:
        """Photos as objects with keypoints: those that were clicked are visible."""
        objects = []
        for photo in photos:
            unknown = (torch.nan, torch.nan)
            points = torch.tensor([photo.places.get(name, unknown) for name in self.names])
            height, width = photo.frame.original
            box = torch.tensor([0.0, 0.0, width - 1, height - 1])
            seen = points.isfinite().all(-1)
            place = Place(photo.path)
            objects.append(Labelled(place, photo.name, 0, box, points, seen, (height, width)))
        return KeypointSet((make_category("object", self.names),), tuple(objects))

    def with_places(self, places: dict[str, tuple[float, float]]) -> Parts:
        """The same with other clicks in the photo that is shown."""
        photos = list(self.photos)
        if photos:
            photos[self.at] = replace(photos[self.at], places=places)
        return replace(self, photos=tuple(photos))


def read_photo(path: str, *, name: str, max_pixels: int) -> PartPhoto:
    """A photo without clicks, at the page's size."""
    pixels = decode(read_bytes(path, name=name), name=name, max_pixels=max_pixels)
    original = (pixels.shape[1], pixels.shape[2])
    height, width = (max(1, round(side * SHOWN / max(original))) for side in original)
    return PartPhoto(
        name, path, resize(pixels, size=(height, width)), Frame(original, (height, width))
    )


def clicked_picture(photo: PartPhoto, names: tuple[str, ...]) -> Image.Image:
    """A photo with the parts clicked in it."""
    places = {name: place for name, place in photo.places.items() if name in names}
    points = photo.frame.to_network(torch.tensor(list(places.values())).reshape(-1, 2))
    return _marked(photo, [names.index(name) for name in places], points)


def found_picture(
    photo: PartPhoto, item: Labelled, names: tuple[str, ...]
) -> tuple[Image.Image, str]:
    """A photo with what was found, above an empty strip for its caption."""
    assert item.scores is not None
    points = photo.frame.to_network(item.points)
    marked = _marked(photo, list(range(len(points))), points)
    picture = Image.new("RGB", (marked.width, marked.height + _MARGIN), "white")
    picture.paste(marked)
    least = int(item.scores.argmin())
    return picture, f"least sure: {least + 1} {names[least]} {float(item.scores[least]):.2f}"


def _marked(photo: PartPhoto, numbers: list[int], points: Tensor) -> Image.Image:
    """The photo with a numbered disc per part; points (N, 2) in shown pixels."""
    picture = to_pil(photo.pixels)
    for number, (x, y) in zip(numbers, points.tolist(), strict=True):
        mark = disc(SHOWN / 45, _COLOURS[number % len(_COLOURS)], str(number + 1))
        picture.paste(mark, (round(x - mark.width / 2), round(y - mark.height / 2)), mark)
    return picture

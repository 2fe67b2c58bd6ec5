"""What the web page computes and draws: photos as shown, alternatives, marks, confidence, warps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from surefeat.features import Features
from surefeat.flow import warp_image
from surefeat.geometry import Frame, cell_centres
from surefeat.image import resize
from surefeat.match import Matches
from surefeat.model import DenseFeatures
from surefeat.nearest import PEAK_RADIUS, even_grid, prepare, vote
from surefeat.voting import Voting

try:
    from matplotlib import colormaps
except ImportError as error:
    raise ImportError("the web page needs matplotlib: pip install 'surefeat[demo]'") from error

SHOWN = 960
"""Longest side of a photo on the page, pixels."""
ALTERNATIVES = 3
"""Next best places shown beside a match."""
COLOURS = ("#d55e00", "#0072b2", "#56b4e9", "#7b8794")
"""Of the match and its alternatives."""


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo as the page shows it."""

    pixels: Tensor
    """(3, h, w) uint8."""
    features: Features
    """Of `pixels`, computed once."""
    frame: Frame
    """From the photo's own pixels (original) to those shown (network)."""


def prepare_photo(model: DenseFeatures, pixels: Tensor) -> Photo:
    """A photo (3, H, W) uint8, shrunk for the page, with its features."""
    original = (pixels.shape[1], pixels.shape[2])
    scale = min(1.0, SHOWN / max(original))
    frame = Frame(
        original, (max(1, round(original[0] * scale)), max(1, round(original[1] * scale)))
    )
    small = resize(pixels, size=frame.network)
    return Photo(small, model.extract(small)[0].to("cpu"), frame)


def alternatives(features0: Features, features1: Features, match: Matches) -> tuple[Tensor, Tensor]:
    """The next best places (K, 2) for one matched point and their similarity (K,).

    Peaks of what match_points maximises, each farther than PEAK_RADIUS from those before it.
    """
    side0, side1 = (
        prepare(f, descriptor_weight=0.5, lower_weight=1.0) for f in (features0, features1)
    )
    votes = vote(side0, side1, Voting())
    h0, w0, high, wide = votes.histograms.shape
    cells0 = side0.cells(match.points0, (h0, w0))
    cells1 = side1.cells(side1.points, (high - h0 + 1, wide - w0 + 1))
    similarity = (side0.at(match.points0) @ side1.vectors.T)[0]
    total = similarity + votes.bonus(cells0, cells1)[0]
    radius = PEAK_RADIUS * max(features1.frame.original)
    found: list[int] = []
    last = match.points1[0]
    for _ in range(ALTERNATIVES):
        total = total.masked_fill((side1.points - last).norm(dim=-1) <= radius, float("-inf"))
        if bool(total.isinf().all()):
            break
        found.append(int(total.argmax()))
        last = side1.points[found[-1]]
    return side1.points[found], similarity[found]


def warped(source: Photo, target: Photo, places: Tensor, amount: float) -> Image.Image:
    """The source in the target's frame, moved by `amount` in [0, 1] of the way.

    places: (h, w, 2), for every pixel of the target its place in the source.
    """
    size = target.frame.network
    start = even_grid(source.features, size=size).reshape(*size, 2)
    pixels = cell_centres(size=size, stride=1.0).reshape(*size, 2)
    return to_pil(warp_image(source.pixels, torch.lerp(start, places, amount) - pixels))


def confidence_maps(photos: tuple[Photo | None, Photo | None]) -> list[Image.Image | None]:
    """1/sigma over the grey photos, on one scale for both."""
    known = [photo.features.confidence.flatten() for photo in photos if photo]
    if not known:
        return [None, None]
    low, high = torch.cat(known).quantile(torch.tensor([0.02, 0.98])).tolist()
    return [_confidence_map(photo, low, high) if photo else None for photo in photos]


def _confidence_map(photo: Photo, low: float, high: float) -> Image.Image:
    places = cell_centres(size=photo.frame.network, stride=1.0)
    values = photo.features.confidence_at(places).reshape(photo.frame.network)
    shares = ((values - low) / max(high - low, 1e-6)).clamp(0, 1)
    colour = torch.from_numpy(colormaps["viridis"](shares.numpy())[..., :3]).permute(2, 0, 1)
    grey = photo.pixels.float().mean(0) / 255
    return to_pil(((0.65 * colour + 0.35 * grey) * 255).round().byte())


def to_pil(pixels: Tensor) -> Image.Image:
    """(3, h, w) uint8 -> a picture."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def marked(photo: Photo, points: Tensor) -> Image.Image:
    """The photo with numbered discs at points (N, 2), the first on top."""
    picture = to_pil(photo.pixels)
    radius = max(photo.frame.network) / 40
    for rank, (x, y) in reversed(list(enumerate(points.tolist()))):
        disc = _disc(radius if rank == 0 else 0.75 * radius, COLOURS[rank], str(rank + 1))
        picture.paste(disc, (round(x - disc.width / 2), round(y - disc.height / 2)), disc)
    return picture


def _disc(radius: float, colour: str, text: str) -> Image.Image:
    """A smooth disc with a white rim; RGBA."""
    fine, side = 4, 2 * round(radius) + 1  # odd, so that it has a middle pixel
    large = Image.new("RGBA", (fine * side, fine * side))
    pen, end = ImageDraw.Draw(large), fine * side - 1
    pen.ellipse([0, 0, end, end], fill=colour, outline="white", width=round(fine * side / 10))
    font = ImageFont.load_default(fine * side * 0.6)
    pen.text((end / 2, end / 2), text, fill="white", anchor="mm", font=font)
    return large.resize((side, side), Image.Resampling.LANCZOS)

"""What the web page computes and draws: photos as shown, alternatives, discs, confidence, warps.

Convention: the page shows photos with a longest side of SHOWN pixels, and features are asked in
those; a photo's Frame leads back to its own pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from surefeat.core.geometry import cell_centres
from surefeat.core.image import decode, problem, read_bytes
from surefeat.match.dense import warp_image
from surefeat.match.points import Matches
from surefeat.match.search import PEAK_RADIUS, even_grid, prepare, vote
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.show.style import GREY, MAP, PALETTE, ShownPhoto, shown_photo

MAX_PIXELS = 80_000_000
"""Of an upload; larger ones are refused."""

KEPT = 3600
"""Seconds after which a visitor's photos are forgotten, in memory and on disk."""

SHOWN = 800
"""Longest side of a photo on the page, pixels."""

ALTERNATIVES = 3
"""Next best places shown beside a match."""

COLOURS = tuple(colour for colour in PALETTE if colour != "#f0e442")
"""Of numbered parts; the numbers are white, which does not show on yellow."""

RANKED = (PALETTE[1], PALETTE[0], PALETTE[5], GREY)
"""Of a match and its alternatives: the first stands out."""


def read_upload(path: object, *, name: str) -> Tensor:
    """A visitor's photo: (3, H, W) uint8; ImageError for what is none, or is too large.

    A request can name any file of this machine: one that was not uploaded is refused, in the same
    words whether it exists or not.
    """
    from gradio.utils import get_upload_folder

    folder = Path(get_upload_folder()).resolve()
    if not isinstance(path, str) or "\0" in path or not _resolved(path).is_relative_to(folder):
        raise problem(name, "was not uploaded here; drop the photo on the page")
    return decode(read_bytes(path, name=name), name=name, max_pixels=MAX_PIXELS)


def _resolved(path: str) -> Path:
    """Where a path leads, links followed; the root for one that turns in a circle."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError):
        return Path("/")


def prepare_photo(model: DenseFeatures, pixels: Tensor) -> ShownPhoto:
    """A photo (3, H, W) uint8 at the page's size, with its features."""
    features = model.extract(pixels)[0].to("cpu")
    return shown_photo(pixels, features, longest=SHOWN, enlarged=True)


def best_places(
    match: Matches, features0: Features, features1: Features
) -> tuple[Tensor, Tensor, Tensor]:
    """One match of match_points and the next best places for its point, best first.

    Places (K, 2), pixels of photo 1, their similarities (K,), and these with the neighbours' votes
    (K,), which match_points maximises; each is farther than PEAK_RADIUS from those before it.
    """
    own, below = POINT_WEIGHTS
    side0, side1 = (
        prepare(f, descriptor_weight=own, lower_weight=below) for f in (features0, features1)
    )
    votes = vote(side0, side1, Voting())
    cells0 = side0.cells(match.points0, votes.grid0)
    cells1 = side1.cells(side1.points, votes.grid1)
    similarity = (side0.at(match.points0) @ side1.vectors.T)[0]
    sigma = features0.confidence_at(match.points0).reciprocal()
    score = similarity + votes.bonus(cells0, cells1, sigma)[0]
    radius = PEAK_RADIUS * max(features1.frame.original)
    free, index = score.clone(), [int(score.argmax())]
    while len(index) <= ALTERNATIVES:
        free[(side1.points - side1.points[index[-1]]).norm(dim=-1) <= radius] = float("-inf")
        if bool(free.isinf().all()):
            break
        index.append(int(free.argmax()))
    places = torch.cat([match.points1, side1.points[index[1:]]])
    return places, similarity[index], score[index]


def warped(source: ShownPhoto, target: ShownPhoto, places: Tensor, amount: float) -> Image.Image:
    """The source in the target's frame, moved by `amount` in [0, 1] of the way.

    places: (h, w, 2), for every pixel of the target its place in the source.
    """
    size = target.frame.network
    start = even_grid(source.features, size=size).reshape(*size, 2)
    return to_pil(warp_image(source.pixels, torch.lerp(start, places, amount)))


def confidence_maps(photos: Sequence[ShownPhoto | None]) -> list[Image.Image | None]:
    """1/sigma over the grey photos, on one scale for both."""
    known = [photo.features.confidence.flatten() for photo in photos if photo]
    if not known:
        return [None, None]
    low, high = torch.cat(known).quantile(torch.tensor([0.02, 0.98])).tolist()
    return [_confidence_map(photo, low, high) if photo else None for photo in photos]


def _confidence_map(photo: ShownPhoto, low: float, high: float) -> Image.Image:
    from matplotlib import colormaps

    places = cell_centres(size=photo.frame.network, stride=1.0)
    values = photo.features.confidence_at(places).reshape(photo.frame.network)
    shares = ((values - low) / max(high - low, 1e-6)).clamp(0, 1)
    colour = torch.from_numpy(colormaps[MAP](shares.numpy())[..., :3]).permute(2, 0, 1)
    grey = photo.pixels.float().mean(0) / 255
    return to_pil(((0.65 * colour + 0.35 * grey) * 255).round().byte())


def to_pil(pixels: Tensor) -> Image.Image:
    """(3, h, w) uint8 -> a picture."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def with_discs(pixels: Tensor, points: Tensor) -> Image.Image:
    """A photo with numbered discs at points (N, 2).

    The first is the match, drawn on top; the others are its alternatives, and smaller.
    """
    picture = to_pil(pixels)
    for rank, (x, y) in reversed(list(enumerate(points.tolist()))):
        radius = SHOWN / 45 * (0.75 if rank else 1.0)
        mark = disc(radius, RANKED[rank % len(RANKED)], str(rank + 1))
        picture.paste(mark, (round(x - mark.width / 2), round(y - mark.height / 2)), mark)
    return picture


def disc(radius: float, colour: str, text: str) -> Image.Image:
    """A smooth disc with a white rim; RGBA."""
    fine, side = 4, 2 * round(radius) + 1  # odd, so that it has a middle pixel
    large = Image.new("RGBA", (fine * side, fine * side))
    pen, end = ImageDraw.Draw(large), fine * side - 1
    pen.ellipse([0, 0, end, end], fill=colour, outline="white", width=round(fine * side / 10))
    font = ImageFont.load_default(fine * side * 0.6)
    pen.text((end / 2, end / 2), text, fill="white", anchor="mm", font=font)
    return large.resize((side, side), Image.Resampling.LANCZOS)

"""A training image before it is read: its name, where its bytes are, what is cut from it."""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[float, float, float, float]


class SourceError(ValueError):
    """A source that gives no images: one line with what was looked for and the fix."""


@dataclass(frozen=True)
class Place:
    """Where an image's bytes are; `refused` says why they are not to be read."""

    path: str
    offset: int = 0
    size: int | None = None
    """None: the whole file; else this many bytes from `offset`, a member of a tar file."""
    refused: str | None = None


@dataclass(frozen=True)
class Item:
    """One training image, not yet decoded."""

    name: str
    """Readable: the path below the source, or shard.tar/member; a crop adds #annotation."""
    read: Place
    crop: Box | None = None
    """Inclusive (x1, y1, x2, y2), original pixels; it may reach beyond the image."""
    label: str | None = None
    """Category of the crop, where known."""

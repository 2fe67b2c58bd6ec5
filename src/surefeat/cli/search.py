"""surefeat index, find: a part of a photo in a whole collection."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from surefeat.cli.output import Device, Json, Model, Tiles, drawing, read_points, say


@dataclass(frozen=True)
class Index:
    """An index of photos' parts for `surefeat find`; on a grown folder it adds what is new."""

    photos: Positional[tuple[Path, ...]]
    """Folders, lists, tar shards, Parquet files (columns photo, bytes), photos."""
    out: Path
    """Folder for the index: Parquet shards of cells, which other programs read too."""
    budget: int = 100
    """Cells kept of a photo, confident ones spread out; with --tiles, of every tile."""
    tiles: Tiles = False
    engine: Literal["here", "ray"] = "here"
    """Here, under torchrun with others, or on Ray (the scale extra)."""
    address: str | None = None
    """Of a Ray cluster; by default a local one."""
    workers: int | None = None
    """Shards made at the same time."""
    model: Model = None
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.index.store import index_photos

        done = index_photos(
            self.photos, self.out, model=self.model, budget=self.budget, tiles=self.tiles,
            engine=self.engine, address=self.address, workers=self.workers, device=self.device,
            quiet=self.json,
        )  # fmt: skip
        words = f"{done.photos - len(done.skipped):,} photos, {done.cells:,} cells in {self.out}"
        words += f"; shards made: {done.written}, already there: {done.already_there}"
        if done.skipped:
            words += f"; photos skipped: {len(done.skipped)}, listed in {done.listed}"
        if done.search is None:
            words += "; other processes are still at work, run this again when they are done"
        say(asdict(done), to_script=self.json, words=words)


@dataclass(frozen=True)
class Find:
    """Where in the photos of an index is this part? Writes a page, a sheet, JSON and crops."""

    image: Positional[Path]
    """The photo that shows the part."""
    point: str
    """Where: X,Y in its own pixels."""
    index: Path
    """Folder that `surefeat index` wrote."""
    count: int = 20
    """Photos that are looked at more closely and shown."""
    out: Path = Path("find")
    """Folder for index.html, sheet.png, find.json and crops/."""
    verify: bool = True
    """Match the photos of the best cells with this one; without it the cells' order stays."""
    model: Model = None
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.core.files import write_json
        from surefeat.index.find import find_part
        from surefeat.index.search import PartIndex
        from surefeat.model.network import DenseFeatures

        (point,) = read_points([self.point], flag="--point")
        model = DenseFeatures.from_pretrained(self.model, device=self.device)
        index = PartIndex.open(self.index, weights=model.weights_hash())
        result = find_part(
            self.image, point, index, model=model, count=self.count, verify=self.verify,
            quiet=self.json,
        )  # fmt: skip
        shown = self.out / "find.json"
        write_json(shown, result.to_dict())
        with drawing("page"):
            from surefeat.show.parts import write_parts

            shown = write_parts(self.image, result, self.out)
        sure = sum((hit.probability or 0.0) > 0.5 for hit in result.hits)
        words = f"{len(result.hits)} of {result.photos:,} photos"
        if any(hit.probability is not None for hit in result.hits):
            words += f", {sure} of them probably right"
        words += f"; {len(result.missing)} photos cannot be read any more" * bool(result.missing)
        say(result.to_dict(), to_script=self.json, words=f"{words}; look at {shown}")

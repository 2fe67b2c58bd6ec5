"""`surefeat peers`: the systems the paper compares itself with; heavy imports inside run()."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg, subcommand

from surefeat.cli.output import Device, Json, say


@dataclass(frozen=True)
class PeersFit:
    """Train a peer on photos; `surefeat evaluate pf-pascal DATA --rows NAME=FOLDER` measures it."""

    name: Positional[str]
    """Which: see `surefeat peers list`."""
    source: Positional[Path]
    """Folder, list, tar shards or COCO json with photos; for scnet PF-PASCAL's folder."""
    out: Path
    """Run folder to create."""
    init: tuple[str, ...] = ("imagenet",)
    """Weights of the ImageNet trunk: imagenet (downloaded), or files."""
    images: Path | None = None
    """Where a list or COCO json finds its images: a folder or tar shards."""
    keep: Path | None = None
    """List of the image names to use."""
    crop: Path | None = None
    """landmarks: COCO json whose boxes are cut from the images."""
    labels: Path | None = None
    """anchornet: CSV (columns image, label) or COCO json; by default folders name the labels."""
    categories: tuple[str, ...] | None = None
    """anchornet and landmarks: only these labels, or boxes."""
    public: bool = False
    """scnet: learn from the field's whole training list, which shares images with test."""
    start: Path | None = None
    """scnet-ag and scnet-ag+: run folder of a trained scnet-a."""
    proposals_file: Path | None = None
    """scnet: proposals, made or added to where it lacks images; by default in the run folder."""
    steps: int | None = None
    """Batches to learn from; by default the peer's own."""
    batch: int | None = None
    """Photos, or pairs, of a step; by default the peer's own."""
    lr: float | None = None
    """Learning rate; by default the peer's own."""
    seed: int = 0
    """Of the weights, the order of photos and all that is drawn."""
    resume: bool = False
    """Continue the run in --out exactly, with its own settings."""
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.peers.fit import Asked, fit_peer

        asked = Asked(self.steps, self.batch, self.lr, self.seed)
        done = fit_peer(
            self.name, self.source, out=self.out, asked=asked, init=self.init, images=self.images,
            keep=self.keep, crop=self.crop, labels=self.labels, categories=self.categories,
            public=self.public, start=self.start, proposals=self.proposals_file,
            resume=self.resume, device=self.device, quiet=self.json,
        )  # fmt: skip
        result: dict[str, Any] = {
            "peer": str(done.folder / "model"), "photos": done.photos, "steps": done.steps,
            "loss": done.loss, "skipped": len(done.skipped),
        }  # fmt: skip
        say(result, to_script=self.json)


@dataclass(frozen=True)
class PeersList:
    """Which peers there are, what each was taught with, and what is published for it."""

    json: Json = False

    def run(self) -> None:
        from surefeat.peers.rows import PEERS

        if self.json:
            say({name: asdict(about) for name, about in PEERS.items()}, to_script=True)
            return
        for name, about in PEERS.items():
            said = f"published {about.published}" if about.published else "nothing published here"
            print(f"{name}\n  --rows {about.rows}\n  taught by {about.taught}; {said}")


@dataclass(frozen=True)
class Peers:
    """The systems the paper compares itself with, as rows of `surefeat evaluate`."""

    what: Annotated[
        Annotated[PeersFit, subcommand("fit")] | Annotated[PeersList, subcommand("list")],
        arg(name=""),
    ]

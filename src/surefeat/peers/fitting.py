"""How peers are trained, on the one loop of the tree, and the folder a trained one lives in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from surefeat.core import progress
from surefeat.core.files import checked_weights, read_tensors, write_model
from surefeat.data.decode import Canvas, Item, content_hash, decode_all
from surefeat.learn import loop
from surefeat.learn.runs import Run, list_skipped
from surefeat.measure.rows import imagenet_trunk

Network = TypeVar("Network", bound=nn.Module)

SETTINGS, WEIGHTS = "peer.json", "peer.safetensors"


@dataclass(frozen=True)
class FitConfig:
    """How long and how fast a peer learns."""

    steps: int
    """Batches."""
    batch: int = 16
    """Photos, or pairs, of a step."""
    lr: float = 1e-3
    """Learning rate."""
    optimiser: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.0
    cosine: bool = False
    """The rate falls along half a cosine; else it stays."""
    seed: int = 0
    """Of the weights, the order of photos and all that is drawn."""
    log_every: int = 50
    checkpoint_every: int = 1000


@dataclass(frozen=True, eq=False)
class StoredPeer:
    """A trained peer as its folder holds it."""

    kind: str
    """Which peer: hog, gcnn, ..."""
    settings: Mapping[str, Any]
    """What its network is built from."""
    about: Mapping[str, Any]
    """What it was trained on, and how."""
    tensors: Mapping[str, Tensor]
    digest: str
    """SHA-256 of the weights."""


def save_peer(
    folder: Path, kind: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write peer.json and peer.safetensors, together or not at all."""
    packed = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    head = {"peer": kind, "settings": dict(settings), "about": dict(about)}
    write_model(folder / WEIGHTS, packed, folder / SETTINGS, head)


def holds_peer(folder: str | Path) -> bool:
    """Whether a folder, or its model/, holds a trained peer."""
    return any((place / SETTINGS).is_file() for place in (Path(folder), Path(folder) / "model"))


def load_peer(folder: str | Path) -> StoredPeer:
    """What save_peer wrote, from a run folder or its model/."""
    places = (Path(folder), Path(folder) / "model")
    place = next((p for p in places if (p / SETTINGS).is_file()), None)
    if place is None:
        raise FileNotFoundError(f"{folder} holds no peer; train one with surefeat peers fit")
    try:
        head = json.loads((place / SETTINGS).read_text())
        kind, settings, about = head["peer"], head["settings"], head["about"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place / SETTINGS} is damaged ({error!r}); copy it anew") from error
    path = checked_weights(place / WEIGHTS, head.get("sha256"))
    return StoredPeer(kind, settings, about, read_tensors(path)[0], str(head["sha256"]))


Step = Callable[[int], dict[str, Tensor]]
"""Number of a step -> what is logged of it, `loss` first: the one that is descended."""


@dataclass(frozen=True, eq=False)
class Training:
    """What learn_peer needs of a peer."""

    model: nn.Module
    """Its parameters that require gradients learn."""
    step: Step
    shown: tuple[str, ...] = ("loss",)
    """Of the log, in the progress bar."""
    complain: Callable[[int, loop.Values], str | None] | None = field(default=None)


def learn_peer(training: Training, run: Run, config: FitConfig, *, quiet: bool) -> loop.Progress:
    """Train to the last step, continuing from the newest checkpoint if there is one."""
    model = training.model
    optimiser = loop.make_optimiser(
        config.optimiser, [(model.parameters(), config.lr)], weight_decay=config.weight_decay
    )
    device = next(model.parameters()).device
    schedule = loop.Schedule(config.steps, config.log_every, config.checkpoint_every)
    log = loop.Log(device, batch=config.batch, unit="items")
    with loop.progress_bar(config.steps, training.shown, quiet=quiet) as (report, tick):
        job = loop.open_job(loop.Job(
            model, optimiser, run, schedule, log, advice="lower --lr", report=report, tick=tick,
            complain=training.complain,
        ))  # fmt: skip
        return loop.run_steps(job, _steps(training, job, config), fast=True)


def _steps(training: Training, job: loop.Job, config: FitConfig) -> Iterator[loop.Taken]:
    decay: Literal["constant", "cosine"] = "cosine" if config.cosine else "constant"
    for step in job.todo():
        taken = training.step(step)
        factor = loop.rate(step, config.steps, warmup=0, decay=decay)
        loop.descend(job.optimiser, taken["loss"], factor=factor)
        yield {name: value.detach() for name, value in taken.items()}


def new_network(make: Callable[[], Network], *, seed: int, device: torch.device) -> Network:
    """With weights that follow from the seed alone, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(device)


def learned(model: Network, tensors: Mapping[str, Tensor], *, device: torch.device) -> Network:
    """With stored weights, to be used as it is."""
    model.load_state_dict(dict(tensors))
    return model.eval().requires_grad_(False).to(device)


def generator_of(seed: int, step: int, device: torch.device) -> torch.Generator:
    """All randomness of a step is a function of the two numbers."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + step * 7 + 3) % 2**62)


def read_canvas(items: Sequence[Item], *, side: int, quiet: bool) -> Canvas:
    """All photos with their longest side at most `side` pixels."""
    with progress.bar(total=len(items), desc="photos", quiet=quiet, leave=False) as bar:
        canvas = decode_all(items, side=side, workers=8, progress=lambda n: bar.update(n - bar.n))
    if not len(canvas.pixels):
        first = canvas.skipped[0]
        raise ValueError(
            f"none of the {len(items)} photos can be read; {first.name} {first.reason}"
        )
    return canvas


def start_run(
    out: str | Path, config: Any, *, resume: bool, device: torch.device
) -> Run:  # fmt: skip
    """A new run, or the one to go on with, which keeps its own settings."""
    return Run.resume(out) if resume else Run.start(out, config, device=device)


def note_photos(run: Run, items: Sequence[Item], canvas: Canvas) -> dict[str, Any]:
    """List skipped photos, and keep which were learned from; returns the latter."""
    list_skipped(run.folder, canvas.skipped)
    names = set(canvas.names)
    used = [item for item in items if item.name in names]
    digest = hashlib.sha256("\n".join(canvas.names).encode()).hexdigest()
    run.store_images({"images": len(names), "sha256": digest, "content": content_hash(used)})
    return {"photos": len(canvas.names), "photos_sha256": digest}


Extract = Callable[[Tensor], Tensor]
"""(B, 3, S, S) in [0, 1] -> (B, C, h, w)."""


def frozen_vgg(init: Sequence[str | Path], *, device: torch.device) -> tuple[Extract, str]:
    """pool4 of VGG16 for images in [0, 1], and the hash of its weights."""
    trunk, digest = imagenet_trunk("vgg16", init, device=device)
    mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (trunk.mean, trunk.std))
    fast = device.type == "cuda"
    layout = torch.channels_last if fast else torch.contiguous_format
    trunk.to(memory_format=layout)

    @torch.no_grad()
    def extract(images: Tensor) -> Tensor:
        seen = ((images - mean) / std).contiguous(memory_format=layout)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            maps: Tensor = trunk(seen, ("pool4",))["pool4"]
        return maps.float().contiguous()

    return extract, digest

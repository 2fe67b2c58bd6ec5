"""Matches between photos of a folder, learned from beside warps: are they worth their time?

    python benchmarks/experiments/across.py DATA --set birds --work FOLDER [--own] [--share 0 0.5]
    python benchmarks/experiments/across.py DATA --set birds --work FOLDER --out FILE.json

DATA holds cub-dev and pf-pascal. 200 photos are learned as preset `quick` learns them (recipes
"kept x 6" of anyfolder.py); that model and the kept views stay in the folder. Every photo is
matched with those most like it, by the model that ships or with --own by the one just trained. Then
a head is trained with second views of other photos in a share of each batch, matches taking the
place of the warp's points; a share of 0 is the control, with as many steps. It goes on from the
trained model with --own, else it starts from the one that ships. Each run adds its PCK on every
second development pair of the set to the folder; --out writes them down.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from anyfolder import RECIPES, both_ways, load_sets, source_of
from torch import Tensor

import surefeat.learn.pretrain as pretraining
from surefeat.core.files import environment, write_json
from surefeat.core.geometry import apply_affine, compose, invert
from surefeat.data.decode import Batches, batch_indices
from surefeat.learn import kept as keeping
from surefeat.learn import loop
from surefeat.learn.config import Config
from surefeat.learn.kept import KeptViews, half_precision
from surefeat.learn.loss import loss_of_maps, step_draws
from surefeat.learn.warp import shared_points
from surefeat.match.points import match_points
from surefeat.model.network import DenseFeatures

RECIPE = {"birds": "200 birds, kept x 6", "pf-pascal": "PF-PASCAL, kept x 6"}

MATCHES, FEWEST = 60, 6
"""Between two photos, at most, and at least."""

HELD = 60
"""Steps during which sigma is held where the head starts anew."""

Edges = Mapping[int, list[tuple[int, Tensor, Tensor]]]
"""Photo -> others, with matched places of the photo and of the other, in their pixels."""


@dataclass(frozen=True)
class Folder:
    """Photos, their kept views, and a model that learned from these."""

    pixels: Tensor
    sizes: Tensor
    kept: KeptViews
    model: Path
    config: Config


def learn_folder(args: argparse.Namespace) -> Folder:
    """As preset `quick`, once."""
    recipe, run = RECIPES[RECIPE[args.set]], args.work / "base"
    config, file = recipe.config(seed=0, sigma=True), args.work / "kept.pt"
    if not file.exists():
        known = SimpleNamespace(birds=args.data / "cub-dev", pf_pascal=args.data / "pf-pascal")
        source, photos = source_of(recipe, known)  # type: ignore[arg-type]
        assert photos is not None
        listed = args.work / "photos.txt"
        if args.set != "birds":  # bird_photos has shuffled those
            random.Random(1).shuffle(photos)
        listed.write_text("".join(f"{photo.name}\n" for photo in photos[:200]))
        left: list[tuple[KeptViews, Batches]] = []

        def keep(model: DenseFeatures, batches: Batches, *rest: Any, **more: Any) -> KeptViews:
            left.append((keeping.keep_views(model, batches, *rest, **more), batches))
            return left[0][0]

        pretraining.keep_views = keep
        learn = pretraining.pretrain
        learn(source, out=run, config=config, init="shipped", keep=listed, quiet=True)
        ((kept, batches),) = left
        order = torch.randperm(len(batches.pixels), generator=torch.Generator().manual_seed(0))
        order = order[: len(kept.to_source)]
        torch.save([batches.pixels[order], batches.sizes[order], kept.maps, kept.to_source], file)
    pixels, sizes, maps, to_source = torch.load(file)
    return Folder(pixels, sizes, KeptViews(maps, to_source), run / "model", config)


@torch.no_grad()
def find_matches(folder: Folder, args: argparse.Namespace) -> Edges:
    """Of every photo with those most like it: what leads back, and is probably right."""
    file = args.work / f"matches{'-own' * args.own}.pt"
    if not file.exists():
        model = DenseFeatures.from_pretrained(device="cpu")
        if args.own:
            own = DenseFeatures.from_pretrained(folder.model, device="cpu")
            own.reliability, own.cohort, model = model.reliability, model.cohort, own
        photos = [folder.pixels[row, :, :h, :w] for row, (h, w) in enumerate(folder.sizes.tolist())]
        seen = model.extract(photos)
        vectors = torch.stack([
            F.normalize(one.lower.flatten(1).float(), dim=0) @ one.confidence.flatten().square()
            for one in seen
        ])  # fmt: skip
        vectors = F.normalize(
            F.normalize(vectors, dim=1) - F.normalize(vectors, dim=1).mean(0), dim=1
        )
        alike = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
        rows = []
        for i, others in enumerate(alike.topk(args.partners).indices.tolist()):
            for j in others:
                found = match_points(seen[i], seen[j], count=MATCHES, mutual=True)
                rows.append((i, j, found.points0, found.points1, found.probability, found.margin))
        torch.save(rows, file)
    edges: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for i, j, points0, points1, probability, margin in torch.load(file):
        sure = margin >= margin.median() if args.own else probability >= args.least
        if int(sure.sum()) >= 8:
            edges.setdefault(i, []).append((j, points0[sure], points1[sure]))
    return edges


def inside(points: Tensor, side: int) -> Tensor:
    return ((points >= -0.5) & (points <= side - 0.5)).all(-1)


def train(
    model: DenseFeatures, folder: Folder, edges: Edges, share: float, args: argparse.Namespace
) -> None:
    """Steps of the head; a share of each batch leads to other photos."""
    config = replace(folder.config, train=replace(folder.config.train, steps=args.steps))
    settings, side, count = config.train, config.warp.size, config.loss.points
    to_source = folder.kept.to_source
    photos, views = to_source.shape[:2]
    model.set_trained("head", batch_norm="frozen")
    optimiser = loop.make_optimiser(
        settings.optimiser, [(model.head.parameters(), settings.head_lr * args.rate)],
        weight_decay=settings.weight_decay,
    )  # fmt: skip
    for step in range(args.steps):
        draws = step_draws(step + 7919, config, torch.device("cpu"))
        generator = torch.Generator().manual_seed(step)
        rows = batch_indices(step, batch=settings.batch, count=photos, seed=5)
        first = (draws.affine[:, 0, 0] * views).long()
        second = (first + 1 + (draws.affine[:, 1, 0] * (views - 1)).long()) % views
        warp = compose(invert(to_source[rows, second]), to_source[rows, first])
        points0, points1, valid = shared_points(warp, draws, side=side, count=count)
        others = rows.clone()
        for b in range(round(settings.batch * share)):
            known = edges.get(int(rows[b]))
            if not known:
                continue
            other, here, there = known[int(torch.randint(len(known), (), generator=generator))]
            view = int(torch.randint(views, (), generator=generator))
            here = apply_affine(invert(to_source[rows[b], first[b]]), here)
            there = apply_affine(invert(to_source[other, view]), there)
            both = (inside(here, side) & inside(there, side)).nonzero()[:, 0]
            if len(both) >= FEWEST:
                both = both[torch.randint(len(both), (count,), generator=generator)]
                points0[b], points1[b], valid[b] = here[both], there[both], True
                others[b], second[b] = other, view
        maps = [
            torch.cat([layer[rows, first], layer[others, second]]).float()
            for layer in folder.kept.maps
        ]
        with half_precision(torch.device("cpu"), settings):
            described = model.from_frozen(maps, "head")
        hold = torch.tensor(not args.own and step < HELD)
        loss, _ = loss_of_maps(described, (points0, points1, valid), config.loss, hold)
        factor = loop.rate(step, args.steps, warmup=20, decay="cosine")
        loop.descend(optimiser, loss.total, factor=factor, clip=settings.clip)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--set", choices=tuple(RECIPE), required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--share", type=float, nargs="*", default=[0.0, 0.5])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1.0, help="in those of preset quick")
    parser.add_argument("--partners", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.5, help="probability of a match")
    parser.add_argument("--every", type=int, default=2, help="of the pairs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    journal = args.work / "scores.jsonl"
    if args.out:
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        write_json(args.out, {
            "row": "matches between photos beside warps", "benchmark": args.set,
            "split": "development pairs", "metrics": lines, "config": {"recipe": RECIPE[args.set]},
            "weights_sha256": None, **environment("cpu"),
        })  # fmt: skip
        return
    folder = learn_folder(args)
    asked = SimpleNamespace(
        birds=args.data / "cub-dev", pf_pascal=args.data / "pf-pascal", rehearse=False
    )
    pairs = load_sets(asked)[args.set].every(args.every)  # type: ignore[arg-type]
    edges = find_matches(folder, args)
    for share in args.share:
        model = DenseFeatures.from_pretrained(folder.model if args.own else None, device="cpu")
        train(model, folder, edges, share, args)
        scores = both_ways(pairs.features(model.eval(), args.work / "layers"), pairs.pairs)
        settings = {n: getattr(args, n) for n in ("own", "steps", "rate", "partners", "least")}
        line = settings | {"share": share, "pck": scores, **environment("cpu")}
        print(line, flush=True)
        with journal.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

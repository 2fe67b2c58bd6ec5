"""What serves any folder: recipes, layers and votes on pairs of PF-PASCAL and of birds together.

    python benchmarks/experiments/anyfolder.py STAGE --pf-pascal DIR --birds DIR --runs DIR
        --init resnet50.safetensors
      train   --voc PHOTOS [--recipes NAME ...] [--seeds 0 1 2] [--without-sigma]
      measure --out FILE.json
      search  --out FILE.json [--tries 800]
      cycles  --out FILE.json

`train` learns each recipe once per seed into RUNS/NAME/SEED and leaves alone what is there.
`measure` has PCK of all of them by nearest neighbour, with the package's votes and with lighter
ones; `search` draws settings of votes, then layers, for the models of GROUPS together; `cycles`
sends points around without labels and asks whether models rank as in `measure`. Each adds its part
to FILE. PHOTOS: a folder, shards or a list, as of `surefeat pretrain`; the birds' DIR has pairs.csv
and photos/. `--rehearse` does everything with next to nothing, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from anyfolder_votes import (
    TAPS,
    Pairs,
    PairVoting,
    load_squares,
    located,
    mixed,
    pck,
    returned,
    seen,
    similarities,
    triples,
)
from recipe import changed

from surefeat.core.files import choose_device, environment, write_json
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair, load_pairs
from surefeat.learn.config import Config, Preset, preset
from surefeat.learn.pretrain import pretrain
from surefeat.match.search import Voting
from surefeat.model.network import DenseFeatures

Folder = Literal["voc", "birds", "pf-pascal"]

SOFT: dict[str, Any] = {}
MID = {"warp.rotation": 22.0, "warp.linear": 0.25, "warp.zoom": (0.6, 1.4)}
WIDE = {"warp.rotation": 30.0, "warp.linear": 0.3, "warp.zoom": (0.5, 1.5)}
FEW = {"train.steps": 2, "train.batch": 2, "warp.size": 96, "loss.points": 40}


@dataclass(frozen=True)
class Recipe:
    """What is learned from which photos."""

    folder: Folder
    views: Mapping[str, Any]
    mirrored: float
    photos: int = 400
    """Of birds: those that are in no pair first, then the others without their labels."""
    steps: int = 500
    start: str = ""
    """The recipe whose first seed it starts from; none: ImageNet's weights."""
    kept: int = 0
    """Views of each photo that are kept, with preset `quick`; 0: new views at every step."""

    def config(self, *, seed: int, sigma: bool) -> Config:
        """Of preset `ours` or `quick`, with nothing held out."""
        base: Preset = "quick" if self.kept else "ours"
        values = {"warp.mirrored": self.mirrored, "train.steps": self.steps, "train.seed": seed}
        values |= {"data.held_out": 0, "train.check_every": 0, "train.checkpoint_every": 10**9}
        values |= {"train.compile": "off", "loss.kind": "probabilistic" if sigma else "plain"}
        if self.kept:
            values |= {"train.kept_views": self.photos * self.kept}
            values |= {"loss.sigma_warmup": 3 * self.steps // 10}
            values |= {"train.lr_warmup": min(20, self.steps // 4 + 1)}
        return changed(preset(base), values | dict(self.views))


VOC = "voc soft .2"
RECIPES: dict[str, Recipe] = {
    VOC: Recipe("voc", SOFT, 0.2),
    "voc soft 0": Recipe("voc", SOFT, 0.0),
    "voc wide .5": Recipe("voc", WIDE, 0.5),
    "pf soft 0": Recipe("pf-pascal", SOFT, 0.0),
    "pf soft .2": Recipe("pf-pascal", SOFT, 0.2),
    "pf mid .3": Recipe("pf-pascal", MID, 0.3),
    "pf wide .5": Recipe("pf-pascal", WIDE, 0.5),
    "birds soft 0": Recipe("birds", SOFT, 0.0),
    "birds soft .2": Recipe("birds", SOFT, 0.2),
    "birds mid .3": Recipe("birds", MID, 0.3),
    "birds wide 0": Recipe("birds", WIDE, 0.0),
    "birds wide .5": Recipe("birds", WIDE, 0.5),
    "birds wide .5, from voc soft .2": Recipe("birds", WIDE, 0.5, start=VOC),
    "50 birds wide .5, 250 steps": Recipe("birds", WIDE, 0.5, photos=50, steps=250),
    "200 birds wide .5, 250 steps": Recipe("birds", WIDE, 0.5, photos=200, steps=250),
    "600 birds wide .5": Recipe("birds", WIDE, 0.5, photos=600),
    "1200 birds wide .5": Recipe("birds", WIDE, 0.5, photos=1200),
    "kept 200 x 4, 100 steps": Recipe("birds", WIDE, 0.5, 200, 100, VOC, 4),
    "kept 200 x 4, 200 steps": Recipe("birds", WIDE, 0.5, 200, 200, VOC, 4),
    "kept 200 x 4, 200 steps, mid .3": Recipe("birds", MID, 0.3, 200, 200, VOC, 4),
    "kept 200 x 4, 200 steps, from ImageNet": Recipe("birds", WIDE, 0.5, 200, 200, kept=4),
    "kept 50 x 8, 200 steps": Recipe("birds", WIDE, 0.5, 50, 200, VOC, 8),
}
"""Folder, views, share of mirrored pairs."""

CHOSEN = "descriptors .7 + res4e"
LAYERS: dict[str, dict[str, float]] = {
    CHOSEN: {"descriptors": 0.7, "res4e": 1.0},
    "descriptors .5 + res4c": {"descriptors": 0.5, "res4c": 1.0},
    "res5c + res4e": {"res5c": 1.0, "res4e": 1.0},
    "res5b + res5c + res4d + res4f": dict.fromkeys(("res5b", "res5c", "res4d", "res4f"), 1.0),
    "descriptors + res5b + res5c + res4d + res4e": dict.fromkeys(
        ("descriptors", "res5b", "res5c", "res4d", "res4e"), 1.0
    ),
}
LIGHT = PairVoting(
    Voting(temperature=0.03, reach=0.5, blur=1.5, weight=0.2, floor=0.03), (0.0, -15.0, 15.0),
    leaning=0.85, sized=0.95, mirrored=1.0, agreement=2.0, facing=0.5,
)  # fmt: skip
"""Less weight, and poses that the whole pair agrees on: about as good as the package's."""
WAYS = {"nearest": None, "voting": Voting(), "light": LIGHT}

GROUPS = (
    (VOC, "pf-pascal", 1.0), (VOC, "birds", 1.0), ("birds wide .5", "birds", 0.7),
    ("pf soft .2", "pf-pascal", 0.5),
)  # fmt: skip
"""Recipe, set and weight in the goal of the search, which adds up PCK@0.1."""


# Trainings.


def bird_photos(folder: Path, count: int) -> list[Path]:
    """So many photos, shuffled; those that are in no pair first."""
    used = {p.name for pair in load_pairs(folder / "pairs.csv") for p in (pair.image0, pair.image1)}
    photos = sorted((folder / "photos").iterdir())
    generator, shuffled = random.Random(0), []
    for paired in (False, True):
        part = [photo for photo in photos if (photo.name in used) == paired]
        generator.shuffle(part)
        shuffled += part
    return shuffled[:count]


def source_of(recipe: Recipe, args: argparse.Namespace) -> tuple[Path, list[Path] | None]:
    """Where the photos are, and which of them; None: all."""
    if recipe.folder == "voc":
        return args.voc, None
    if recipe.folder == "birds":
        return args.birds / "photos", bird_photos(args.birds, recipe.photos)
    val, train = development_pairs(args.pf_pascal)
    photos = sorted({path for pair in val + train for path in (pair.image0, pair.image1)})
    return photos[0].parent, photos


def train(args: argparse.Namespace, device: torch.device) -> None:
    for name in args.recipes:
        recipe = RECIPES[name]
        source, photos = source_of(recipe, args)
        start = args.runs / recipe.start / "seed 0" / "model" if recipe.start else args.init
        for seed in args.seeds:
            config = recipe.config(seed=seed, sigma=not args.without_sigma)
            if args.rehearse:
                config, photos = changed(config, FEW), photos and photos[:8]
            run = args.runs / name / f"seed {seed}{', without sigma' * args.without_sigma}"
            if (run / "model").exists():
                continue
            listed = None
            if photos is not None:
                listed = args.runs / name / "photos.txt"
                listed.parent.mkdir(parents=True, exist_ok=True)
                listed.write_text("".join(f"{photo.name}\n" for photo in photos))
            done = pretrain(
                source, out=run, config=config, init=start, keep=listed, device=device, quiet=True
            )
            print(f"{name}, {run.name}: {done.progress.seconds:.0f} s", flush=True)


# Models and sets.


def load_sets(args: argparse.Namespace, device: torch.device) -> dict[str, Pairs]:
    val, train = development_pairs(args.pf_pascal)
    birds = [replace(pair, category="bird") for pair in load_pairs(args.birds / "pairs.csv")]
    lists: dict[str, list[Pair]] = {"pf-pascal": val + train, "birds": birds}
    most = 4 if args.rehearse else None
    return {name: load_squares(pairs[:most], device) for name, pairs in lists.items()}


def models(
    args: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, DenseFeatures, tuple[str, ...]]]:
    """Title, model and the sets it is measured on; first the untrained one."""
    torch.manual_seed(0)
    untrained = DenseFeatures.create(preset("ours").model, init=args.init)
    both = ("pf-pascal", "birds")
    yield "untrained", untrained.eval().to(device), both
    for name, recipe in RECIPES.items():
        for folder in sorted((args.runs / name).glob("seed */model")):
            sets = both if recipe.folder == "voc" else (recipe.folder,)
            model = DenseFeatures.from_pretrained(folder, device=device)
            yield f"{name}, {folder.parent.name}", model, sets


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Model -> set -> layers -> way -> PCK at 0.05 and 0.1."""
    sets, scores = load_sets(args, device), dict[str, Any]()
    for title, model, names in models(args, device):
        scores[title] = {}
        for name in names:
            pairs = sets[name]
            layers = similarities(model, pairs, Voting().grid)
            scores[title][name] = {
                mixture: {way: pck(pairs, located(mixed(layers, weights), pairs, voting))
                          for way, voting in WAYS.items()}
                for mixture, weights in LAYERS.items()
            }  # fmt: skip
        print(title, {name: table[CHOSEN] for name, table in scores[title].items()}, flush=True)
    return scores


# The search.


def draw_voting(generator: random.Random) -> PairVoting:
    pick = generator.choice
    voting = Voting(
        temperature=pick([0.008, 0.012, 0.015, 0.02, 0.03]), reach=pick([0.2, 0.25, 0.35, 0.5]),
        blur=pick([1.0, 1.5, 2.0, 2.5]), weight=pick([0.15, 0.2, 0.3, 0.4]),
        floor=pick([0.03, 0.05, 0.1, 0.2]),
    )  # fmt: skip
    return PairVoting(
        voting, angles=pick([(0.0,), (0.0, -15.0, 15.0), (0.0, -20.0, 20.0)]),
        scales=pick([(1.0,), (1.0, 0.8, 1.25)]), leaning=pick([0.6, 0.75, 0.85, 0.95]),
        sized=pick([0.6, 0.75, 0.85, 0.95]), mirrored=pick([0.7, 0.8, 0.9, 1.0]),
        agreement=pick([0.0, 0.5, 1.0, 2.0]), facing=pick([0.0, 0.0, 0.5, 1.0, 2.0, 4.0]),
        coarse=pick([1.0, 2.0]),
    )  # fmt: skip


def draw_layers(generator: random.Random) -> dict[str, float]:
    """Weights of some layers; the descriptors are always among them."""
    shares = (0.0, 0.3, 0.5, 1.0)
    drawn = {tap: generator.choice(shares) for tap in TAPS}
    return {"descriptors": generator.choice(shares[1:])} | {k: w for k, w in drawn.items() if w}


def search(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The best settings of votes, then the best layers with them: on half of the pairs, on all."""
    sets, generator, known = load_sets(args, device), random.Random(1), {}
    for recipe, name, _ in GROUPS:
        folder = args.runs / recipe / "seed 0" / "model"
        model = DenseFeatures.from_pretrained(folder, device=device)
        known[recipe, name] = similarities(model, sets[name], Voting().grid)

    def row(weights: Mapping[str, float], voting: PairVoting, step: int) -> dict[str, Any]:
        scores, goal = {}, 0.0
        for recipe, name, share in GROUPS:
            layers = {k: (p[::step], c[::step]) for k, (p, c) in known[recipe, name].items()}
            pairs = sets[name].every(step)
            scores[f"{name}, {recipe}"] = score = pck(
                pairs, located(mixed(layers, weights), pairs, voting)
            )
            goal += share * score[1]
        return {"goal": round(goal, 2), "layers": weights, "pck": scores, "settings": voting}

    def best(tries: list[tuple[dict[str, float], PairVoting]]) -> tuple[list[Any], list[Any]]:
        rows = sorted((row(*one, 2) for one in tries), key=lambda one: -one["goal"])
        again = [row(one["layers"], one["settings"], 1) for one in rows[:10]]
        return rows[:20], sorted(again, key=lambda one: -one["goal"])

    mixtures, tries = list(LAYERS.values()), range(args.tries)
    votes = best([(generator.choice(mixtures), draw_voting(generator)) for _ in tries])
    chosen = votes[1][0]["settings"]
    layers = best([(draw_layers(generator), chosen) for _ in tries])
    parts: dict[str, Any] = {"tries of each": args.tries}
    for what, (half, whole) in (("settings", votes), ("layers", layers)):
        for pairs, rows in (("every second pair", half), ("all pairs", whole)):
            plain = [one | {"settings": asdict(one["settings"])} for one in rows]
            parts[f"{what}, {pairs}"] = plain
    return parts


# Cycles.


def cycles(args: argparse.Namespace, device: torch.device, known: Any) -> dict[str, Any]:
    """What comes back of each model, and its rank correlation with PCK@0.1 of `measure`."""
    from scipy.stats import spearmanr

    sets, back = load_sets(args, device), dict[str, Any]()
    chosen = {name: triples(pairs.categories, 4 if args.rehearse else 300)
              for name, pairs in sets.items()}  # fmt: skip
    weights = LAYERS[CHOSEN]
    for title, model, names in models(args, device):

        def look(images: torch.Tensor, model: DenseFeatures = model) -> list[Any]:
            maps = seen(model, images, ("res4e",))
            return [(maps[name], w / sum(weights.values())) for name, w in weights.items()]

        back[title] = {name: returned(look, sets[name].images, chosen[name]) for name in names}
        print(title, back[title], flush=True)
    ranks: dict[str, Any] = {}
    for name in sets:
        titles = [title for title in back if name in back[title] and name in known.get(title, {})]
        ranks[name] = {"models": len(titles)}
        for way in ("nearest", "voting"):
            scores = [known[title][name][CHOSEN][way][1] for title in titles]
            ranks[name][way] = {
                kind: round(float(spearmanr(scores, [back[t][name][kind] for t in titles])[0]), 3)
                for kind in ("mirrored", "shifted", "same")
            }
    return {"returned": back, "rank correlation with pck@0.1": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("train", "measure", "search", "cycles"))
    for name in ("--birds", "--pf-pascal", "--init", "--runs"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--voc", type=Path)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--out", type=Path, default=Path("anyfolder.json"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--without-sigma", action="store_true")
    parser.add_argument("--tries", type=int, default=800)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    device = choose_device(None)
    if args.stage == "train":
        if args.voc is None and any(RECIPES[name].folder == "voc" for name in args.recipes):
            parser.error("recipes of VOC need photos: pass --voc PHOTOS, or other --recipes")
        train(args, device)
        return
    stored = json.loads(args.out.read_text())["metrics"] if args.out.exists() else {}
    if args.stage == "cycles":
        if "measure" not in stored:
            raise SystemExit(f"{args.out} has no PCK to compare with; run `measure` first")
        part = cycles(args, device, stored["measure"])
    else:
        part = {"measure": measure, "search": search}[args.stage](args, device)
    recipes = {name: asdict(recipe) for name, recipe in RECIPES.items()}
    write_json(args.out, {
        "row": "search", "benchmark": "pf-pascal and birds", "split": "development pairs",
        "metrics": stored | {args.stage: part},
        "config": {"recipes": recipes, "layers": LAYERS, "light": asdict(LIGHT)},
        "weights_sha256": None, **environment(device),
    })  # fmt: skip


if __name__ == "__main__":
    main()

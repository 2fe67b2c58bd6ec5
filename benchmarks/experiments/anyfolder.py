"""What serves any folder: recipes and settings of the votes, on PF-PASCAL and on birds together.

    python benchmarks/experiments/anyfolder.py STAGE --pf-pascal DIR --birds DIR --runs DIR
      train   --init resnet50.safetensors --voc PHOTOS [--recipes NAME ...] [--seeds 0 1 2]
              [--without-sigma]
      measure --out FILE.json [--recipes NAME ...] [--weights .7 1]
      sizes   --out FILE.json --inputs 320 256+384 ...
      search  --out FILE.json [--tries 40]

`train` learns each recipe once per seed into RUNS/NAME/SEED and leaves alone what is there; folders
are learned from the model that ships. `measure` has PCK of all of them by nearest neighbour and by
the package's votes, with --weights also where descriptors count otherwise; `sizes` has that of the
model that ships, its photos seen at several sizes; `search` draws
settings of the votes and weights of the layers for the models of GROUPS together. Both use the
package's own matching, on development pairs alone, and add their part to FILE. With --keep FOLDER
`measure` keeps the trunk's layers of every photo there, which models that differ in the head share.
PHOTOS: a folder, shards or a list, as of `surefeat pretrain`; the birds' DIR has pairs.csv and
photos/. `--rehearse` does everything with next to nothing, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from recipe import changed
from reliability_cases import Photo
from reliability_seen import Layers, Seen
from torch import Tensor

from surefeat.core.files import choose_device, environment, write_json
from surefeat.core.image import decode, read_bytes
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair, load_pairs
from surefeat.learn.config import Config, Preset, preset
from surefeat.learn.pretrain import pretrain
from surefeat.match.search import find, prepare_pair, vote
from surefeat.match.votes import Voting
from surefeat.measure.metrics import pck_over_pairs
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features, join_scales
from surefeat.model.network import DenseFeatures

Folder = Literal["voc", "birds", "pf-pascal"]

SOFT: dict[str, Any] = {}
WIDE = {"warp.rotation": 30.0, "warp.linear": 0.3, "warp.zoom": (0.5, 1.5)}
LAST = {"model.head": "linear", "train.trained": "last", "train.head_lr": 1e-3}
FEW = {"train.steps": 2, "train.batch": 2, "warp.size": 96, "loss.points": 40}


@dataclass(frozen=True)
class Recipe:
    """What is learned from which photos; a share of mirrored pairs and settings beside `ours`."""

    folder: Folder
    mirrored: float
    settings: Mapping[str, Any]
    photos: int = 400
    """Of birds: those that are in no pair first, then the others without their labels."""
    steps: int = 500
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
        return changed(preset(base), values | dict(self.settings))


VOC = "voc"
MIDDLING = {"warp.rotation": 22.0, "warp.linear": 0.25, "warp.zoom": (0.6, 1.4)}
LEARNS_RES5 = {"train.trained": "last"}
FASTER = {"train.head_lr": 1e-3}

FOLDERS: dict[str, tuple[float, dict[str, Any]]] = {
    "soft, .1 mirrored": (0.1, SOFT),
    "middling, .2 mirrored": (0.2, MIDDLING),
    "wide, .1 mirrored": (0.1, WIDE),
    "wide, .3 mirrored": (0.3, WIDE),
    "wide, .3 mirrored, twice the rate": (0.3, WIDE | FASTER),
    "wide, .3 mirrored, res5 learns too": (0.3, WIDE | LEARNS_RES5),
}
"""Ways to learn from a folder, from the model that ships: each is tried on both sets' photos."""

RECIPES: dict[str, Recipe] = {
    VOC: Recipe("voc", 0.1, SOFT),
    "voc, wide": Recipe("voc", 0.1, WIDE),
    "voc, linear head, res5 learns": Recipe("voc", 0.2, LAST),
    **{f"400 birds, {way}": Recipe("birds", *how) for way, how in FOLDERS.items()},
    **{f"PF-PASCAL, {way}": Recipe("pf-pascal", *how) for way, how in FOLDERS.items()},
    "50 birds, wide, .3 mirrored": Recipe("birds", 0.3, WIDE, photos=50, steps=250),
    "200 birds, wide, .3 mirrored": Recipe("birds", 0.3, WIDE, photos=200, steps=250),
    "600 birds, wide, .3 mirrored": Recipe("birds", 0.3, WIDE, photos=600, steps=375),
    "1200 birds, soft, .1 mirrored": Recipe("birds", 0.1, SOFT, photos=1200),
    "1200 birds, wide, .3 mirrored": Recipe("birds", 0.3, WIDE, photos=1200),
    "1200 birds, wide, .3 mirrored, 1,000 steps": Recipe(
        "birds", 0.3, WIDE | {"train.decay": "cosine"}, photos=1200, steps=1000
    ),
    "1200 birds, wide, .3 mirrored, res5 learns too": Recipe(
        "birds", 0.3, WIDE | LEARNS_RES5, photos=1200
    ),
    "200 birds, kept x 6": Recipe("birds", 0.1, SOFT, 200, 200, 6),
    "200 birds, kept x 6, wide, .3 mirrored": Recipe("birds", 0.3, WIDE, 200, 200, 6),
    "200 birds, kept x 6, wide, .1 mirrored": Recipe("birds", 0.1, WIDE, 200, 200, 6),
    "PF-PASCAL, kept x 6, wide, .1 mirrored": Recipe("pf-pascal", 0.1, WIDE, 200, 200, 6),
    "PF-PASCAL, kept x 6": Recipe("pf-pascal", 0.1, SOFT, 200, 200, 6),
    "PF-PASCAL, kept x 6, wide, .3 mirrored": Recipe("pf-pascal", 0.3, WIDE, 200, 200, 6),
}

GROUPS = (
    (VOC, "pf-pascal", 1.0),
    (VOC, "birds", 1.0),
    ("400 birds, wide, .3 mirrored", "birds", 0.5),
)
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
        start = args.init if recipe.folder == "voc" else "shipped"
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


@dataclass(frozen=True)
class Set:
    """Development pairs, and their photos in memory."""

    pairs: list[Pair]
    pixels: dict[Path, Tensor]
    """(3, H, W) uint8."""

    def features(self, model: DenseFeatures, keep: Path | None = None) -> Mapping[Path, Features]:
        """keep: a folder for the trunk's layers; without one all features stay in memory."""
        if keep is not None:
            return KeptFeatures(model, self.pixels, keep)
        return dict(zip(self.pixels, model.extract(list(self.pixels.values())), strict=True))

    def every(self, step: int) -> Set:
        """Each step-th pair alone, and its photos."""
        pairs = self.pairs[::step]
        used = {path for pair in pairs for path in (pair.image0, pair.image1)}
        return Set(pairs, {path: one for path, one in self.pixels.items() if path in used})


class KeptFeatures(Mapping[Path, Features]):
    """Features of photos by one model, from layers on disk, whenever they are asked for."""

    def __init__(self, model: DenseFeatures, pixels: Mapping[Path, Tensor], keep: Path) -> None:
        none, size = torch.zeros(0, 4), (0, 0)
        self._photos = {
            path: Photo(f"{path.parent.name}/{path.name}", lambda one=one: one, size,
                        frozenset(), "", none)
            for path, one in pixels.items()
        }  # fmt: skip
        self._seen = Seen(model, Layers(model, keep, model.config.longest_side))
        self._seen.layers.add(list(self._photos.values()))

    def __getitem__(self, path: Path) -> Features:
        return self._seen.features(self._photos[path])

    def __iter__(self) -> Iterator[Path]:
        return iter(self._photos)

    def __len__(self) -> int:
        return len(self._photos)


def read_photo(path: Path) -> Tensor:
    """(3, H, W) uint8."""
    return decode(read_bytes(path, name=path.name), name=path.name)


def load_sets(args: argparse.Namespace) -> dict[str, Set]:
    val, train = development_pairs(args.pf_pascal)
    birds = [replace(pair, category="bird") for pair in load_pairs(args.birds / "pairs.csv")]
    sets = {}
    for name, pairs in (("pf-pascal", val + train), ("birds", birds)):
        pairs = pairs[: 4 if args.rehearse else None]
        paths = sorted({path for pair in pairs for path in (pair.image0, pair.image1)})
        with ThreadPoolExecutor(8) as pool:
            pixels = dict(zip(paths, pool.map(read_photo, paths), strict=True))
        sets[name] = Set(pairs, pixels)
    return sets


@torch.no_grad()
def pck(
    known: Mapping[Path, Features],
    pairs: Sequence[Pair],
    voting: Voting | None,
    weights: tuple[float, float] = POINT_WEIGHTS,
) -> list[float]:
    """Percent of keypoints right by the scnet rule at 0.05 and 0.1, mean over pairs."""
    predictions = []
    for pair in pairs:
        sides = prepare_pair(
            known[pair.image0], known[pair.image1], descriptor_weight=weights[0],
            lower_weight=weights[1],
        )  # fmt: skip
        votes = vote(*sides, voting) if voting else None
        points = pair.points0.to(sides[0].points)
        predictions.append(find(*sides, points, votes, refine=True).points)
    # One copy from the device for all pairs, instead of one for each.
    places = torch.cat(predictions).cpu().split([len(some) for some in predictions])
    result = pck_over_pairs(places, pairs, convention="scnet", alphas=(0.05, 0.1))
    return [round(100 * share, 2) for share in result.per_image]


def models(
    args: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, DenseFeatures, tuple[str, ...]]]:
    """Title, model and the sets it is measured on."""
    for name in args.recipes:
        for folder in sorted((args.runs / name).glob("seed */model")):
            if folder.parent.name.endswith("without sigma") != args.without_sigma:
                continue
            both = RECIPES[name].folder == "voc"
            sets = ("pf-pascal", "birds") if both else (RECIPES[name].folder,)
            model = DenseFeatures.from_pretrained(folder, device=device)
            yield f"{name}, {folder.parent.name}", model, sets


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Model -> set -> way -> PCK at 0.05 and 0.1."""
    sets = {name: one.every(args.every) for name, one in load_sets(args).items()}
    scores = dict[str, Any]()
    for title, model, names in models(args, device):
        scores[title] = {}
        for name in names:
            known = sets[name].features(model, args.keep)
            scores[title][name] = both_ways(known, sets[name].pairs) | {
                f"voting, descriptors {weight:g}": pck(
                    known, sets[name].pairs, Voting(), (weight, 1.0)
                )
                for weight in args.weights
            }
        print(title, scores[title], flush=True)
    return scores


def both_ways(known: Mapping[Path, Features], pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Way -> PCK at 0.05 and 0.1."""
    ways = {"nearest": None, "voting": Voting()}
    return {way: pck(known, pairs, voting) for way, voting in ways.items()}


def measure_sizes(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Sides, as 256+384 -> set -> way -> PCK at 0.05 and 0.1, of the model that ships."""
    sets, scores = load_sets(args), dict[str, Any]()
    model = DenseFeatures.from_pretrained(device=device)
    for sides in args.inputs:
        scores[sides] = {}
        for name, one in sets.items():
            pixels = list(one.pixels.values())
            seen = [model.extract(pixels, longest_side=int(n)) for n in sides.split("+")]
            joined = map(join_scales, zip(*seen, strict=True))
            scores[sides][name] = both_ways(dict(zip(one.pixels, joined, strict=True)), one.pairs)
        print(sides, scores[sides], flush=True)
    return scores


# The search.


def draw(generator: random.Random) -> tuple[Voting, tuple[float, float]]:
    """Settings of the votes, and what descriptors and lower layers count."""
    pick = generator.choice
    voting = Voting(
        temperature=pick([0.02, 0.03, 0.04]), reach=pick([0.2, 0.25, 0.35]),
        blur=pick([1.0, 1.5, 2.0]), weight=pick([0.2, 0.3, 0.4, 0.5]),
        doubt=pick([0.25, 0.35, 0.45]), floor=pick([0.05, 0.1, 0.2]),
        turned=pick([0.9, 0.95, 1.0]), decisive=pick([5.0, 10.0, 20.0, 40.0]),
    )  # fmt: skip
    return voting, (pick([0.2, 0.4, 0.7]), 1.0)


def search(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The package's settings and drawn ones, on every third pair; the best ten on all."""
    sets, generator, known = load_sets(args), random.Random(args.seeds[0]), {}
    for recipe, name, _ in GROUPS:
        folder = args.runs / recipe / "seed 0" / "model"
        known[recipe, name] = sets[name].features(
            DenseFeatures.from_pretrained(folder, device=device)
        )

    def row(voting: Voting, weights: tuple[float, float], step: int) -> dict[str, Any]:
        scores = {
            f"{name}, {recipe}": pck(
                known[recipe, name], sets[name].every(step).pairs, voting, weights
            )
            for recipe, name, _ in GROUPS
        }
        goal = sum(s[1] * share for s, (*_, share) in zip(scores.values(), GROUPS, strict=True))
        line = {"goal": round(goal, 2), "pck": scores, "weights": weights, "voting": voting}
        print(line, flush=True)
        return line

    tries = [(Voting(), POINT_WEIGHTS)] + [draw(generator) for _ in range(args.tries)]
    some = sorted((row(*one, 3) for one in tries), key=lambda line: -line["goal"])
    whole = [row(line["voting"], line["weights"], 1) for line in some[:6]]
    whole.append(row(Voting(), POINT_WEIGHTS, 1))
    return {
        part: [line | {"voting": asdict(line["voting"])} for line in lines]
        for part, lines in (("every third pair", some), ("all pairs", whole))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("train", "measure", "sizes", "search"))
    for name in ("--birds", "--pf-pascal", "--runs"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--voc", "--init", "--keep"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--weights", type=float, nargs="*", default=[])
    parser.add_argument("--inputs", nargs="*", default=[])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--out", type=Path, default=Path("anyfolder.json"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--without-sigma", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="measure: of the pairs each n-th")
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    device = choose_device(None)
    if args.stage == "train":
        asked = {RECIPES[name].folder for name in args.recipes}
        if "voc" in asked and (args.voc is None or args.init is None):
            parser.error("these recipes need --voc PHOTOS and --init FILE; or other --recipes")
        train(args, device)
        return
    stored = json.loads(args.out.read_text())["metrics"] if args.out.exists() else {}
    part = {"measure": measure, "sizes": measure_sizes, "search": search}[args.stage](args, device)
    recipes = {name: asdict(recipe) for name, recipe in RECIPES.items()}
    write_json(args.out, {
        "row": "search", "benchmark": "pf-pascal and birds", "split": "development pairs",
        "metrics": stored | {args.stage: part}, "config": {"recipes": recipes, "every": args.every},
        "weights_sha256": None, **environment(device),
    })  # fmt: skip


if __name__ == "__main__":
    main()

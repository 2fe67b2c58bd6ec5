"""The slower way: photos seen at more sizes, and each beside its mirrored copy.

    python benchmarks/experiments/slower.py measure --pf-pascal DIR --birds DIR --out PART.json
        [--model FOLDER] [--sets pf-pascal birds] [--part 1/3] [--every N]
    python benchmarks/experiments/slower.py join PART.json ... --out FILE.json

Three questions, by PCK of the default votes on development pairs of both sets:

- `sizes`: similarities are the mean over photos seen at these longest sides;
- `copies`: the mean also over the pair of mirrored photos, whose maps are turned back;
- `turned`: where the votes find that the two things face opposite ways, the second photo is matched
  mirrored, and the places found are turned back. `either`: the better of the two, which nobody
  knows; an upper bound.

`measure` keeps what it found of a pair in PART.json and goes on where it was ended.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from anyfolder import load_sets
from torch import Tensor

from surefeat.core.files import choose_device, environment, write_json
from surefeat.data.pairs import Pair
from surefeat.match.search import find, prepare_pair, vote
from surefeat.match.votes import Voting
from surefeat.measure.metrics import pck_over_pairs
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features, join_scales, turn
from surefeat.model.network import DenseFeatures

SIZES = ((320,), (256, 384), (256, 320, 384), (320, 448))

WAYS = ("as they are", "copies")

OPPOSITE = 0.5
"""Votes that give the mirrored facing more than this say that a pair faces opposite ways."""

_KEPT = 40_000
"""Feature maps held in memory at most."""


class Looks:
    """Features of photos and of their mirrored copies at every size, in half precision."""

    def __init__(self, model: DenseFeatures, pixels: Mapping[Path, Tensor]) -> None:
        self._model, self._pixels = model, pixels
        self._known: OrderedDict[tuple[Path, int, bool], Features] = OrderedDict()

    def look(self, photo: Path, side: int, mirrored: bool) -> Features:
        key = (photo, side, mirrored)
        if key not in self._known:
            pixels = self._pixels[photo]
            pixels = pixels.flip(-1) if mirrored else pixels
            features = self._model.extract([pixels], longest_side=side)[0]
            self._known[key] = replace(
                features, descriptors=features.descriptors.half(), lower=features.lower.half(),
                common=None, common_kind=None, reliability=None,
            )  # fmt: skip
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        known = self._known[key]
        return replace(known, descriptors=known.descriptors.float(), lower=known.lower.float())

    def joined(
        self, photo: Path, sizes: Sequence[int], *, copies: bool, mirrored: bool = False
    ) -> Features:
        """Of the photo, or of the mirrored one; with `copies` both are seen, and one is turned."""
        parts = [self.look(photo, side, mirrored) for side in sizes]
        if copies:
            parts += [turn(self.look(photo, side, not mirrored)) for side in sizes]
        return join_scales(parts)


def places(first: Features, second: Features, points: Tensor) -> tuple[Tensor, float]:
    """Where the votes take points of the first photo; the say of the mirrored facing."""
    sides = prepare_pair(
        first, second, descriptor_weight=POINT_WEIGHTS[0], lower_weight=POINT_WEIGHTS[1]
    )
    votes = vote(*sides, Voting())
    return find(*sides, points.to(first.uncertainty), votes, refine=True).points, votes.mirrored


@torch.no_grad()
def try_pair(looks: Looks, pair: Pair, sizes: Sequence[int], *, copies: bool) -> dict[str, Any]:
    """PCK at 0.05 and 0.1 with the second photo as it is, and mirrored; the say of the votes."""
    first = looks.joined(pair.image0, sizes, copies=copies)
    known: dict[str, Any] = {}
    for name, mirrored in (("plain", False), ("turned", True)):
        second = looks.joined(pair.image1, sizes, copies=copies, mirrored=mirrored)
        there, say = places(first, second, pair.points0)
        if mirrored:
            there = torch.stack([second.frame.original[1] - 1 - there[:, 0], there[:, 1]], -1)
        known[name] = right(there.cpu(), pair)
        known.setdefault("say", round(say, 4))
    return known


def right(there: Tensor, pair: Pair) -> list[float]:
    """Percent of the pair's points within 0.05 and 0.1, by the scnet rule."""
    result = pck_over_pairs([there], [pair], convention="scnet", alphas=(0.05, 0.1))
    return [round(100 * share, 3) for share in result.per_image]


def measure(args: argparse.Namespace) -> None:
    device = choose_device(None)
    model = DenseFeatures.from_pretrained(args.model, device=device)
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    part, parts = (int(n) for n in args.part.split("/"))
    for name, one in load_sets(args).items():
        if name not in args.sets:
            continue
        chosen = one.every(args.every)
        looks = Looks(model, chosen.pixels)
        for number, pair in list(enumerate(chosen.pairs))[part - 1 :: parts]:
            key = f"{name} {number * args.every}"
            if key in found:
                continue
            found[key] = {
                f"{'+'.join(map(str, sizes))}, {way}": try_pair(
                    looks, pair, sizes, copies=way == "copies"
                )
                for sizes in args.sizes
                for way in WAYS
            }
            if number % 20 == 0:
                write_json(args.out, found)
                print(key, flush=True)
    write_json(args.out, found)


def average(values: Sequence[Sequence[float]]) -> list[float]:
    """Of each column."""
    return [round(sum(column) / len(column), 2) for column in zip(*values, strict=True)]


def summarise(found: Mapping[str, Any], usual: str) -> dict[str, Any]:
    """Set -> way -> PCK at 0.05 and 0.1, the gain over `usual` and its standard error."""
    table: dict[str, Any] = {}
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in found):
        pairs = [tries for key, tries in sorted(found.items()) if key.startswith(f"{name} ")]
        rows: dict[str, list[list[float]]] = {}
        for tries in pairs:
            for way, known in tries.items():
                opposite = known["say"] > OPPOSITE
                better = max(known["plain"], known["turned"], key=lambda value: value[1])
                rows.setdefault(way, []).append(known["plain"])
                rows.setdefault(f"{way}, turned", []).append(
                    known["turned"] if opposite else known["plain"]
                )
                rows.setdefault(f"{way}, either", []).append(better)
        first = torch.tensor([value[1] for value in rows[usual]])
        table[name] = {"pairs": len(pairs)}
        table[name]["facing opposite ways, percent"] = round(
            100 * sum(tries[usual]["say"] > OPPOSITE for tries in pairs) / len(pairs), 1
        )
        for way, values in rows.items():
            gain = torch.tensor([value[1] for value in values]) - first
            table[name][way] = {
                "pck": average(values), "gain": round(float(gain.mean()), 2),
                "error": round(float(gain.std() / len(gain) ** 0.5), 2),
            }  # fmt: skip
    return table


def join(args: argparse.Namespace) -> None:
    found = {
        key: value for part in args.parts for key, value in json.loads(part.read_text()).items()
    }
    usual = next(iter(next(iter(found.values()))))
    table = summarise(found, usual)
    for name, rows in table.items():
        print(name)
        for way, values in rows.items():
            print(f"  {way}: {values}")
    model = DenseFeatures.from_pretrained(args.model)
    write_json(args.out, {
        "row": "the slower way", "benchmark": "pf-pascal and birds", "split": "development pairs",
        "metrics": table, "config": {"sizes": args.sizes, "every": args.every, "said": OPPOSITE},
        "weights_sha256": model.weights_sha256, **environment(choose_device(None)), "pairs": found,
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("measure", "join"))
    parser.add_argument("parts", type=Path, nargs="*")
    for name in ("--birds", "--pf-pascal"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sets", nargs="+", default=["pf-pascal", "birds"])
    parser.add_argument(
        "--sizes", nargs="+", default=SIZES, type=lambda text: tuple(map(int, text.split("+")))
    )
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    {"measure": measure, "join": join}[args.stage](args)


if __name__ == "__main__":
    main()

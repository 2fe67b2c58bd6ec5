"""`surefeat evaluate`: one frozen dataclass per measurement; heavy imports inside run()."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, Suppress, arg, subcommand

from surefeat.cli.output import Device, Json, Model, say
from surefeat.keypoints.config import PAPER, FewShot, KeypointConfig
from surefeat.measure.protocol import SHIFTED, USUAL, Measure


def _written(paths: list[Path], *, to_script: bool) -> list[Any]:
    """The results just written: said by name, or all their metrics printed for a script."""
    from surefeat.measure.results import read_result

    results = [read_result(path) for path in paths]
    metrics = {result["row"]: result["metrics"] for result in results}
    print(json.dumps(metrics) if to_script else "written: " + " ".join(map(str, paths)))
    return results


@dataclass(frozen=True)
class EvaluateFewShot:
    """Keypoints from a handful of labels: rounds of growing annotation, as in the paper."""

    data: Positional[Path]
    """Folder with keypoints_train.json and keypoints_val.json, or PASCAL3D+'s own release."""
    images: Path | None = None
    """Folder or tar shards with the photos, if not beside the data."""
    rows: tuple[str, ...] = ("ours",)
    """What is measured: ours, resnet50-hc, resnet50-dilated, vgg16, res4c, res4d, NAME=FOLDER for
    another trained model, or timm:NETWORK/TAP for a layer of a timm network."""
    model: str | None = None
    """Of the row ours: model or run folder, or one that ships (resnet50, vgg16)."""
    init: tuple[str, ...] = ("imagenet",)
    """ImageNet weights of the untrained rows: imagenet (downloaded), or files, one per trunk."""
    raw: bool = False
    """Leave the activations of untrained rows as they are, instead of unit length per layer."""
    weights: tuple[float, float] = (1.0, 1.0)
    """Of a model's descriptors and lower layer; 0 leaves one out."""
    split: Literal["val", "dev"] = "val"
    """val: train on train, measure on val. dev: both from train, to choose settings on."""
    classes: tuple[str, ...] | None = None
    """Only these, for a small trial; the result's name says so."""
    objects: int | None = None
    """At most so many per class to train and to measure on, for a small trial."""
    protocol: Annotated[FewShot, arg(name="")] = field(default_factory=FewShot)
    head: Annotated[KeypointConfig, arg(name="")] = field(default_factory=KeypointConfig)
    paper: bool = False
    """The paper's head, not what `surefeat keypoints fit` ships: 512 channels and batches of 32
    views, of which there are many. Instead of the settings above."""
    out: Path = Path("results/pascal3d")
    """Folder for pascal3d-SPLIT-ROW.json, and cache/ for what can be continued."""
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.measure.fewshot import evaluate_fewshot
        from surefeat.measure.results import Score
        from surefeat.measure.tables import markdown, round_table
        from surefeat.peers.rows import with_peers

        if self.paper and self.head != KeypointConfig():
            raise ValueError("--paper sets the head; leave out its other settings, or --paper")
        paths = evaluate_fewshot(
            self.data, images=self.images, model=self.model, init=self.init,
            rows=with_peers(self.rows, init=self.init, model=self.model, device=self.device),
            raw=self.raw, weights=self.weights, out=self.out, split=self.split,
            classes=self.classes, objects=self.objects, protocol=self.protocol,
            head=PAPER if self.paper else self.head, device=self.device, quiet=self.json,
        )  # fmt: skip
        results = _written(paths, to_script=self.json)
        for score in (Score("pck", alpha=0.1, rule="bbox"), Score("pck area", rule="bbox")):
            if not self.json:
                table = markdown(round_table(results, score), aligned=True)
                print(f"{score}, mean of classes\n\n{table}")


@dataclass(frozen=True)
class EvaluateSelf:
    """Label-free check on your own images: right under fresh warps? does confidence know it?"""

    source: Positional[Path]
    """Folder, list, tar shards or COCO json."""
    model: Model = None
    count: int = 64
    """Images to check on, drawn at random."""
    seed: int = 1
    """Of the images and warps."""
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.learn.selfcheck import check_folder

        check = check_folder(
            self.source, model=self.model, count=self.count, seed=self.seed, device=self.device
        )
        say(check.to_dict(), to_script=self.json)


@dataclass(frozen=True)
class EvaluateParts:
    """Part matching across new instances of the synthetic categories, and confidence on objects."""

    model: Model = None
    count: int = 64
    """Instances drawn."""
    size: int = 112
    """Side of an instance, pixels."""
    seed: int = 2024
    """Of the instances: not one that was trained on."""
    json: Json = False

    def run(self) -> None:
        from surefeat.data.drawn import draw_many
        from surefeat.data.drawn_categories import CATEGORIES
        from surefeat.measure.evaluate import check_parts
        from surefeat.model.network import DenseFeatures

        instances = draw_many(self.count, size=self.size, seed=self.seed)
        check = asdict(check_parts(DenseFeatures.from_pretrained(self.model), instances))
        by_name = {CATEGORIES[n].name: share for n, share in check["by_category"].items()}
        say(check | {"by_category": by_name}, to_script=self.json)


@dataclass(frozen=True)
class EvaluateMatching:
    """Semantic matching as in the paper: regions, keypoints by three routes, and controls."""

    benchmark: Suppress[Literal["pf-pascal", "pf-willow", "spair", "pairs"]]
    data: Positional[Path]
    """Folder of the benchmark in its public layout; for pairs a CSV list."""
    rows: tuple[str, ...] = ("ours",)
    """What is measured: ours, match and match-slower (ours as `surefeat match` and its --slower
    treat photos, not as squares), resnet50-hc, resnet50-dilated, vgg16, res4c, res4d, res4e, sift,
    hog, NAME=FOLDER for another trained model, or a peer (`surefeat peers list`)."""
    model: str | None = None
    """Of the row ours: model or run folder, or one that ships (resnet50, vgg16)."""
    init: tuple[str, ...] = ("imagenet",)
    """ImageNet weights of the untrained rows: imagenet (downloaded), or files, one per trunk."""
    out: Path = Path("results")
    """Folder for BENCHMARK-SPLIT-ROW.json, and cache/ for what can be continued."""
    split: str = "test"
    """pf-pascal: test, or val and train to choose settings on; spair: test, val, trn."""
    images: Path | None = None
    """Where a list finds its images, if not beside it."""
    proposals: Path | None = None
    """File with the images' proposals; what is missing is added. By default in OUT/cache."""
    boxes: int = 1000
    """Proposals per image."""
    seed: int = 0
    """Of the proposals."""
    measures: tuple[Measure, ...] = USUAL
    """nearest, voting, location: keypoints by search; regions: PCR and mIoU; flow: the
    paper's keypoints, from region matches; mean-flow: the same from regions pooled by means;
    published-flow: from regions pooled as SCNet's code does; own: keypoints as a row itself moves
    them, if it does."""
    shifted: tuple[Measure, ...] = SHIFTED
    """Those measured again with image 1 shifted."""
    side: int = 224
    """Square the images are resized to, pixels."""
    inputs: tuple[int, ...] = ()
    """Sides at which the network sees that square; with several, their scores add up."""
    pairs: int | None = None
    """Only so many, spread over the list, for a quick look; the split's name says so."""
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.measure.evaluate import evaluate_rows
        from surefeat.measure.tables import printed
        from surefeat.peers.rows import with_peers

        paths = evaluate_rows(
            self.benchmark, self.data, model=self.model, init=self.init,
            rows=with_peers(self.rows, init=self.init, model=self.model, device=self.device),
            out=self.out, split=self.split, images=self.images, proposals=self.proposals,
            boxes=self.boxes, seed=self.seed, measures=self.measures, shifted=self.shifted,
            side=self.side, inputs=self.inputs, pairs=self.pairs, device=self.device,
            quiet=self.json,
        )  # fmt: skip
        results = _written(paths, to_script=self.json)
        if not self.json:
            print(printed(results))


@dataclass(frozen=True)
class EvaluateCompare:
    """Two results on the same pairs, with a paired bootstrap of their difference."""

    first: Positional[Path]
    """Result file."""
    second: Positional[Path]
    """Result file of the same benchmark."""
    seed: int = 0
    """Of the resampling."""
    json: Json = False

    def run(self) -> None:
        from surefeat.measure.results import compare, read_result
        from surefeat.measure.tables import difference_table, markdown

        results = (read_result(self.first), read_result(self.second))
        differences = compare(*results, seed=self.seed)
        if self.json:
            print(json.dumps([one.to_dict() for one in differences]))
        else:
            names = (results[0]["row"], results[1]["row"])
            print(markdown(difference_table(differences, names), aligned=True))


@dataclass(frozen=True)
class EvaluateTables:
    """Tables and figures of all matching results: markdown, PNG and one page."""

    folder: Positional[Path] = Path("results")
    """Folder with result files."""
    out: Path = Path("results/tables")
    """Folder for results.md, the figures and index.html."""
    json: Json = False

    def run(self) -> None:
        from surefeat.show.results import write_results

        page = str(write_results(self.folder, self.out))
        say({"page": page}, to_script=self.json, words=page)


_PAIRS = "How many of your own labelled points are found in another photo, beside controls."

# One class serves four subcommands, each with its benchmark filled in.
_ON: dict[str, Any] = {
    "pf-pascal": EvaluateMatching("pf-pascal", tyro.MISSING),
    "pf-willow": EvaluateMatching("pf-willow", tyro.MISSING),
    "spair": EvaluateMatching("spair", tyro.MISSING),
    "pairs": EvaluateMatching("pairs", tyro.MISSING),
}


@dataclass(frozen=True)
class Evaluate:
    """Measure a model."""

    what: Annotated[
        Annotated[EvaluateSelf, subcommand("self")]
        | Annotated[EvaluateParts, subcommand("parts")]
        | Annotated[EvaluateMatching, subcommand("pf-pascal", default=_ON["pf-pascal"])]
        | Annotated[EvaluateMatching, subcommand("pf-willow", default=_ON["pf-willow"])]
        | Annotated[EvaluateMatching, subcommand("spair", default=_ON["spair"])]
        | Annotated[EvaluateMatching, subcommand("pairs", default=_ON["pairs"], description=_PAIRS)]
        | Annotated[EvaluateFewShot, subcommand("pascal3d")]
        | Annotated[EvaluateCompare, subcommand("compare")]
        | Annotated[EvaluateTables, subcommand("tables")],
        arg(name=""),
    ]

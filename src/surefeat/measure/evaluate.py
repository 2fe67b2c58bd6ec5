"""Models measured: as rows of a matching benchmark, and on drawn objects whose parts are known.

Interrupted, a benchmark continues where it was; what rows share is prepared once for all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import add_lines, choose_device, file_stem, read_lines
from surefeat.core.geometry import cell_centres
from surefeat.core.ranking import auroc
from surefeat.data.benchmarks import Benchmark, Name, load_benchmark
from surefeat.data.drawn import Instance, correspondences
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.match.config import ProposalConfig
from surefeat.match.sd_filter import DEFAULTS
from surefeat.measure.matching import Record, measure
from surefeat.measure.material import FeatureStore, Material, memory_for_features, prepare_material
from surefeat.measure.protocol import SHIFTED, USUAL, Measure, Protocol
from surefeat.measure.results import (
    Result,
    about_row,
    cache_file,
    read_result,
    result_of,
    write_result,
)
from surefeat.measure.rows import Row, build_row
from surefeat.measure.tables import main_table, markdown
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

RECORD_VERSION = 1
"""Part of every cache key: raised when the same settings begin to give other records."""

CHUNK = {"cuda": 128}
"""Pairs measured together, and lost when interrupted; 32 elsewhere. A GPU smooths many fields in
the time of one."""


def evaluate_row(
    row: Row, material: Material, *, out: Path, device: torch.device, quiet: bool = False
) -> Path:
    """Measure a row and write OUT/<benchmark>-<split>-<row>.json; returns its path.

    Records are appended to OUT/cache as they come: an interrupted evaluation continues there and
    gives the same result, one that was finished is read back.
    """
    config, cases = settings_of(row, material), material.cases
    stem = file_stem(material.benchmark.name, material.benchmark.split, row.name)
    decisive = [RECORD_VERSION, row.name, row.weights_sha256, config, device.type]
    cache = cache_file(out, stem, [*decisive, material.fingerprint()])
    records = _by_case(read_lines(cache))
    limit = memory_for_features(device)
    store = FeatureStore(row, material.pictures, material.protocol, device=device, limit=limit)
    start, before = time.perf_counter(), len(records)
    count = CHUNK.get(device.type, 32)
    with progress.bar(total=len(cases), desc=row.name, quiet=quiet, unit="pair") as bar:
        # Always the same chunks, whatever was done before.
        for chunk in (cases[first : first + count] for first in range(0, len(cases), count)):
            if not all((case.number, case.variant) in records for case in chunk):
                fresh = _by_case(measure(
                    chunk, row, store, material.pictures, material.protocol, material.originals
                ))  # fmt: skip
                add_lines(cache, [fresh[key] for key in fresh if key not in records])
                records = fresh | records
            bar.update(len(chunk))
    seconds = None if before else round(time.perf_counter() - start, 1)
    ordered = [records[case.number, case.variant] for case in cases]
    result = result_of(ordered, material)
    about = about_row(row, config, device=device, seconds=seconds)
    return write_result(out / f"{stem}.json", result | about)


def settings_of(row: Row, material: Material) -> dict[str, Any]:
    """Everything that decides a row's numbers, for the result file."""
    names = ("lower", "descriptor_weight", "lower_weight", "region_weights", "mean_weights",
             "unit", "confidence")  # fmt: skip
    return {
        "row": {name: getattr(row, name) for name in names} | {**row.settings},
        "protocol": asdict(material.protocol),
        "sd_filter": asdict(DEFAULTS),
    }


def _by_case(records: Sequence[Record]) -> dict[tuple[int, str], Record]:
    return {(record["pair"], record["variant"]): record for record in records}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model measured on a benchmark, and other rows beside it."""

    results: tuple[Result, ...]
    """Of the model first; each is what its file holds."""
    paths: tuple[Path, ...]
    """The result files."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Of the model, by names that say their convention, as "nearest pck@0.1 scnet"."""
        metrics: dict[str, float | None] = self.results[0]["metrics"]
        return metrics

    def table(self) -> str:
        """A line per row, as markdown."""
        return markdown(main_table(self.results))


class Options(TypedDict, total=False):
    """What an evaluation may be asked for; see evaluate_rows."""

    init: Sequence[str | Path]
    out: str | Path
    split: str
    images: str | Path | None
    proposals: str | Path | None
    boxes: int
    seed: int
    measures: Sequence[Measure]
    shifted: Sequence[Measure]
    side: int
    inputs: Sequence[int]
    pairs: int | None
    quiet: bool


def evaluate(
    model: DenseFeatures | str | Path | None,
    benchmark: Name,
    *,
    data: str | Path,
    rows: Sequence[str | Row] = (),
    device: str | torch.device | None = None,
    **options: Unpack[Options],
) -> Evaluation:
    """Measure a model on a benchmark: pf-pascal, pf-willow, spair or pairs.

    model: in memory, or a folder or shipped name; None is the default one. A run folder also says
    whether confidence was learned; a model in memory is taken to have learned it. data: the
    benchmark's folder, or the CSV list of `pairs`. rows: others to measure beside it, such as
    res4c or NAME=FOLDER. device: by default the model's own, or the best there is. options: as
    evaluate_rows takes them (init, out, split, proposals, measures, pairs, quiet ...).
    """
    with TemporaryDirectory() as folder:
        if isinstance(model, DenseFeatures):  # written out, which leaves it as it is
            device = device or model.device
            model.save_pretrained(folder)
            model = folder
        paths = evaluate_rows(
            benchmark, data, rows=("ours", *rows), model=model, device=device, **options
        )
    return Evaluation(tuple(read_result(path) for path in paths), tuple(paths))


def evaluate_rows(
    benchmark: Name, data: str | Path, *, rows: Sequence[str | Row] = ("ours",),
    model: str | Path | None = None, init: Sequence[str | Path] = ("imagenet",),
    out: str | Path = "results", split: str = "test", images: str | Path | None = None,
    proposals: str | Path | None = None, boxes: int = 1000, seed: int = 0,
    measures: Sequence[Measure] = USUAL, shifted: Sequence[Measure] = SHIFTED, side: int = 224,
    inputs: Sequence[int] = (), pairs: int | None = None,
    device: str | torch.device | None = None, quiet: bool = False,
) -> list[Path]:  # fmt: skip
    """Measure rows (see rows.build_row; built ones are taken as they are) on a benchmark.

    Returns the paths of their result files.

    Pictures, proposals and ground truth are prepared once for all rows. Interrupted, it continues
    where it was when called again with the same settings. inputs: sides at which the networks see
    the square of `side` pixels; rows are then called NAME@224+320, say.
    """
    asked = load_benchmark(benchmark, data, split=split, images=images)
    if pairs is not None:
        asked = some_pairs(asked, pairs)
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [
        row if isinstance(row, Row) else build_row(row, model=model, init=init, device=where)
        for row in rows
    ]
    # What no row can be asked need not be prepared.
    asked_of = {measure for row in built for measure in row.asked(measures)}
    if not asked_of:
        names = ", ".join(row.name for row in built)
        raise ValueError(f"{names}: nothing to measure by {', '.join(measures)}; ask for another")
    protocol = Protocol(
        side=side, inputs=tuple(inputs),
        measures=tuple(measure for measure in measures if measure in asked_of),
        shifted_measures=tuple(measure for measure in shifted if measure in asked_of),
        proposals=ProposalConfig(count=boxes, seed=seed),
    )  # fmt: skip
    if protocol.inputs:
        seen = "+".join(map(str, protocol.inputs))
        # Rows with a way of their own alone never see that square.
        built = [row if row.measures == ("own",) else replace(row, name=f"{row.name}@{seen}")
                 for row in built]  # fmt: skip
    out = Path(out)
    file = Path(proposals) if proposals else out / "cache" / f"proposals-{benchmark}.sqlite"
    material = prepare_material(asked, protocol, proposals=file, quiet=quiet)
    return [evaluate_row(row, material, out=out, device=where, quiet=quiet) for row in built]


def some_pairs(benchmark: Benchmark, count: int) -> Benchmark:
    """`count` pairs spread evenly over the benchmark; the split's name says it is not all."""
    total = len(benchmark.pairs)
    if not 1 <= count <= total:
        raise ValueError(f"{benchmark.name} has {total} pairs, so pairs={count} is not possible")
    chosen = [benchmark.pairs[i * total // count] for i in range(count)]
    return Benchmark(benchmark.name, f"{benchmark.split}-{count}-of-{total}", chosen)


@dataclass(frozen=True)
class PartCheck:
    """What was found on drawn objects that were not trained on; shares in [0, 1]."""

    accuracy: float
    """PCK@0.1: visible parts whose nearest neighbour in another instance of the category lies
    within a tenth of the image's side of the true part; mean per pair, then over ordered pairs."""
    by_category: dict[int, float]
    """The same per category."""
    object_auroc: float
    """How well confidence ranks object cells before background cells, all images together."""
    edge_auroc: float
    """The same for plain gradient energy: what needs no learning."""
    centre_auroc: float
    """The same for closeness to the image's centre."""
    pairs: int


def check_parts(model: DenseFeatures, instances: Sequence[Instance]) -> PartCheck:
    """Match all ordered pairs of instances of one category by nearest neighbour in descriptors."""
    if not instances:
        raise ValueError(f"no instances to check; draw at least {2 * len(CATEGORIES)}")
    side = instances[0].image.shape[-1]
    features = model.extract([item.image for item in instances], longest_side=side)
    hits: dict[int, list[float]] = {}
    shown = zip(instances, features, strict=True)
    for (first, features0), (second, features1) in permutations(shown, 2):
        if first.category != second.category:
            continue
        points0, points1 = correspondences(first, second)
        if len(points0):
            points = _most_similar(features0, features1, points0)
            right = (points - points1).norm(dim=1) < 0.1 * side
            hits.setdefault(first.category, []).append(right.float().mean().item())
    every = [value for values in hits.values() for value in values]
    if not every:
        raise ValueError(
            f"no two of the {len(instances)} instances show common parts of one category; draw "
            f"more, at least {2 * len(CATEGORIES)}"
        )
    return PartCheck(
        accuracy=sum(every) / len(every),
        by_category={c: sum(v) / len(v) for c, v in sorted(hits.items())},
        pairs=len(every),
        **_object_aurocs(features, instances),
    )


def _most_similar(features0: Features, features1: Features, points0: Tensor) -> Tensor:
    """Points (N, 2) of image 0 -> cell centres (N, 2) of image 1, by the descriptors alone."""
    queries = features0.at(points0)
    best = (queries @ features1.descriptors.flatten(1)).argmax(1)
    size = (features1.descriptors.shape[1], features1.descriptors.shape[2])
    centres = cell_centres(size=size, stride=features1.stride, device=best.device)
    return features1.frame.to_original(centres[best]).cpu()


def _object_aurocs(features: Sequence[Features], instances: Sequence[Instance]) -> dict[str, float]:
    """AUROC of confidence and of two baselines for telling object from background cells."""
    columns: list[Tensor] = []
    for item, one in zip(instances, features, strict=True):
        size = (one.confidence.shape[0], one.confidence.shape[1])
        # A cell is object or background by its centre's neighbourhood; mixed cells do not count.
        share = F.adaptive_avg_pool2d(item.mask[None].float(), size)[0]
        grid = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, n) for n in size), indexing="ij"))
        closeness = -grid.square().sum(0)
        edges = F.adaptive_avg_pool2d(_gradient_energy(item.image)[None], size)[0]
        columns.append(torch.stack([share, one.confidence.cpu(), edges, closeness]).flatten(1))
    share, confidence, edges, closeness = torch.cat(columns, dim=1)
    clear = (share > 0.9) | (share < 0.1)
    truth = share[clear] > 0.5
    scores = {"object": confidence, "edge": edges, "centre": closeness}
    return {f"{name}_auroc": auroc(values[clear], truth) for name, values in scores.items()}


def _gradient_energy(image: Tensor) -> Tensor:
    """(3, H, W) uint8 -> (H, W): squared gradient of the grey image, same size."""
    grey = image.float().mean(0) / 255
    across = F.pad(grey[:, 1:] - grey[:, :-1], (0, 1))
    down = F.pad(grey[1:] - grey[:-1], (0, 0, 0, 1))
    return across.square() + down.square()

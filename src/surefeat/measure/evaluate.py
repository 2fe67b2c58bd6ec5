"""Rows measured on a matching benchmark, one result file each: `surefeat evaluate BENCHMARK`.

Interrupted, an evaluation continues where it was; what rows share is prepared once for all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import torch
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, write_text
from surefeat.data.benchmarks import Benchmark, Name, load_benchmark
from surefeat.match.config import ProposalConfig
from surefeat.match.sd_filter import DEFAULTS
from surefeat.measure.matching import Record, measure
from surefeat.measure.material import FeatureStore, Material, memory_for_features, prepare_material
from surefeat.measure.protocol import MEASURES, SHIFTED, Measure, Protocol
from surefeat.measure.results import Result, read_result, result_of, write_result
from surefeat.measure.rows import Row, build_row
from surefeat.measure.tables import main_table, markdown
from surefeat.model.network import DenseFeatures

RECORD_VERSION = 1
"""Part of every cache key: raised when the same settings begin to give other records."""

CHUNK = {"cuda": 128}
"""Pairs measured together, and lost when interrupted; 32 elsewhere. A GPU smooths many fields in
the time of one."""


def evaluate_row(
    row: Row,
    material: Material,
    *,
    out: Path,
    device: torch.device,
    quiet: bool = False,
) -> Path:
    """Measure a row and write OUT/<benchmark>-<split>-<row>.json; returns its path.

    Records are appended to OUT/cache as they come: an interrupted evaluation continues there and
    gives the same result, one that was finished is read back.
    """
    config = settings_of(row, material)
    stem = f"{material.benchmark.name}-{material.benchmark.split}-{row.name}"
    cache = out / "cache" / f"{stem}-{_key(row, material, config, device)}.jsonl"
    records = read_records(cache)
    limit = memory_for_features(device)
    store = FeatureStore(row, material.pictures, material.protocol, device=device, limit=limit)
    start, before = time.perf_counter(), len(records)
    with tqdm(total=len(material.cases), desc=row.name, disable=quiet, unit="pair") as bar:
        for chunk in _chunks(material, CHUNK.get(device.type, 32)):
            if not all((case.number, case.variant) in records for case in chunk):
                fresh = _by_case(measure(chunk, row, store, material.pictures, material.protocol))
                _append(cache, [fresh[key] for key in fresh if key not in records])
                records = fresh | records
            bar.update(len(chunk))
    seconds = time.perf_counter() - start
    ordered = [records[case.number, case.variant] for case in material.cases]
    result = result_of(ordered, material, rated=row.confidence) | {
        "row": row.name,
        "config": config,
        "weights_sha256": row.weights_sha256,
        "seconds": round(seconds, 1) if not before else None,
        **environment(device),
        "device": device.type,
    }
    return write_result(out / f"{stem}.json", result)


def settings_of(row: Row, material: Material) -> dict[str, Any]:
    """Everything that decides a row's numbers, for the result file."""
    return {
        "row": {
            "lower": row.lower,
            "descriptor_weight": row.descriptor_weight,
            "lower_weight": row.lower_weight,
            "region_weights": row.region_weights,
            "mean_weights": row.mean_weights,
            "unit": row.unit,
            "confidence": row.confidence,
            **row.settings,
        },
        "protocol": asdict(material.protocol),
        "sd_filter": asdict(DEFAULTS),
    }


def read_records(cache: Path) -> dict[tuple[int, str], Record]:
    """Records by pair and variant; a line that a crash cut off is removed from the file."""
    if not cache.exists():
        return {}
    lines, records = cache.read_text().splitlines(), []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if len(records) < len(lines):
        write_text(cache, "".join(json.dumps(record) + "\n" for record in records))
    return _by_case(records)


def _by_case(records: Sequence[Record]) -> dict[tuple[int, str], Record]:
    return {(record["pair"], record["variant"]): record for record in records}


def _append(cache: Path, records: Sequence[Record]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def _chunks(material: Material, count: int) -> Iterator[Sequence[Any]]:
    """The cases in parts; always the same ones, whatever was done before."""
    for start in range(0, len(material.cases), count):
        yield material.cases[start : start + count]


def _key(row: Row, material: Material, config: dict[str, Any], device: torch.device) -> str:
    """Hash of all that decides the records."""
    parts = [RECORD_VERSION, row.name, row.weights_sha256, config, device.type]
    text = json.dumps([*parts, material.fingerprint()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    rows: Sequence[str] = (),
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
    if isinstance(model, DenseFeatures) and device is None:
        device = model.head.weight.device
    with _folder_of(model) as folder:
        paths = evaluate_rows(
            benchmark, data, rows=("ours", *rows), model=folder, device=device, **options
        )
    return Evaluation(tuple(read_result(path) for path in paths), tuple(paths))


@contextmanager
def _folder_of(model: DenseFeatures | str | Path | None) -> Iterator[str | Path | None]:
    """Where the model lies; one in memory is written out, which leaves it as it is."""
    if not isinstance(model, DenseFeatures):
        yield model
        return
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield folder


def evaluate_rows(
    benchmark: Name,
    data: str | Path,
    *,
    rows: Sequence[str] = ("ours",),
    model: str | Path | None = None,
    init: Sequence[str | Path] = ("imagenet",),
    out: str | Path = "results",
    split: str = "test",
    images: str | Path | None = None,
    proposals: str | Path | None = None,
    boxes: int = 1000,
    seed: int = 0,
    measures: Sequence[Measure] = MEASURES,
    shifted: Sequence[Measure] = SHIFTED,
    side: int = 224,
    inputs: Sequence[int] = (),
    pairs: int | None = None,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> list[Path]:
    """Measure rows (see rows.build_row) on a benchmark; the paths of their result files.

    Pictures, proposals and ground truth are prepared once for all rows. Interrupted, it continues
    where it was when called again with the same settings. inputs: sides at which the networks see
    the square of `side` pixels; rows are then called NAME@224+320, say.
    """
    asked = load_benchmark(benchmark, data, split=split, images=images)
    if pairs is not None:
        asked = some_pairs(asked, pairs)
    protocol = Protocol(
        side=side,
        inputs=tuple(inputs),
        measures=tuple(measures),
        shifted_measures=tuple(measure for measure in shifted if measure in measures),
        proposals=ProposalConfig(count=boxes, seed=seed),
    )
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [build_row(name, model=model, init=init, device=where) for name in rows]
    if protocol.inputs:
        seen = "+".join(str(n) for n in protocol.inputs)
        built = [replace(row, name=f"{row.name}@{seen}") for row in built]
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

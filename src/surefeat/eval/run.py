"""`surefeat evaluate BENCHMARK` and surefeat.evaluate: rows on one benchmark, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from surefeat.baselines.known import build_row
from surefeat.device import choose_device
from surefeat.eval.benchmarks import Benchmark, Name, load_benchmark
from surefeat.eval.evaluate import evaluate_row
from surefeat.eval.material import prepare_material
from surefeat.eval.proposal_file import ProposalSettings
from surefeat.eval.protocol import MEASURES, SHIFTED, Measure, Protocol
from surefeat.eval.results import Result, read_result
from surefeat.eval.tables import main_table, markdown
from surefeat.model import DenseFeatures


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
        found: dict[str, float | None] = self.results[0]["metrics"]
        return found

    def table(self) -> str:
        """A line per row, as markdown."""
        return markdown(main_table(self.results))


def evaluate(
    model: DenseFeatures | str | Path | None,
    benchmark: Name,
    *,
    data: str | Path,
    rows: Sequence[str] = (),
    device: str | torch.device | None = None,
    **options: Any,
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
    """Measure rows (see baselines.known) on a benchmark; the paths of their result files.

    Pictures, proposals and ground truth are prepared once for all rows. Interrupted, it continues
    where it was when called again with the same settings. inputs: sides at which the networks see
    the square of `side` pixels; rows are then called NAME@224+320, say.
    """
    found = load_benchmark(benchmark, data, split=split, images=images)
    if pairs is not None:
        found = some_pairs(found, pairs)
    protocol = Protocol(
        side=side,
        inputs=tuple(inputs),
        measures=tuple(measures),
        shifted_measures=tuple(each for each in shifted if each in measures),
        proposals=ProposalSettings(count=boxes, seed=seed),
    )
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [build_row(name, model=model, init=init, device=where) for name in rows]
    if protocol.inputs:
        seen = "+".join(str(n) for n in protocol.inputs)
        built = [replace(row, name=f"{row.name}@{seen}") for row in built]
    out = Path(out)
    file = Path(proposals) if proposals else out / "cache" / f"proposals-{benchmark}.safetensors"
    material = prepare_material(found, protocol, proposals=file, quiet=quiet)
    return [evaluate_row(row, material, out=out, device=where, quiet=quiet) for row in built]


def some_pairs(benchmark: Benchmark, count: int) -> Benchmark:
    """`count` pairs spread evenly over the benchmark; the split's name says it is not all."""
    total = len(benchmark.pairs)
    if not 1 <= count <= total:
        raise ValueError(f"{benchmark.name} has {total} pairs, so pairs={count} is not possible")
    chosen = [benchmark.pairs[i * total // count] for i in range(count)]
    return Benchmark(benchmark.name, f"{benchmark.split}-{count}-of-{total}", chosen)

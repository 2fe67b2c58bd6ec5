"""`surefeat evaluate BENCHMARK`: several rows on one benchmark, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from surefeat.baselines.known import build_row
from surefeat.device import choose_device
from surefeat.eval.benchmarks import Benchmark, Name, load_benchmark
from surefeat.eval.evaluate import evaluate_row
from surefeat.eval.material import prepare_material
from surefeat.eval.proposal_file import ProposalSettings
from surefeat.eval.protocol import MEASURES, Measure, Protocol


def evaluate(
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
    shifted: Sequence[Measure] = ("nearest", "voting", "location", "regions"),
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

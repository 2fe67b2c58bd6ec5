"""Measure rows on a benchmark: one result file each, interruptible, everything shared once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from surefeat.baselines.rows import Row
from surefeat.eval.matching import Record, measure
from surefeat.eval.material import Material
from surefeat.eval.results import result_of, write_result
from surefeat.eval.store import FeatureStore, memory_for_features
from surefeat.runs import environment, write_text
from surefeat.static_dynamic import DEFAULTS

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
                found = {
                    (each["pair"], each["variant"]): each
                    for each in measure(chunk, row, store, material.pictures, material.protocol)
                }
                _append(cache, [found[key] for key in found if key not in records])
                records = found | records
            bar.update(len(chunk))
    seconds = time.perf_counter() - start
    ordered = [records[case.number, case.variant] for case in material.cases]
    result = result_of(ordered, material, rated=row.confidence) | {
        "row": row.name,
        "config": config,
        "weights_sha256": row.weights_sha256,
        "seconds": round(seconds, 1) if not before else None,
        **environment(),
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
        write_text(cache, "".join(json.dumps(each) + "\n" for each in records))
    return {(each["pair"], each["variant"]): each for each in records}


def _append(cache: Path, records: Sequence[Record]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in records))


def _chunks(material: Material, count: int) -> Iterator[Sequence[Any]]:
    """The cases in parts; always the same ones, whatever was done before."""
    for start in range(0, len(material.cases), count):
        yield material.cases[start : start + count]


def _key(row: Row, material: Material, config: dict[str, Any], device: torch.device) -> str:
    """Hash of all that decides the records."""
    parts = [RECORD_VERSION, row.name, row.weights_sha256, config, device.type]
    text = json.dumps([*parts, material.fingerprint()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

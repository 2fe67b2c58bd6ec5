"""How long part search takes: exact and by faiss, on random cells; results/speed/search.json.

    python benchmarks/speed/search.py --out results/speed/search.json

Cells are random unit vectors around as many centres as there are photos: how alike they are does
not change how long exact search takes, and faiss little. One thread. Times of a query are medians;
the load of the machine stands beside them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from surefeat.core.files import environment, write_json
from surefeat.index.search import EXACT, faiss_of, import_faiss, nearest_per_photo
from surefeat.index.shards import SCALE
from surefeat.index.store import BUDGET, DIMENSION


def cells(count: int, generator: torch.Generator) -> Any:
    """(count, DIMENSION) int8, as an index stores them, and whose they are."""
    photos = count // BUDGET
    centres = torch.randn(photos, DIMENSION, generator=generator).repeat_interleave(BUDGET, 0)
    noise = torch.randn(len(centres), DIMENSION, generator=generator)
    unit = F.normalize(centres + noise, dim=1)
    owners = np.repeat(np.arange(photos, dtype=np.int32), BUDGET)
    return (unit * SCALE).round().to(torch.int8).numpy(), owners


def median_ms(ask: Callable[[int], object], times: int) -> float:
    ask(0)
    taken = []
    for number in range(times):
        start = time.perf_counter()
        ask(number)
        taken.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(taken), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=int, default=1_000_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import_faiss().omp_set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    asked = F.normalize(torch.randn(50, DIMENSION, generator=generator), dim=1)
    few, owners = cells(EXACT, generator)
    result: dict[str, Any] = {}
    result["exact"] = {
        "cells": EXACT, "bytes a vector": few.nbytes / len(few),
        "query, ms": median_ms(
            lambda n: nearest_per_photo(asked[n : n + 1], few, owners, EXACT // BUDGET), 10
        ),
    }  # fmt: skip
    many, _ = cells(given.cells, generator)
    unit = many.astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    start = time.perf_counter()
    parts = (unit[n : n + 25_600] for n in range(0, given.cells, 25_600))
    index = faiss_of(parts, unit[:: max(1, given.cells // 160_000)], cells=given.cells)
    built = time.perf_counter() - start
    stored = len(import_faiss().serialize_index(index))
    one = asked.numpy()
    result["faiss"] = {
        "cells": given.cells, "lists": index.nlist, "lists read": index.nprobe,
        "build, s": round(built, 1), "bytes a vector": round(stored / given.cells, 1),
        "query for 1,000 cells, ms": median_ms(lambda n: index.search(one[n : n + 1], 1000), 50),
    }  # fmt: skip
    write_json(given.out, {
        "row": "search of an index", "benchmark": "random cells", "split": "one thread",
        "metrics": result, "weights_sha256": None,
        "config": {"dimension": DIMENSION, "threads": 1, "load": round(os.getloadavg()[0], 1)},
        **environment("cpu"),
    })  # fmt: skip
    print(result)


if __name__ == "__main__":
    main()

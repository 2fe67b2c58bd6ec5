"""What training the peers took and came to, from the files of their runs: training_peers.json.

    python benchmarks/experiments/peer_runs.py FOLDER... --out results/studies/training_peers.json

A FOLDER holds, of each run NAME, NAME-peer.json (model/peer.json of the run, with its settings and
the hash of its weights), NAME-environment.json and NAME-log.json (lines of its metrics.jsonl).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from surefeat.core.files import write_json

SHOWN = 10
"""Lines kept of a log."""


def summed_up(peer: Path) -> dict[str, Any]:
    """Settings, data, hash, speed and the course of one run."""
    name = peer.name.removesuffix("-peer.json")
    head = json.loads(peer.read_text())
    found = {
        "peer": head["peer"], "settings": head["settings"], "about": head["about"],
        "weights_sha256": head["sha256"],
    }  # fmt: skip
    log = peer.with_name(f"{name}-log.json")
    lines = json.loads(log.read_text()) if log.is_file() else []
    timed = [line for line in lines if line.get("seconds") and line.get("items_per_s")]
    if timed:
        fastest = max(line["items_per_s"] for line in timed)
        fit = head["settings"]["fit"]
        found["seconds at its fastest"] = round(fit["steps"] * fit["batch"] / fastest, 1)
        found["items per second at its fastest"] = round(fastest, 1)
        found["lines"] = lines[:: max(1, len(lines) // SHOWN)] + lines[-1:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = sorted(file for folder in options.folders for file in folder.rglob("*-peer.json"))
    if not files:
        raise SystemExit("no NAME-peer.json in these folders")
    first = files[0]
    name = first.name.removesuffix("-peer.json")
    environment = json.loads(first.with_name(f"{name}-environment.json").read_text())
    runs = {file.name.removesuffix("-peer.json"): summed_up(file) for file in files}
    result = {
        "row": "peers", "benchmark": "training", "split": "see each", "metrics": runs,
        "config": {name: run["settings"] for name, run in runs.items()},
        "weights_sha256": {name: run["weights_sha256"] for name, run in runs.items()},
        **environment,
    }  # fmt: skip
    for run in runs.values():
        del run["settings"], run["weights_sha256"]
    write_json(options.out, result)
    print(f"{len(runs)} runs: {options.out}")


if __name__ == "__main__":
    main()

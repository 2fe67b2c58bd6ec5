"""Tables that were copied by hand into pages say what the stored results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETS, SOURCES = ("birds", "pascal3d"), ("1 source", "3 sources")


def stored(name: str) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((ROOT / "results" / name).read_text())["metrics"]
    return metrics


def rows_of(page: str) -> dict[str, list[str]]:
    """First cell of every line of the page's tables -> its other cells; the first such line."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("| "):
            name, *cells = (cell.strip().replace("**", "") for cell in line.strip("|").split("|"))
            rows.setdefault(name, cells)
    return rows


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def test_labels_carried_to_held_out_photos() -> None:
    rows, ours = rows_of("transfer.md"), stored("studies/transfer_val.json")
    untrained, dinov2 = (stored(f"studies/transfer_val_{row}.json") for row in ("res4e", "dinov2"))
    second = "and a second look"
    where = {
        "photos seen whole, as it was before": ours["photos seen whole"],
        "labelled objects cut out": ours["labelled objects cut out"],
        "and a second look (what the command does)": ours[second],
        "the same route with untrained res4e ([json](../results/studies/transfer_val_res4e.json))":
            untrained[second],
        "with DINOv2-S, block 8 ([json](../results/studies/transfer_val_dinov2.json))":
            dinov2[second],
    }  # fmt: skip
    for name, by_sources in where.items():
        found = [by_sources[many][kind]["pck"] for kind in SETS for many in SOURCES]
        # Files have four digits: halves may be rounded either way.
        assert list(map(float, rows[name])) == pytest.approx([100 * f for f in found], abs=0.051)
    scores = [ours[f"{many}, scores"][kind] for kind in SETS for many in SOURCES]
    sure = [f"{one['called sure']} of {one['labels made']}" for one in scores]
    assert rows["labels called sure (0.9), of all made"] == sure
    right = [round(one["called sure"] * (one["right among sure"] or 0)) for one in scores]
    assert rows["... and right"] == [str(number or "") for number in right]
    kept = [f"{one['kept (0.5)']}, {100 * one['right among kept']:.0f} %" for one in scores]
    assert rows["labels kept (0.5), and right among them"] == kept
    errors = [one["calibration"]["expected calibration error"] for one in scores]
    assert rows["calibration error of the scores"] == [f"{error:.3f}" for error in errors]


def test_labels_by_viewpoint() -> None:
    rows, found = rows_of("transfer.md"), stored("studies/viewpoint.json")
    bins = ("under 30 degrees", "30 to 90 degrees", "over 90 degrees", "all")
    ours = [found["ours"][angle]["pck and its standard error"] for angle in bins]
    assert rows["what the command does"] == [f"{mean} ± {error}" for mean, error in ours]
    dinov2 = "timm:vit_small_patch14_reg4_dinov2/block8"
    for name, row in {"untrained res4e": "res4e", "DINOv2-S, block 8": dinov2}.items():
        cells = [found[row][angle] for angle in bins]
        shown = [f"{one['pck and its standard error'][0]} (-{one['ours is better by'][0]} ± "
                 f"{one['ours is better by'][1]})" for one in cells]  # fmt: skip
        assert rows[name] == shown


def test_suggested_against_random_labels() -> None:
    rows, found = rows_of("transfer.md"), stored("studies/suggest.json")
    for title, kind in {"birds": "birds", "cars": "car", "aeroplanes": "aeroplane"}.items():
        by_way = found[kind]
        random = [percent(by_way["random"][count]) for count in ("5", "10", "20")]
        assert rows[f"{title}, random"] == random
        for cell, count in zip(rows[f"{title}, suggested"], ("5", "10", "20"), strict=True):
            gain = by_way["kind-both, gain over random"][count]
            shown = f"(+{percent(gain['mean'])} ± {percent(gain['deviation'])})"
            mean, rest = cell.split(maxsplit=1)
            assert float(mean) == pytest.approx(100 * by_way["kind-both"][count], abs=0.051)
            assert rest == shown, (title, count)


def test_the_cells_that_an_index_keeps() -> None:
    rows, found = rows_of("search.md"), stored("studies/search.json")["budget"]["numbers"]
    for name, way in {
        "by confidence, spread out (default)": "confidence alone",
        "near the middle, without confidence": "near the middle, without confidence",
        "by edge energy, spread out": "edge energy", "an even grid": "even grid",
    }.items():  # fmt: skip
        numbers = [found[k][f"{n} cells"][way] for k in SETS for n in (100, 25)]
        assert rows[name] == [f"{number:.1f}" for number in numbers], name
    text = " ".join((ROOT / "docs" / "search.md").read_text().replace("**", "").split())
    verified = stored("studies/search.json")["verify"]["numbers"]
    for kind in SETS:
        one = verified[kind]
        assert f"{one['unverified']:.1f}" in text
        assert f"{one['verified']:.1f}" in text
    recall = stored("studies/search.json")["recall"]["numbers"]
    assert f"{100 * recall['recall@10, 32 lists read']:.0f} % with 32" in text


def test_small_things_in_large_scenes() -> None:
    cases = stored("studies/large_scenes.json")["cases"]
    text = " ".join((ROOT / "docs" / "search.md").read_text().replace("**", "").split())
    again = [case["match --tiles, same photo"] for case in cases]
    assert all(one["within 16 px"] == one["points"] for one in again)
    errors = [one["median error, px"] for one in again]
    assert f"median errors of {min(errors):.0f} to {max(errors):.0f} px (seen whole: none)" in text
    assert not any(case["match, seen whole"]["within 16 px"] for case in cases)
    near = [case["find, same photo"]["distance, px"] <= 16 for case in cases]
    assert f"the part in {sum(near)} of {len(cases)} within 16 px" in text
    tiled = [case["match --tiles"] for case in cases]
    most = [one for one in tiled if 2 * one["within 16 px"] > one["points"]]
    assert f"finds most points in {len(most)} of {len(cases)}" in text
    errors = [one["median error, px"] for one in most]
    assert f"median errors of {min(errors):.0f} to {max(errors):.0f} px) and looks" in text
    assert all(one["within 16 px"] == 0 for one in tiled if one not in most)
    assert min(case["find"]["distance, px"] for case in cases) > 16

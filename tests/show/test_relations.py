"""The figures of `surefeat relate` name their photos."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from surefeat.match.relations import Relations
from surefeat.show.relations import group_sheet, relation_matrix


def relations(names: list[str]) -> Relations:
    count = len(names)
    return Relations(tuple(names), torch.eye(count), ((2, 0), (1,)), compared=0)


def test_the_matrix_names_its_photos_in_the_order_of_their_groups() -> None:
    names = ["x/one.png", "x/$two$.png", f"x/{'long' * 20}.png"]
    axes = relation_matrix(relations(names)).axes[0]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown[1:] == ["one.png", "$two$.png"]
    assert shown[0].startswith("…")
    assert shown[0].endswith("long.png")
    assert len(shown[0]) == 36


def test_the_sheet_names_every_photo_below_it(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{name}.png") for name in ("one", "two", "three")]
    for name in names:
        Image.new("RGB", (8, 6)).save(name)
    figure = group_sheet(relations(names))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["three.png", "one.png", "two.png"]

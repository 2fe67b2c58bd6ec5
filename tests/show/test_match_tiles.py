"""`match --tiles`: the page shows the parts that were matched, the file has original pixels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from surefeat.cli.main import main
from surefeat.core.image import resize
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import photo, smooth_photo


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thing, a large photo that shows it small, and a model."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    config = ModelConfig(trunk="small", head="linear", channels=32, longest_side=96)
    DenseFeatures(config).save_pretrained(folder / "model")
    close_up = (photo("astronaut", size=(192, 192)) * 255).byte()
    large = smooth_photo(400, 560, seed=4)
    large[:, 240:336, 320:416] = resize(close_up, size=(96, 96))
    for name, pixels in (("a", close_up), ("large", large)):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{name}.png")
    return folder


@pytest.mark.usefixtures("undrawn")
def test_points_of_a_part_come_back_in_the_photos_own_pixels(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"match {inputs}/a.png {inputs}/large.png --model {inputs}/model --out {tmp_path}"
    main(
        [
            *asked.split(),
            *["--tiles", "--points", "96", "96", "60", "70", "--device", "cpu", "--json"],
        ]
    )
    said = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "matches.json").read_text())
    assert stored["points1"] == said["points1"]
    assert stored["points0"] == [[96, 96], [60, 70]]
    assert (stored["size0"], stored["size1"]) == ([192, 192], [400, 560])
    assert stored["part0"] == [0, 0, 191, 191]
    x1, y1, x2, y2 = stored["part1"]
    assert x2 - x1 < 400
    wanted = [(96.5 / 2 + 319.5, 96.5 / 2 + 239.5), (60.5 / 2 + 319.5, 70.5 / 2 + 239.5)]
    for (x, y), (u, v) in zip(stored["points1"], wanted, strict=True):
        assert x1 - 0.5 <= x <= x2 + 0.5
        assert y1 - 0.5 <= y <= y2 + 0.5
        assert abs(x - u) + abs(y - v) < 0.15 * 96


def test_a_point_outside_a_large_photo_is_named(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"match {inputs}/large.png {inputs}/a.png --model {inputs}/model --out {tmp_path / 'x'}"
    with pytest.raises(SystemExit):
        main([*asked.split(), *["--tiles", "--points", "700", "3", "--device", "cpu"]])
    assert "lies outside image 0, which is 560 x 400" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()

"""Part matching on drawn categories, and the command that measures it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefeat.cli.main import main
from surefeat.data.drawn import correspondences, draw_many
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.measure.evaluate import check_parts
from surefeat.model.network import DenseFeatures


def test_the_command_says_it_in_words_and_as_json(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"evaluate parts --model {model} --count 16 --size 96".split()
    main(command)
    words = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    main([*command, "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["by_category"].keys() == {category.name for category in CATEGORIES}
    assert words["car"] == f"{values['by_category']['car']:.3f}"
    assert int(words["pairs"]) == values["pairs"] == 16


def test_too_few_instances_are_refused_with_the_fix(model: Path) -> None:
    """Eight instances are one of each category."""
    with pytest.raises(ValueError, match=r"no two of the 8 instances .*; draw more, at least 16"):
        check_parts(
            DenseFeatures.from_pretrained(model, device="cpu"), draw_many(8, size=96, seed=1)
        )


def test_accuracy_is_the_mean_over_ordered_pairs_of_a_slow_loop(model: Path) -> None:
    """Parts matched one by one to the most similar cell."""
    network = DenseFeatures.from_pretrained(model, device="cpu")
    instances = draw_many(16, size=96, seed=2024)
    shares = []
    for i, j in [(n, n + 8) for n in range(8)] + [(n + 8, n) for n in range(8)]:
        features0, features1 = network.extract(
            [instances[n].image for n in (i, j)], longest_side=96
        )
        points0, points1 = correspondences(instances[i], instances[j])
        right = 0
        for point0, point1 in zip(points0, points1, strict=True):
            similar = (features0.at(point0[None])[0, :, None, None] * features1.descriptors).sum(0)
            y, x = divmod(int(similar.argmax()), similar.shape[1])
            best = ((x + 0.5) * 8 - 0.5, (y + 0.5) * 8 - 0.5)
            off = (best[0] - float(point1[0])) ** 2 + (best[1] - float(point1[1])) ** 2
            right += off**0.5 < 9.6
        shares.append(right / len(points0))
    check = check_parts(network, instances)
    assert check.accuracy == pytest.approx(sum(shares) / len(shares), abs=1e-6)


@pytest.mark.parametrize(("place", "centre"), [("middle", 1.0), ("border", 0.0)])
def test_baselines_know_a_disc_by_its_place_and_its_edges(
    model: Path, place: str, centre: float
) -> None:
    """The object is all that is near the middle, or all that is not; it alone has texture."""
    steps = torch.arange(96) - 47.5
    near = steps.square()[:, None] + steps.square()[None] <= 24**2
    mask = near if place == "middle" else ~near
    checks = (torch.arange(96)[:, None] + torch.arange(96)) % 2 * 255
    image = torch.where(mask, checks, 128).to(torch.uint8).expand(3, 96, 96)
    first = draw_many(1, size=96, seed=3)[0]
    drawn = replace(first, image=image, mask=mask)
    check = check_parts(DenseFeatures.from_pretrained(model, device="cpu"), [drawn, drawn])
    assert check.centre_auroc == centre
    assert check.edge_auroc == 1.0

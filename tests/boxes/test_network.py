"""The detector: its layers and file, and its regions, scores and losses against slow loops."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from surefeat.boxes.config import BoxesConfig, DetectorConfig, LearnConfig, check_boxes_config
from surefeat.boxes.network import (
    Detector,
    class_region_scores,
    drop,
    image_log_loss,
    pool,
    spatial_regulariser,
)
from surefeat.boxes.photos import Photo
from surefeat.boxes.train import calibrate
from surefeat.core.files import to_dict
from surefeat.core.geometry import Frame, box_iou
from surefeat.data.decode import Item, Place
from surefeat.data.sources import PhotoLabels
from surefeat.match.config import ProposalConfig
from surefeat.model.features import box_cells
from surefeat.model.trunks import Vgg16
from tiny import generator

SMALL = DetectorConfig(trunk="small", hidden=16, pooled=3)


def test_dropout_keeps_the_mean_and_repeats_with_its_generator() -> None:
    values = torch.ones(200, 200)
    first, second = drop(values, 0.5, generator(5)), drop(values, 0.5, generator(5))
    assert torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert first.mean().item() == pytest.approx(1, abs=0.02)
    assert drop(values, 0.5, None) is values


def test_a_detector_needs_two_categories() -> None:
    with pytest.raises(ValueError, match="two categories or more"):
        Detector(SMALL, ("chair",))


def test_a_new_detector_starts_from_little_weights_and_no_bias() -> None:
    """So that all regions and classes score nearly the same at first."""
    torch.manual_seed(0)
    detector = Detector(DetectorConfig(trunk="small", hidden=256, pooled=3), ("a", "b", "c"))
    for layer in (detector.classify, detector.localise):
        assert float(layer.weight.detach().std()) == pytest.approx(0.01, rel=0.1)
    for hidden in (detector.fc6, detector.fc7):
        wanted = math.sqrt(2 / hidden.in_features)
        assert float(hidden.weight.detach().std()) == pytest.approx(wanted, rel=0.05)
    layers = (detector.fc6, detector.fc7, detector.classify, detector.localise)
    assert not any(bool(layer.bias.any()) for layer in layers)
    assert not any(p.requires_grad for p in detector.trunk.parameters())


def test_an_unknown_layer_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="small has no layer 'res9z'; choose one of conv1, "):
        Detector(DetectorConfig(trunk="small", tap="res9z"), ("a", "b"))


def test_the_name_of_conv5_for_pretraining_names_that_of_the_detector() -> None:
    with pytest.raises(ValueError, match=r"vgg16-conv5 .* pass vgg16, which is conv5 here"):
        Detector(DetectorConfig(trunk="vgg16-conv5", pooled=1, hidden=8), ("a", "b"))


def test_a_saved_detector_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = Detector(SMALL, ("cat", "dog")).eval()
    detector.scale.fill_(0.37)
    detector.save(tmp_path / "run" / "model")
    again = Detector.load(tmp_path / "run", device="cpu")
    assert again.categories == ("cat", "dog")
    assert again.scale.item() == pytest.approx(0.37)
    images, cells = torch.rand(1, 3, 48, 48), torch.tensor([[[0.0, 0, 5, 5], [1, 1, 3, 4]]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    both = [d(d.maps(images), cells, valid)[0] for d in (detector, again)]
    torch.testing.assert_close(both[0], both[1], atol=1e-3, rtol=1e-2)
    weights = tmp_path / "run" / "model" / "detector.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged"):
        Detector.load(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="surefeat boxes fit"):
        Detector.load(tmp_path / "nowhere")


def test_a_detector_with_nan_is_refused(tmp_path: Path) -> None:
    detector = Detector(SMALL, ("cat", "dog"))
    torch.nn.init.constant_(detector.fc7.weight, math.nan)
    detector.save(tmp_path)
    with pytest.raises(ValueError, match=r"fc7\.weight holds NaN or infinite numbers"):
        Detector.load(tmp_path, device="cpu")


def test_vgg16_brings_its_own_hidden_layers_where_they_fit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = dict(Vgg16(conv5=True).state_dict())
    shapes = {"0.weight": (8, 512), "0.bias": (8,), "3.weight": (8, 8), "3.bias": (8,)}
    given = {f"classifier.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(state | given, tmp_path / "full.safetensors")
    save_file(state, tmp_path / "bare.safetensors")
    config = DetectorConfig(trunk="vgg16", pooled=1, hidden=8)
    full = Detector.create(config, ("a", "b"), init=tmp_path / "full.safetensors")
    bare = Detector.create(config, ("a", "b"), init=tmp_path / "bare.safetensors")
    assert full.hidden_given
    assert not bare.hidden_given
    assert torch.equal(full.fc6.weight, given["classifier.0.weight"])
    assert torch.equal(full.fc7.bias, given["classifier.3.bias"])
    assert torch.equal(bare.trunk.features[28].weight, state["features.28.weight"])


def test_conv5_continues_vgg16(data_root: Path) -> None:
    """Against torchvision's own network, with its last pooling left out."""
    from torchvision.models.vgg import cfgs, make_layers

    from surefeat.model.weights import read_weights

    file = data_root / "weights" / "vgg16_imagenet_features.safetensors"
    detector = Detector.create(
        DetectorConfig(trunk="vgg16", pooled=1, hidden=8), ("a", "b"), init=file
    ).eval()
    other = make_layers(cfgs["D"])[:30].eval()
    other.load_state_dict(
        {k.removeprefix("features."): v.float() for k, v in read_weights(file).items()}
    )
    images = torch.rand(1, 3, 64, 48, generator=generator())
    with torch.no_grad():
        normal = (images - detector.mean) / detector.std
        torch.testing.assert_close(detector.maps(images), other(normal))


def test_a_number_that_cannot_work_is_said_before_anything_begins() -> None:
    with pytest.raises(ValueError, match=r"--proposals\.count is 0"):
        check_boxes_config(BoxesConfig(proposals=ProposalConfig(count=0)))


def random_boxes(count: int, *, size: tuple[int, int], seed: int = 0) -> Tensor:
    corners = torch.rand(count, 2, 2, generator=generator(seed)) * torch.tensor(size[::-1])
    return corners.floor().sort(dim=1).values.reshape(count, 4)


def slow_cells(box: Tensor, *, size: tuple[int, int], shape: tuple[int, int]) -> list[int]:
    """Outer edges through the Frame, rounded to cell edges; one cell at least."""
    frame = Frame(size, shape)
    x1, y1, x2, y2 = frame.boxes_to_network(box).tolist()
    found = []
    for first, last in ((x1, x2), (y1, y2)):
        start, end = math.floor(first + 0.5), math.floor(last + 1 + 0.5)
        if end <= start:
            start = math.floor((first + last + 1) / 2)
            end = start + 1
        found.append((start, end - 1))
    (a, b), (c, d) = found
    return [a, c, b, d]


def test_boxes_snap_to_the_nearest_cells() -> None:
    size, shape = (53, 71), (9, 12)
    boxes = random_boxes(200, size=size)
    cells = box_cells(boxes[None], torch.tensor([size]), torch.tensor([shape]))[0]
    wanted = [slow_cells(box.double(), size=size, shape=shape) for box in boxes]
    assert cells.tolist() == wanted


@pytest.mark.parametrize("size", [3, 4, 7])
def test_pooling_takes_the_maximum_of_every_bin(size: int) -> None:
    maps = torch.randn(2, 3, 9, 12, generator=generator())
    boxes = torch.stack([random_boxes(30, size=(9, 12), seed=s) for s in (1, 2)])
    found = pool(maps, boxes, size=size)
    for image in range(2):
        for row, (x1, y1, x2, y2) in enumerate(boxes[image].long().tolist()):
            h, w = y2 - y1 + 1, x2 - x1 + 1
            bins = [
                maps[
                    image, :, y1 + i * h // size : y1 - (-(i + 1) * h // size),
                    x1 + j * w // size : x1 - (-(j + 1) * w // size),
                ].amax((1, 2))
                for i in range(size) for j in range(size)
            ]  # fmt: skip
            assert torch.equal(found[image, row], torch.stack(bins, dim=1).flatten())


def test_half_precision_maps_are_pooled_into_the_same_bins() -> None:
    maps = torch.randn(1, 3, 40, 40, generator=generator()).half()
    boxes = random_boxes(200, size=(40, 40))[None]
    for size in (3, 7):
        found = pool(maps, boxes, size=size)
        assert found.dtype == torch.float32
        assert torch.equal(found, pool(maps.double(), boxes.double(), size=size))


def test_scores_are_the_product_of_two_softmaxes() -> None:
    classes, regions = torch.randn(2, 2, 5, 3, generator=generator()).double()
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    found = class_region_scores(classes, regions, valid, temperature=2.0)
    for image in range(2):
        count = int(valid[image].sum())
        for r in range(5):
            for k in range(3):
                if r >= count:
                    assert found[image, r, k] == 0
                    continue
                kind = math.exp(classes[image, r, k]) / sum(
                    math.exp(classes[image, r, j]) for j in range(3)
                )
                place = math.exp(regions[image, r, k] / 2) / sum(
                    math.exp(regions[image, q, k] / 2) for q in range(count)
                )
                assert found[image, r, k].item() == pytest.approx(kind * place, rel=1e-5)


def test_image_scores_never_exceed_one() -> None:
    classes, regions = 30 * torch.randn(2, 4, 50, 3, generator=generator())
    valid = torch.ones(4, 50, dtype=torch.bool)
    total = class_region_scores(classes, regions, valid, temperature=2.0).sum(1)
    assert total.max() <= 1 + 1e-5


def random_scores(images: int, regions: int, classes: int) -> Tensor:
    heads = torch.randn(2, images, regions, classes, generator=generator(3))
    valid = torch.ones(images, regions, dtype=torch.bool)
    return class_region_scores(heads[0], heads[1], valid, temperature=2.0)


def test_the_loss_is_that_of_a_slow_loop() -> None:
    scores = random_scores(3, 7, 4)
    labels = torch.tensor([[1, -1, 0, 1], [-1, -1, -1, 1], [0, 0, 0, 0]])
    found = image_log_loss(scores, labels)
    for image in range(3):
        total = 0.0
        for k in range(4):
            score = sum(scores[image, r, k].item() for r in range(7))
            y = labels[image, k].item()
            if y:
                total -= math.log(y * (score - 0.5) + 0.5)
        assert found[image].item() == pytest.approx(total, rel=1e-4, abs=1e-7)


def test_the_regulariser_is_that_of_a_slow_loop() -> None:
    scores, hidden = random_scores(2, 20, 3), torch.randn(2, 20, 6, generator=generator())
    base = random_boxes(4, size=(100, 100), seed=4) + torch.tensor([0.0, 0, 60, 60])
    boxes = torch.stack([base.repeat(5, 1) + torch.arange(20)[:, None]] * 2)
    labels = torch.tensor([[1, 1, -1], [0, -1, 1]])
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 15:] = False
    scores = scores * valid[..., None]
    found = spatial_regulariser(scores, hidden, boxes, labels, valid, overlap=0.6)
    for image in range(2):
        total, pulled = 0.0, 0
        overlaps = box_iou(boxes[image], boxes[image])
        for k in range(3):
            if labels[image, k] <= 0:
                continue
            best = max(range(20), key=lambda r: scores[image, r, k].item())
            for r in range(20):
                if valid[image, r] and overlaps[best, r] > 0.6:
                    apart = sum((hidden[image, best] - hidden[image, r]).square().tolist())
                    total += 0.5 * scores[image, best, k].item() ** 2 * apart
                    pulled += r != best
        assert pulled > 0
        assert found[image].item() == pytest.approx(total / 3, rel=1e-4)


def test_the_regulariser_pulls_features_together() -> None:
    scores = random_scores(1, 6, 2)
    hidden = torch.randn(1, 6, 4, generator=generator(), requires_grad=True)
    boxes = torch.tensor([[0.0, 0, 50, 50]]).repeat(6, 1)[None]
    labels, valid = torch.tensor([[1, -1]]), torch.ones(1, 6, dtype=torch.bool)
    before = spatial_regulariser(scores, hidden, boxes, labels, valid, overlap=0.6).sum()
    (slope,) = torch.autograd.grad(before, hidden)
    moved = hidden - slope
    after = spatial_regulariser(scores, moved, boxes, labels, valid, overlap=0.6).sum()
    assert after < before


def test_what_fc6_sees_is_scaled_to_a_mean_square_of_one() -> None:
    """By a loop over boxes and bins."""
    side, photos = 64, []
    for number in range(3):
        boxes = random_boxes(5, size=(side, side), seed=number)
        image = PhotoLabels(str(number), Item(str(number), Place(str(number))), frozenset({"a"}))
        pixels = torch.randint(0, 256, (3, side, side), generator=generator(number))
        photos.append(Photo(image, pixels.byte(), (side, side), boxes))
    config = DetectorConfig(trunk="small", tap="conv3", pooled=2, hidden=8)
    detector = Detector.create(config, ("a", "b"), init="none")
    calibrate(detector, photos, LearnConfig(scales=(side,)))
    squares = []
    for photo in photos:
        (maps,) = detector.maps(photo.pixels[None].float() / 255)
        for box in photo.proposals:
            shape = (maps.shape[-2], maps.shape[-1])
            x1, y1, x2, y2 = slow_cells(box, size=(side, side), shape=shape)
            bins = F.adaptive_max_pool2d(maps[:, y1 : y2 + 1, x1 : x2 + 1], 2)
            squares.append((bins * detector.scale).square().mean())
    assert float(torch.stack(squares).mean()) == pytest.approx(1.0, rel=1e-4)


def test_the_defaults_are_the_settings_that_were_measured_best() -> None:
    """Those of 1,000 VOC photos; agreement came after that run, and its weights were a v1."""
    file = Path(__file__).parents[2] / "results" / "boxes" / "wsddn-rigid12-1000.json"
    measured = json.loads(file.read_text())["config"]
    shipped = json.loads(json.dumps(to_dict(BoxesConfig())))
    detector = shipped["detector"] | {"stride_in_1x1": True, "tap": "res5c"}
    assert detector == {name: measured["detector"][name] for name in detector}
    learn = shipped["learn"] | {"checkpoint_every": 0}
    assert learn == {name: measured["learn"][name] for name in learn}
    assert shipped["select"]["scales"] == measured["select"]["scales"]
    for name in ("regions", "smallest", "side"):
        assert shipped[name] == measured[name]

"""Labels carried over: they move with the pixels, sources vote, and nothing lands on nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sets
import surefeat.keypoints.transfer as module
import tiny
from surefeat.core.geometry import box_iou, cell_centres
from surefeat.core.image import ImageLike
from surefeat.data.coco import make_category
from surefeat.data.decode import Place, SourceError
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco, write_coco
from surefeat.keypoints.carry import (
    BOX_SIGNS,
    POINT_SIGNS,
    Carried,
    Source,
    carry,
    cut_source,
    join,
    part_around,
)
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.motion import Motion
from surefeat.keypoints.transfer import Transferred, read_labels, transfer
from surefeat.match.large import Part
from surefeat.model.network import DenseFeatures

FACE = make_category("face", ("left_eye", "right_eye", "mouth", "patch"))
SIZE = (192, 192)
MASK = torch.tensor([[60.0, 20.0], [110.0, 20.0], [110.0, 85.0], [60.0, 85.0]])


def face(name: str = "a", *, mask: bool = True) -> Labelled:
    """The astronaut, 192 x 192: face and mission patch."""
    points = torch.tensor([[77.0, 43.0], [93.0, 43.0], [85.0, 58.0], [torch.nan, torch.nan]])
    visible = torch.tensor([True, True, True, False])
    box = torch.tensor([60.0, 20.0, 110.0, 85.0])
    about = (Place(name), name, 0, box, points, visible, SIZE)
    return Labelled(*about, mask=(MASK,) if mask else ())


def view(where: Tensor) -> Tensor:
    return tiny.rendered(tiny.photo(), where, size=SIZE)


@pytest.mark.parametrize("way", ["shifted", "mirrored"])
def test_labels_boxes_and_outlines_move_with_the_pixels(way: str) -> None:
    """A view whose pixel (x, y) shows the photo's pixel (x - 20, y - 9), or (191 - x, y)."""
    pixels = cell_centres(size=SIZE, stride=1)
    x, y = pixels.unbind(-1)
    mirrored = way == "mirrored"
    where = torch.stack([191 - x, y], -1) if mirrored else torch.stack([x - 20, y - 9], -1)

    def moved(points: Tensor) -> Tensor:
        flipped = torch.stack([191 - points[..., 0], points[..., 1]], -1)
        return flipped if mirrored else points + torch.tensor([20.0, 9.0])

    source = Source(tiny.analytic(tiny.photo()), (face(),))
    (joined,) = carry([source], tiny.analytic(view(where)), [FACE])
    truth = moved(face().points)
    if mirrored:  # what was the left eye is the right one of a face that looks the other way
        truth = truth[[1, 0, 2, 3]]
    # Cells are 8 pixels wide, and what is found mirrored is known less well.
    assert float((joined.points[:3] - truth[:3]).norm(dim=1).max()) < (9 if mirrored else 5)
    assert joined.points[3].isnan().all()
    assert joined.known.tolist() == [True, True, True, False]
    corners = moved(torch.stack([face().box[:2], face().box[2:]]))
    box = torch.cat([corners.amin(0), corners.amax(0)])
    assert float(box_iou(joined.box[None], box[None])) > 0.8
    assert float((joined.mask[0] - moved(MASK)).norm(dim=1).max()) < 10


def test_a_part_is_a_box_with_context_unless_it_fills_the_photo() -> None:
    """A quarter of the longer side, 80, on each side of 80 x 40 at (100, 60), cut at the edges."""
    box = torch.tensor([100.0, 60.0, 179.0, 99.0])
    assert part_around(box, size=(300, 400)) == (80, 40, 199, 119)
    assert part_around(box, size=(110, 185)) == (80, 40, 184, 109)
    assert part_around(torch.tensor([20.0, 20.0, 119.0, 79.0]), size=(100, 140)) is None
    assert part_around(torch.tensor([10.0, 10.0, 20.0, 14.0]), size=(300, 400)) is None


def test_a_labelled_object_is_cut_out_with_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = (tiny.photo() * 255).byte()
    monkeypatch.setattr(Labelled, "read", lambda _: photo)
    seen: list[Tensor] = []

    def extract(pixels: Tensor) -> Any:
        seen.append(pixels)
        return tiny.analytic(pixels.float() / 255)

    source = cut_source([face()], extract)
    # The face's box is 51 x 66: 16.5 more on each side, cut at the photo's top.
    assert torch.equal(seen[0], photo[:, 3:103, 43:128])
    (item,) = source.objects
    assert item.size == source.features.frame.original == (100, 85)
    assert torch.equal(item.points[0], face().points[0] - torch.tensor([43.0, 3.0]))
    assert item.box.tolist() == [17, 17, 67, 82]
    assert torch.equal(item.mask[0], MASK - torch.tensor([43.0, 3.0]))
    large = replace(face(), box=torch.tensor([5.0, 5.0, 180.0, 180.0]), mask=())
    assert cut_source([large], extract).objects == (large,)
    assert torch.equal(seen[1], photo)


def test_a_small_object_s_keypoints_are_those_of_a_second_look() -> None:
    """The look answers with a part moved by (6, -4): keypoints follow it, the box does not."""
    source = Source(tiny.analytic(tiny.photo()), (face(),))
    asked: list[Part] = []

    def look(part: Part) -> Any:
        asked.append(part)
        x1, y1, x2, y2 = part
        moved = tiny.photo().roll((-4, 6), dims=(1, 2))
        return tiny.analytic(moved[:, y1 : y2 + 1, x1 : x2 + 1])

    target = tiny.analytic(tiny.photo())
    (once,) = carry([source], target, [FACE])
    (twice,) = carry([source], target, [FACE], look)
    assert asked == [part_around(once.around, size=SIZE)]
    truth = face().points[:3]
    assert float((once.points[:3] - truth).norm(dim=1).max()) < 3
    assert float((twice.points[:3] - truth - torch.tensor([6.0, -4.0])).norm(dim=1).max()) < 4
    assert torch.equal(twice.box, once.box)
    assert torch.equal(twice.mask[0], once.mask[0])
    assert float(twice.signs["size"][0]) > float(once.signs["size"][0])


def test_without_a_box_a_second_look_is_where_the_keypoints_are() -> None:
    whole = replace(face(mask=False), box=torch.tensor([0.0, 0.0, 191.0, 191.0]))
    source = Source(tiny.analytic(tiny.photo()), (whole,))
    (joined,) = carry([source], tiny.analytic(tiny.photo()), [FACE])
    assert joined.box.tolist() == [0, 0, 191, 191]
    # The keypoints' 16 x 15 and a margin of 4.8, a quarter of a tenth of the photo.
    around = torch.tensor([72.2, 38.2, 97.8, 62.8])
    assert float((joined.around - around).abs().max()) < 4


def test_without_a_box_the_whole_photo_is_the_object() -> None:
    whole = replace(face(mask=False), box=torch.tensor([0.0, 0.0, 191.0, 191.0]))
    pixels = cell_centres(size=SIZE, stride=1) - torch.tensor([14.0, 6.0])
    source = Source(tiny.analytic(tiny.photo()), (whole,))
    (joined,) = carry([source], tiny.analytic(view(pixels)), [FACE])
    assert joined.box.tolist() == [0, 0, 191, 191]
    truth = face().points + torch.tensor([14.0, 6.0])
    assert float((joined.points[:3] - truth[:3]).norm(dim=1).max()) < 5


def said(
    points: list[list[float]], chances: list[float], *, photo: str = "a",
    box: tuple[float, ...] = (20.0, 20.0, 119.0, 119.0), support: float = 0.5, shift: float = 0.0,
) -> Carried:  # fmt: skip
    """What one labelled photo says of a photo of 200 x 200."""
    motion = Motion(torch.tensor([[1.0, 0, shift], [0, 1, 0]]), support)
    places = torch.tensor(points)
    stray = torch.full((len(points),), 0.05)
    item = replace(face(photo), category=0)
    where = torch.tensor(box)
    return Carried(item, motion, places, torch.tensor(chances), stray, 1.0, where, (), where)


NOWHERE = [torch.nan, torch.nan]


def test_two_sources_outvote_a_wrong_one_that_is_surer() -> None:
    right0 = said([[50.0, 50.0], [80.0, 80.0]], [0.6, 0.9], photo="a")
    right1 = said([[52.0, 51.0], NOWHERE], [0.5, 0.0], photo="b")
    wrong = said([[110.0, 30.0], [20.0, 90.0]], [0.8, 0.3], photo="c")
    joined = join([right0, wrong, right1], (200, 200))
    assert float((joined.points[0] - torch.tensor([51.0, 50.5])).norm()) < 1
    assert joined.points[1].tolist() == pytest.approx([80, 80], abs=1e-2)
    # 0.6 and 0.5 agree nearly fully: as if independent, 1 - 0.4 * 0.5; the third is not heard.
    assert float(joined.chances[0]) == pytest.approx(0.8, abs=0.02)
    assert float(joined.signs["share"][0]) == pytest.approx(1.1 / 1.9, abs=0.03)
    assert float(joined.signs["voters"][0].exp()) == pytest.approx(2, abs=0.1)
    # The order in which photos are given says nothing.
    again = join([right1, right0, wrong], (200, 200))
    assert torch.allclose(joined.points, again.points)
    for name in POINT_SIGNS:
        assert torch.allclose(joined.signs[name], again.signs[name], atol=1e-5), name


def test_one_source_says_what_it_says() -> None:
    alone = said([[50.0, 50.0], NOWHERE], [0.7, 0.0])
    joined = join([alone], (200, 200))
    assert joined.points[0].tolist() == [50, 50]
    assert joined.known.tolist() == [True, False]
    assert joined.chances.tolist() == pytest.approx([0.7, 0.0])
    assert float(joined.signs["odds"][0]) == pytest.approx(float(torch.tensor(0.7).logit()))
    assert (float(joined.signs["share"][0]), float(joined.signs["size"][0])) == pytest.approx(
        (1.0, -0.6931),
        abs=1e-3,  # the box has half of the photo's side
    )
    assert joined.box.tolist() == alone.box.tolist()
    assert set(joined.box_signs) == set(BOX_SIGNS)


def test_a_box_far_from_the_others_is_not_averaged_in() -> None:
    boxes = [(20.0, 20.0, 119.0, 119.0), (24.0, 22.0, 121.0, 117.0), (150.0, 150.0, 199.0, 199.0)]
    parts = [said([[60.0, 60.0]], [0.5], photo=str(i), box=box) for i, box in enumerate(boxes)]
    joined = join(parts, (200, 200))
    assert joined.box.tolist() == pytest.approx([22, 21, 120, 118], abs=0.1)


def test_two_objects_of_one_photo_stay_two_unless_they_land_on_one() -> None:
    pixels = tiny.photo()
    other = replace(face("a", mask=False), box=torch.tensor([60.0, 100.0, 150.0, 180.0]))
    source = Source(tiny.analytic(pixels), (face("a"), other))
    same = carry([source], tiny.analytic(pixels), [FACE])
    assert len(same) == 2
    assert float(box_iou(same[0].box[None], same[1].box[None])) < 0.1
    twice = Source(tiny.analytic(pixels), (face("a"), face("a")))
    assert len(carry([twice], tiny.analytic(pixels), [FACE])) == 1


@pytest.fixture(scope="module")
def shipped() -> DenseFeatures:
    return DenseFeatures.from_pretrained(device="cpu")


def save(path: Path, image: Tensor) -> ImageLike:
    from PIL import Image

    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(path)
    return path


def test_labels_land_on_the_same_thing_and_not_on_another(
    tmp_path: Path, shipped: DenseFeatures
) -> None:
    """By the model that ships, whose scores are probabilities."""
    save(tmp_path / "a.png", tiny.photo())
    where = cell_centres(size=SIZE, stride=1) - torch.tensor([18.0, 10.0])
    save(tmp_path / "b.png", view(where))
    save(tmp_path / "c.png", tiny.photo("chelsea"))
    labels = KeypointSet((FACE,), (face(str(tmp_path / "a.png")),))
    transferred = transfer(labels, tmp_path, shipped)
    assert transferred.calibrated
    moved, other = transferred.objects
    assert (moved.name, other.name) == ("b.png", "c.png")
    assert moved.visible.tolist() == [True, True, True, False]
    truth = face().points + torch.tensor([18.0, 10.0])
    assert float((moved.points[:3] - truth[:3]).norm(dim=1).max()) < 8
    assert not bool(other.visible.any())
    assert transferred.empty() == ("c.png",)
    assert moved.box_score is not None
    assert other.box_score is not None
    # A cat's face is a face of a kind: its box is less sure, and not kept without a keypoint.
    assert moved.box_score > 0.8 > 0.6 > other.box_score
    assert [item.name for item in transferred.found().objects] == ["a.png", "b.png"]
    # Whatever is called sure is among what is kept.
    assert {item.name for item in transferred.found(least=0.9).objects} <= {"a.png", "b.png"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn birds; two of them labelled in labels.json."""
    folder = tmp_path_factory.mktemp("drawn")
    photos = folder / "photos"
    write_folder(photos, count=10, size=64, seed=0)
    whole = read_coco(photos / "keypoints.json").only(["bird"])
    write_coco(photos / "labels.json", whole)
    for number in (2, 3, 4, 5, 6):
        next(photos.glob(f"*_0000{number}.png")).unlink()
    return photos


@pytest.fixture(scope="module")
def labelled(drawn: Path) -> Transferred:
    (drawn / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    journal = drawn.parent / "journal.jsonl"
    return transfer(
        drawn / "labels.json", drawn, sets.feature_model(), threshold=0.1, journal=journal
    )


def test_what_a_stopped_run_has_done_is_not_done_again(
    drawn: Path, labelled: Transferred, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of a whole run, cut in the middle of its last line but one."""
    lines = (drawn.parent / "journal.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 1 + len({item.name for item in labelled.objects}) + 1
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(lines[:-2]) + lines[-2][:40])
    asked: list[Path] = []
    extract = module.extract_readable

    def watched(model: DenseFeatures, paths: list[Path], *rest: Any, **more: Any) -> Any:
        asked.extend(paths)
        return extract(model, paths, *rest, **more)

    monkeypatch.setattr(module, "extract_readable", watched)
    again = transfer(
        drawn / "labels.json", drawn, sets.feature_model(), threshold=0.1, journal=journal
    )
    assert sorted(str(path) for path in asked) == sorted(
        json.loads(line)["photo"] for line in lines[-2:]
    )
    assert again.skipped == labelled.skipped
    for mine, other in zip(again.objects, labelled.objects, strict=True):
        assert (mine.name, mine.image, mine.size) == (other.name, other.image, other.size)
        assert torch.equal(mine.visible, other.visible)
        for name in ("points", "scores", "box"):
            assert torch.allclose(getattr(mine, name), getattr(other, name), equal_nan=True)


def test_a_journal_of_other_labels_is_begun_anew(
    drawn: Path, labelled: Transferred, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    shutil.copy(drawn.parent / "journal.jsonl", journal)
    whole = read_coco(drawn / "labels.json")
    one = KeypointSet(whole.categories, whole.objects[:1])
    photo = labelled.objects[0].image.path
    transfer(one, [photo], sets.feature_model(), journal=journal)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line.get("photo") for line in lines] == [None, photo]


def test_a_folder_is_labelled_and_what_was_labelled_is_left_alone(
    drawn: Path, labelled: Transferred
) -> None:
    transferred = labelled
    given = {item.name for item in read_coco(drawn / "labels.json").objects}
    every = {path.name for path in drawn.glob("*.png")} - {"broken.png"}
    assert {item.name for item in transferred.objects} == every - given
    assert [one.name for one in transferred.skipped] == ["broken.png"]
    assert not transferred.calibrated
    assert {item.name for item in transferred.sources} == given
    for item in transferred.objects:
        height, width = item.size
        inside = item.points[item.points.isfinite().all(-1)]
        assert bool(((inside >= -0.5) & (inside <= torch.tensor([width, height]) - 0.5)).all())
        assert item.scores is not None
        assert bool(((item.scores >= 0) & (item.scores <= 1)).all())


def test_a_detector_learns_from_what_was_written(
    drawn: Path, labelled: Transferred, tmp_path: Path
) -> None:
    model, transferred = sets.feature_model(), labelled
    write_coco(tmp_path / "keypoints.json", transferred.found())
    read = read_coco(tmp_path / "keypoints.json", images=drawn)
    wanted = transferred.found()
    assert [item.name for item in read.objects] == [item.name for item in wanted.objects]
    for mine, other in zip(wanted.objects, read.objects, strict=True):
        assert torch.equal(mine.visible, other.visible)
        shown = mine.visible
        assert torch.allclose(mine.points[shown], other.points[shown], atol=0.01)
    config = replace(sets.QUICK, absent="ignored")
    assert isinstance(config, KeypointConfig)
    detector = KeypointDetector.fit(model, read, config=config, calibrate=False)
    (bird,) = (kind for kind in detector.categories if kind.name == "bird")
    assert bird.keypoints == transferred.categories[transferred.sources[0].category].keypoints


def test_labelled_photos_may_lie_among_the_others(drawn: Path, tmp_path: Path) -> None:
    """labels.json photos/, with nothing beside the json: what one types first."""
    shutil.copy(drawn / "labels.json", tmp_path)
    found = read_labels(tmp_path / "labels.json", drawn, None)
    assert {Path(item.image.path).parent for item in found.objects} == {drawn}
    for photos, images in ((drawn, tmp_path), ([drawn], None), (tmp_path, None)):
        with pytest.raises(SourceError, match=r"are not under .*--images"):
            read_labels(tmp_path / "labels.json", photos, images)


def test_what_cannot_be_meant_is_said(drawn: Path, tmp_path: Path) -> None:
    model = sets.feature_model()
    whole = read_coco(drawn / "labels.json")
    with pytest.raises(ValueError, match="scores are between 0 and 1"):
        transfer(whole, drawn, model, threshold=1.5)
    with pytest.raises(ValueError, match="labelled already"):
        transfer(whole, [item.image.path for item in whole.objects], model)
    with pytest.raises(FileNotFoundError, match="check the path"):
        transfer(whole, tmp_path / "nothing", model)
    bare = [
        replace(item, visible=torch.zeros_like(item.visible),
                box=torch.tensor([0.0, 0.0, item.size[1] - 1.0, item.size[0] - 1.0]))
        for item in whole.objects
    ]  # fmt: skip
    with pytest.raises(ValueError, match="label one"):
        transfer(KeypointSet(whole.categories, tuple(bare)), drawn, model)

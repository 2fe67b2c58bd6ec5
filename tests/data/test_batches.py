"""Which images a step sees: a function of seed and step alone, wherever the images live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from surefeat.data import decode as module
from surefeat.data.decode import (
    Batches,
    Item,
    Part,
    Place,
    StreamedBatches,
    batch_indices,
    canvas_bytes,
    choose_memory,
    decode_all,
    free_host_memory,
)
from surefeat.data.sources import find_images
from surefeat.learn.config import DataConfig
from surefeat.learn.pretrain import Pictures, load_pictures, split
from tiny import SIDE, images, tiny

CPU = torch.device("cpu")


@given(count=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 99))
def test_every_epoch_shows_every_image_once(count: int, batch: int, seed: int) -> None:
    steps = -(-3 * count // batch)
    seen = torch.cat(
        [batch_indices(step, batch=batch, count=count, seed=seed) for step in range(steps)]
    ).tolist()
    assert len(seen) == steps * batch
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = {
        tuple(batch_indices(step, batch=20, count=20, seed=seed).tolist())
        for step in range(4)
        for seed in range(4)
    }
    assert len(orders) == 16


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_processes_share_a_batch_without_gaps(world: int) -> None:
    rows = [i for rank in range(world) for i in range(12)[Part(rank, world).rows(12)]]
    assert rows == list(range(12))


def test_a_batch_that_cannot_be_shared_says_which_can() -> None:
    with pytest.raises(ValueError, match=r"a batch of 8 .* 3 processes; pass --train.batch 6"):
        Part(0, 3).rows(8)
    with pytest.raises(ValueError, match=r"pass --train.batch 3"):
        Part(0, 3).rows(2)


def listed(source: Batches | StreamedBatches, *, steps: range, part: Part) -> list[Tensor]:
    found = []
    for pixels, sizes in source.iterate(steps, batch=4, seed=3, part=part):
        found += [pixels, sizes]
    return found


@pytest.mark.parametrize("part", [Part(), Part(1, 2)])
def test_images_come_in_the_same_order_from_device_host_and_stream(
    tmp_path: Path, part: Part
) -> None:
    items = find_images(images(tmp_path / "images", count=7))
    decoded = decode_all(items, side=40, workers=1)
    steps = range(2, 7)
    expected = listed(Batches(decoded, device=CPU, memory="device"), steps=steps, part=part)
    assert len(expected) == 10
    assert len({tensor.float().mean().item() for tensor in expected[::2]}) > 2
    others = [Batches(decoded, device=CPU, memory="host")]
    streams = [StreamedBatches(items, side=40, workers=n, device=CPU) for n in (1, 2)]
    for other in (*others, *streams):
        found = listed(other, steps=steps, part=part)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_stream_names_the_bad_files_it_met(tmp_path: Path) -> None:
    folder = images(tmp_path / "images", count=4)
    (folder / "bad.png").write_bytes(b"no image")
    source = StreamedBatches(find_images(folder), side=32, workers=2, device=CPU)
    assert source.skipped() == ()
    listed(source, steps=range(3), part=Part())
    (skipped,) = source.skipped()
    assert skipped.name == "bad.png"
    assert skipped.reason
    assert "bad.png" not in skipped.reason


@pytest.mark.parametrize(
    ("host", "device", "processes", "expected"),
    [
        (10.0, 10.0, 1, "device"),
        (10.0, 2.6, 1, "device"),
        (10.0, 2.4, 1, "host"),
        (2.1, 0.1, 1, "host"),
        (1.9, 0.1, 1, "stream"),
        (1.9, 10.0, 1, "stream"),  # they pass through host memory
        (7.9, 10.0, 4, "stream"),  # each process decodes all of them
        (8.1, 10.0, 4, "device"),
    ],
)
def test_images_go_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, host: float, device: float, processes: int, expected: str
) -> None:
    need = canvas_bytes(1000, side=64)
    monkeypatch.setattr(module, "free_host_memory", lambda: int(host * need))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(device * need), 0))
    found, why = choose_memory(1000, side=64, device=torch.device("cuda"), processes=processes)
    assert found == expected
    assert why.startswith("1000 images, 0.01 GiB decoded: ")
    on_cpu, _ = choose_memory(1000, side=64, device=CPU, processes=processes)
    assert on_cpu == ("stream" if expected == "stream" else "host")


def test_a_place_that_was_asked_for_is_taken_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_host_memory", lambda: 0)
    found, why = choose_memory(10, side=64, device=CPU, wanted="host")
    assert found == "host"
    assert "kept in host memory" in why


def test_free_memory_respects_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert free_host_memory() == 5000 * 1024
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 77\n")
    for limit, expected in (("max", 5000 * 1024), ("1500", 500), ("900", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert free_host_memory() == expected


def loaded(items: list[Item], **settings: object) -> Pictures:
    config = DataConfig(side=40, workers=2, **settings)  # type: ignore[arg-type]
    memory = "stream" if config.memory == "stream" else "host"
    return load_pictures(items, config, memory=memory, seed=0, device=CPU)


def test_held_out_images_are_never_learned_from(tmp_path: Path) -> None:
    """By their pixels: every image has its own grey."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(30):
        Image.new("L", (20, 20), 5 * number).save(folder / f"{number:02d}.png")
    for name in ("05.png", "17.png"):
        (folder / name).write_bytes(b"no image")
    for memory in ("host", "stream"):
        pictures = loaded(find_images(folder), held_out=64, memory=memory)
        apart = set(pictures.held_out.pixels[:, 0, 0, 0].tolist())
        assert len(apart) >= 4  # 6, but for bad files
        seen: set[int] = set()
        for pixels, _ in pictures.batches.iterate(range(20), batch=8, seed=0, part=Part()):
            seen |= set(pixels[:, 0, 0, 0].tolist())
        assert not seen & apart
        assert seen | apart <= {5 * n for n in range(30) if n not in (5, 17)}
        assert len(pictures.held_out.names) == len(apart)
    pictures = loaded(find_images(folder), held_out=64)
    assert {entry.name for entry in pictures.skipped()} == {"05.png", "17.png"}
    assert len(pictures.names) + len(pictures.held_out.names) == 28


def test_host_and_stream_hold_out_the_same_images(tmp_path: Path) -> None:
    items = find_images(images(tmp_path / "images", count=20))
    host, stream = (loaded(items, held_out=3, memory=memory) for memory in ("host", "stream"))
    assert host.names == stream.names
    assert host.held_out.names == stream.held_out.names
    assert len(host.held_out.names) == 3


def test_crops_of_one_file_and_repeated_names_stay_on_one_side() -> None:
    """A file with several boxes, or listed twice, must not be on both sides."""
    items = [
        Item(f"{file}.jpg#{crop}", Place(f"{file}.jpg"), crop=(0, 0, 40, 40))
        for file in range(20)
        for crop in range(1 + file % 4)
    ] + [Item("3.jpg", Place("3.jpg"))]
    for seed in range(20):
        learn, check = split(items, held_out=8, seed=seed)
        assert sorted(learn + check, key=items.index) == items
        assert 5 <= len(check) <= 8
        assert not {item.read for item in learn} & {item.read for item in check}


def test_at_most_a_fifth_is_held_out() -> None:
    items = [Item(f"{n}.jpg", Place(f"{n}.jpg")) for n in range(14)]
    learn, check = split(items, held_out=64, seed=0)
    assert len(check) == 2
    assert sorted(learn + check, key=items.index) == items
    assert split(items[:4], held_out=64, seed=0) == (items[:4], [])


def test_a_folder_without_one_readable_image_says_why(tmp_path: Path) -> None:
    for n in range(4):
        (tmp_path / f"{n}.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"none of the 4 files is a readable image: 0.jpg "):
        loaded(find_images(tmp_path))


def test_overfitting_keeps_the_first_images_and_holds_none_out(tmp_path: Path) -> None:
    items = find_images(images(tmp_path / "images", count=12))
    for memory in ("host", "stream"):
        pictures = load_pictures(
            items,
            tiny().data,
            memory=memory,
            seed=0,
            device=CPU,
            overfit=3,  # type: ignore[arg-type]
        )
        assert pictures.names == tuple(item.name for item in items[:3])
        assert not pictures.held_out.names
        pixels, _ = next(iter(pictures.batches.iterate([0], batch=6, seed=0, part=Part())))
        assert pixels.shape == (6, 3, SIDE, SIDE)

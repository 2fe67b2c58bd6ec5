"""Sources: all good images are decoded, at once or as a stream, and all bad ones named."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hostile import make, noise
from surefeat.core.image import ImageError, load, read_bytes, resize
from surefeat.data.decode import (
    Part,
    SourceError,
    StreamedBatches,
    batch_indices,
    canvas_bytes,
    decode_all,
    decode_item,
)
from surefeat.data.sources import find_images
from tiny import names, write


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("workers", [1, 3])
def test_200_hostile_files_do_not_harm_20_good_ones(tmp_path: Path, workers: int) -> None:
    hostile = make(tmp_path, np.random.default_rng(0))
    assert (len(hostile.good), len(hostile.bad), len(set(hostile.bad))) == (20, 200, 200)
    items = find_images(hostile.folder) + find_images(hostile.shards)
    assert sorted(names(items)) == sorted([*hostile.good, *hostile.bad])

    canvas = decode_all(items, side=32, workers=workers)

    assert sorted(canvas.names) == sorted(hostile.good)
    assert sorted(entry.name for entry in canvas.skipped) == sorted(hostile.bad)
    for pixels, (height, width), name in zip(
        canvas.pixels, canvas.sizes.tolist(), canvas.names, strict=True
    ):
        assert (height, width) == ((9, 20) if ".tar" in name else (24, 32))
        expected = torch.tensor(hostile.good[name])[:, None, None]
        assert (pixels[:, :height, :width].int() - expected).abs().max() <= 4
        assert not pixels[:, height:].any()
        assert not pixels[:, :, width:].any()
    for entry in canvas.skipped:
        assert entry.reason.isprintable()
        assert ";" in entry.reason, "no fix"
        assert not entry.reason.startswith(entry.name)


def test_images_are_shrunk_to_the_side_and_never_enlarged(tmp_path: Path) -> None:
    source = noise(np.random.default_rng(0), size=100).resize((100, 40))
    source.save(tmp_path / "large.png")
    source.resize((20, 8)).save(tmp_path / "small.png")
    large, small = (decode_item(item, side=50) for item in find_images(tmp_path))
    assert torch.equal(large, resize(load(source), size=(20, 50)))
    assert tuple(small.shape) == (3, 8, 20)


def test_progress_counts_to_the_end_and_stops_the_work_when_it_raises(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path / f"{number:02d}.png")
    items = find_images(tmp_path)
    seen: list[int] = []
    canvas = decode_all(items, side=16, workers=2, progress=seen.append)
    assert seen == list(range(1, 31))
    assert canvas.pixels.numel() + canvas.sizes.numel() * 4 == canvas_bytes(30, side=16)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_all(items, side=16, workers=2, progress=stop)


def test_ctrl_c_does_not_wait_for_a_photo_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0.png", "1.png"):
        write(tmp_path / name)
    over = threading.Event()

    def slowly(path: str, **where: Any) -> bytes:
        assert not path.endswith("1.png") or over.wait(60)
        return read_bytes(path, **where)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("surefeat.data.decode.read_bytes", slowly)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        decode_all(find_images(tmp_path), side=16, workers=2, progress=stop)
    assert time.monotonic() - start < 30
    over.set()


def stream_of(folder: Path) -> StreamedBatches:
    return StreamedBatches(find_images(folder), side=12, workers=2, device=torch.device("cpu"))


def test_a_stream_replaces_bad_files_by_the_next_good_one_and_reports_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, colour in enumerate(("red", "blue", "green", "white", "black", "gray")):
        write(tmp_path / f"{number}.png", colour=colour)
    whole = decode_all(find_images(tmp_path), side=12, workers=1).pixels
    (tmp_path / "1.png").write_bytes(b"bad")
    (tmp_path / "5.png").write_bytes(b"bad")
    stream = stream_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        epochs = list(stream.iterate(range(4), batch=6, seed=0, part=Part()))
    for step, (pixels, sizes) in enumerate(epochs):
        order = batch_indices(step, batch=6, count=6, seed=0)
        assert torch.equal(pixels, whole[torch.tensor([0, 2, 2, 3, 4, 0])[order]])
        assert sizes.tolist() == [[8, 10]] * 6
    assert caplog.text.count("skipped 1.png") == caplog.text.count("skipped 5.png") == 1


def test_a_stream_without_a_good_file_ends(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"bad")
    with pytest.raises(SourceError, match="none of 1 images"):
        list(stream_of(tmp_path).iterate(range(2), batch=1, seed=0, part=Part()))
    with pytest.raises(ImageError):
        decode_item(find_images(tmp_path)[0], side=12)

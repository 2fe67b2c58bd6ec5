"""Exported files: the same numbers as the model, on sizes never traced, without torch."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import surefeat
from surefeat.core.files import file_hash
from surefeat.core.geometry import cell_centres
from surefeat.data.drawn import draw
from surefeat.exporting import ABOUT, export, metadata
from surefeat.model.config import WEIGHTS, ModelConfig
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "onnx_match.py"


def small_model() -> DenseFeatures:
    torch.manual_seed(3)
    config = ModelConfig(trunk="small", lower="conv4", channels=32, longest_side=96)
    return DenseFeatures(config).eval()


def short_resnet() -> DenseFeatures:
    """ResNet-50 with one block per stage, so that it exports in seconds, and lively batch norms."""
    torch.manual_seed(4)
    model = DenseFeatures(ModelConfig("resnet50", stride_in_1x1=True, head="linear", lower="res4a"))
    trunk: Any = model.trunk
    for stage in (1, 2, 3, 4):
        setattr(trunk, f"layer{stage}", getattr(trunk, f"layer{stage}")[:1])
    trunk.taps = {name: width for name, width in trunk.taps.items() if name.endswith("a")}
    trunk.last, model.seen = "res5a", ("res5a",)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def as_the_model_says(model: DenseFeatures, images: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        maps, lower = model.forward_with_lower(images)
    return maps.descriptors, maps.uncertainty, F.normalize(lower, dim=1)


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript", reason="needs the export extra")
    pytest.importorskip("onnxruntime", reason="needs the export extra")
    done = export(small_model(), tmp_path_factory.mktemp("export") / "small.onnx")
    assert done.difference is not None
    return done.path


def session_of(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("shape", [(2, 160, 224), (1, 96, 64), (3, 8, 40), (1, 8, 8)])
def test_onnx_equals_the_model_on_sizes_it_was_not_traced_with(
    onnx_file: Path, shape: tuple[int, int, int]
) -> None:
    batch, height, width = shape
    images = torch.rand(batch, 3, height, width)
    found = session_of(onnx_file).run(None, {"images": images.numpy()})
    for mine, other in zip(as_the_model_says(small_model(), images), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(other), mine, atol=1e-4, rtol=1e-4)
    assert np.linalg.norm(found[0], axis=1) == pytest.approx(1, abs=1e-4)


def test_onnx_file_stands_alone_and_its_sizes_have_names(onnx_file: Path) -> None:
    assert [path.name for path in onnx_file.parent.iterdir()] == ["small.onnx"]
    session = session_of(onnx_file)
    assert [each.shape for each in session.get_inputs()] == [["batch", 3, "height", "width"]]
    assert {each.name: each.shape for each in session.get_outputs()} == {
        "descriptors": ["batch", 32, "rows", "columns"],
        "uncertainty": ["batch", "rows", "columns"],
        "lower": ["batch", 96, "lower_rows", "lower_columns"],
    }


def test_metadata_name_the_layers_really_used_and_the_weights_file(tmp_path: Path) -> None:
    """Also of weights stored as int8, whose file is not what the state dict would make."""
    model = DenseFeatures(ModelConfig(trunk="small", channels=8, longest_side=96)).eval()
    expected = {"surefeat": surefeat.__version__, "trunk": "small", "lower": "conv4",
                "stride": "8", "longest_side": "96"}  # fmt: skip
    before = metadata(model)
    assert before | expected == before
    model.save_pretrained(tmp_path / "whole")
    assert before["sha256"] == file_hash(tmp_path / "whole" / WEIGHTS)
    model.save_pretrained(tmp_path / "int8", int8=True)
    stored = DenseFeatures.from_pretrained(tmp_path / "int8", device="cpu")
    assert metadata(stored)["sha256"] == file_hash(tmp_path / "int8" / WEIGHTS)
    stored.set_trained("all")
    assert metadata(stored)["sha256"] != file_hash(tmp_path / "int8" / WEIGHTS)


def test_exported_batch_norms_are_plain_convolutions(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the export extra")
    pytest.importorskip("onnxscript", reason="needs the export extra")
    model = short_resnet()
    done = export(model, tmp_path / "resnet.onnx")
    nodes = [node.op_type for node in onnx.load(done.path).graph.node]
    # The stem, three filters and a shortcut in each of four blocks, the head.
    assert nodes.count("Conv") == 1 + 4 * 4 + 1
    assert "BatchNormalization" not in nodes
    assert "Mul" not in nodes
    images = torch.rand(1, 3, 48, 80)
    found = session_of(done.path).run(None, {"images": images.numpy()})
    for mine, other in zip(as_the_model_says(model, images), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(other), mine, atol=1e-4, rtol=1e-4)


def test_pt2_equals_the_model_and_refuses_other_sizes(tmp_path: Path) -> None:
    model = small_model().train()
    done = export(model, tmp_path / "small.pt2")
    assert model.training
    assert done.bytes == done.path.stat().st_size
    extra = {ABOUT: ""}
    run = torch.export.load(done.path, extra_files=extra).module()
    assert json.loads(extra[ABOUT]) == metadata(model)
    images = torch.rand(1, 3, 104, 24)
    for mine, other in zip(as_the_model_says(model.eval(), images), run(images), strict=True):
        torch.testing.assert_close(other, mine, atol=1e-4, rtol=1e-4)
    with pytest.raises(AssertionError, match="% 8"):
        run(torch.rand(1, 3, 104, 25))


def test_a_file_that_differs_from_the_model_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blurred() -> Any:  # one input out of three, which is enough
        return lambda x: as_the_model_says(small_model(), x * (0.99 if len(x) == 1 else 1))

    monkeypatch.setattr("torch.export.load", lambda _: SimpleNamespace(module=blurred))
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    monkeypatch.setattr("torch.export.save", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="differs from the model"):
        export(small_model(), tmp_path / "small.pt2")
    assert list(tmp_path.iterdir()) == []


def test_export_errors_name_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"\.onnx or \.pt2"):
        export(small_model(), tmp_path / "model.pb")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(IsADirectoryError, match="file name"):
        export(small_model(), tmp_path / "folder.onnx")
    real = builtins.__import__

    def without_onnx(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("onnx", "onnxscript"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    with pytest.raises(ImportError, match=r"pip install 'surefeat\[export\]'"):
        export(small_model(), tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


def mutual_neighbours(features0: Features, features1: Features) -> set[tuple[float, ...]]:
    """Cells that choose each other, by surefeat's own reading: (x0, y0, x1, y1), rounded."""
    vectors, centres = [], []
    for each in (features0, features1):
        size = (each.descriptors.shape[1], each.descriptors.shape[2])
        places = each.frame.to_original(cell_centres(size=size, stride=each.stride))
        vectors.append(torch.cat([each.at(places), 2**0.5 * each.lower_at(places)], dim=1))
        centres.append(places)
    similarity = vectors[0] @ vectors[1].T
    there, back = similarity.argmax(1), similarity.argmax(0)
    kept = [i for i, j in enumerate(there.tolist()) if int(back[j]) == i]
    rows = torch.cat([centres[0][kept], centres[1][there[kept]]], dim=1)
    return {tuple(round(value, 1) for value in row) for row in rows.tolist()}


# The first pair needs no resizing; the second does, where Pillow and torch differ by a grey level.
@pytest.mark.parametrize(("sizes", "share"), [((96, 96), 1.0), ((150, 215), 0.9)])
def test_the_file_numpy_and_pillow_suffice_to_match_two_photos(
    onnx_file: Path, tmp_path: Path, sizes: tuple[int, int], share: float
) -> None:
    paths = []
    for number, size in enumerate(sizes):
        drawn = draw(0, size=size, generator=np.random.default_rng(number)).image
        wide = drawn[:, : size // 3 * 2] if number else drawn
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(wide.permute(1, 2, 0).numpy()).save(paths[-1])
    for blocked in ("torch", "surefeat"):
        (tmp_path / f"{blocked}.py").write_text("raise ImportError('not needed here')\n")
    picture = tmp_path / "matches.png"
    done = subprocess.run(
        [sys.executable, EXAMPLE, onnx_file, *paths, "--out", picture, "--count", "1000"],
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[float(value) for value in line.split()] for line in done.stdout.splitlines()]
    assert [row[4] for row in rows] == sorted((row[4] for row in rows), reverse=True)
    expected = mutual_neighbours(*small_model().extract(list(paths)))
    found = {tuple(round(value, 1) for value in row[:4]) for row in rows}
    assert len(expected) > 10
    assert len(found & expected) >= share * max(len(found), len(expected))
    assert Image.open(picture).height == 480

"""Trunks against torchvision and against their own stride-32 form (method, section 1, hazard 4)."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from surefeat.model.config import HeadKind, ModelConfig
from surefeat.model.network import DenseFeatures
from surefeat.model.trunks import ResNet50, Vgg16, build_trunk, conv_bn
from surefeat.model.weights import load_initial, read_weights, stride_in_1x1_of


def _randomised(module: nn.Module, seed: int) -> nn.Module:
    """Random weights that keep activations alive through 50 layers, and random norm statistics."""
    generator = torch.Generator().manual_seed(seed)
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            fan = m.weight[0].numel()
            m.weight.data = torch.randn(m.weight.shape, generator=generator) * (2 / fan) ** 0.5
        if isinstance(m, nn.BatchNorm2d):
            for tensor in (m.weight.data, m.running_var):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            for tensor in (m.bias.data, m.running_mean):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return module.eval()


def _image(size: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(seed))


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("stride_in_1x1", [True, False])
def test_dilated_map_subsampled_by_two_is_the_stride_32_network(stride_in_1x1: bool) -> None:
    plain = ResNet50(stride_in_1x1=stride_in_1x1, dilated=False)
    _randomised(plain, 0)
    dilated = ResNet50(stride_in_1x1=stride_in_1x1).eval()
    dilated.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        coarse = plain(_image(160), ("res5c",))["res5c"]
        fine = dilated(_image(160), ("res5c",))["res5c"]
    assert fine.shape[-1] == 2 * coarse.shape[-1]
    assert coarse.abs().mean() > 0.01
    assert _relative_error(fine[..., ::2, ::2], coarse) < 1e-4
    # And the places between are new values, not copies.
    assert _relative_error(fine[..., 1::2, 1::2], coarse) > 0.1


def test_resnet_equals_torchvision() -> None:
    theirs = _randomised(torchvision.models.resnet50(), 1)
    ours = ResNet50(dilated=False).eval()
    load_initial_from(ours, theirs.state_dict())
    body = nn.Sequential(*list(theirs.children())[:-2])
    with torch.inference_mode():
        expected, found = body(_image(96)), ours(_image(96), ("res5c",))["res5c"]
    assert _relative_error(found, expected) < 1e-4


def load_initial_from(trunk: nn.Module, state: dict[str, Tensor]) -> None:
    trunk.load_state_dict({k: v for k, v in state.items() if k in trunk.state_dict()})


def their_vgg() -> nn.Module:
    """Without its classifier, which takes longest to make."""
    features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["D"])
    return _randomised(nn.ModuleDict({"features": features}), 2)


def test_vgg_equals_torchvision_up_to_pool4() -> None:
    theirs = their_vgg()
    ours = Vgg16().eval()
    load_initial_from(ours, theirs.state_dict())
    with torch.inference_mode():
        expected = theirs["features"][:24](_image(64))
        found = ours(_image(64), ("pool4",))["pool4"]
    torch.testing.assert_close(found, expected)


def test_vgg_with_conv5_equals_torchvision_and_adds_pool4_to_its_descriptors() -> None:
    theirs = their_vgg()
    model = DenseFeatures(ModelConfig(trunk="vgg16-conv5", channels=8, head="linear")).eval()
    load_initial_from(model.trunk, theirs.state_dict())
    with torch.inference_mode():
        found = model.trunk(_image(64), ("pool4", "conv5"))
        torch.testing.assert_close(found["conv5"], theirs["features"][:30](_image(64)))
        torch.testing.assert_close(found["pool4"], theirs["features"][:24](_image(64)))
    assert (model.lower, model.stride) == (("pool4",), 16)
    model.set_trained("last")
    wanted = {f"trunk.features.{i}.weight" for i in (24, 26, 28)}
    assert learning_weights(model) == wanted | {"head.weight"}


def test_folded_batch_norm_has_the_outputs_and_gradients_of_the_plain_one() -> None:
    torch.manual_seed(0)
    conv, bn = nn.Conv2d(3, 4, 3, padding=1, bias=False).double(), nn.BatchNorm2d(4).double()
    _randomised(bn, 3)
    image = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    weights = [conv.weight, bn.weight, bn.bias]
    plain, folded = bn(conv(image)), conv_bn(image, conv, bn, relu=False)
    torch.testing.assert_close(folded, plain)
    for ours, theirs in zip(
        torch.autograd.grad(folded.square().sum(), weights),
        torch.autograd.grad(plain.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_taps_are_the_papers_layers_and_deeper_ones_are_not_run() -> None:
    trunk = ResNet50().eval()
    assert list(trunk.taps)[-4:] == ["res4f", "res5a", "res5b", "res5c"]
    with torch.inference_mode():
        taps = trunk(_image(64), ("res3c", "res4c"))
    assert {k: tuple(v.shape[1:]) for k, v in taps.items()} == {
        "res3c": (512, 8, 8),
        "res4c": (1024, 4, 4),
    }


def learning_weights(model: DenseFeatures) -> set[str]:
    """Filters and matrices that learn, without norms and biases."""
    return {n for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1}


def test_the_last_stage_of_vgg_is_its_last_three_convolutions() -> None:
    model = DenseFeatures(ModelConfig(trunk="vgg16", channels=8, head="linear"))
    model.set_trained("last")
    wanted = {f"trunk.features.{i}.weight" for i in (17, 19, 21)}
    assert learning_weights(model) == wanted | {"head.weight"}


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "timm:vit_tiny_patch16_224"])
def test_images_are_scaled_as_the_published_weights_were_trained(name: str) -> None:
    if name.startswith("timm:"):
        published: Any = pytest.importorskip("timm").get_pretrained_cfg("vit_tiny_patch16_224")
    else:
        zoo = torchvision.models
        kinds = {"resnet50": zoo.ResNet50_Weights, "vgg16": zoo.VGG16_Weights}
        published = kinds[name].IMAGENET1K_V1.transforms()
    model = DenseFeatures(ModelConfig(trunk=name, channels=8))
    image = torch.rand(2, 3, 4, 5)
    for channel, (mean, std) in enumerate(zip(published.mean, published.std, strict=True)):
        scaled = model.normalise_input(image)[:, channel]
        torch.testing.assert_close(scaled, (image[:, channel] - mean) / std)


def test_the_small_trunk_keeps_its_own_scale() -> None:
    """Models that users have saved know no other."""
    model = DenseFeatures(ModelConfig(trunk="small", channels=8))
    scaled = model.normalise_input(torch.tensor([0.0, 0.5, 1.0]).expand(1, 3, 1, 3))
    assert scaled.flatten().tolist() == [-2.0, 0.0, 2.0] * 3


TIMM = {
    "resnet18": (16, "stage3", 0.75), "efficientnet_b0": (16, "stage3", 0.2),
    "convnext_atto": (16, "stage2", 0.56), "mobilenetv3_small_100": (16, "stage3", 0.06),
    "swin_tiny_patch4_window7_224": (32, "stage2", 0.56),
    "vit_tiny_patch16_224": (16, "block10", 0.24),
    "vit_small_patch14_reg4_dinov2": (14, "block10", 0.24),
}  # fmt: skip
"""Stride, the lower layer that is taken by itself, and the share of weights in the last stage."""


@pytest.mark.parametrize("name", TIMM)
def test_timm_trunks_take_any_size_and_keep_their_stride(name: str) -> None:
    pytest.importorskip("timm")
    stride, lower, share = TIMM[name]
    torch.manual_seed(0)
    model = DenseFeatures(ModelConfig(trunk=f"timm:{name}", channels=8)).eval()
    assert (model.stride, model.lower) == (stride, (lower,))
    with torch.inference_mode():
        for height, width in ((64, 96), (70, 99), (112, 70)):
            maps, below = model.forward_with_lower(torch.rand(1, 3, height, width))
            cells = (math.ceil(height / stride), math.ceil(width / stride))
            assert maps.descriptors.shape == (1, 8, *cells)
            assert below.shape[1] == model.trunk.taps[lower]
    (features,) = model.extract(np.zeros((50, 80, 3), np.uint8), longest_side=100)
    assert features.frame.network[1] % stride == 0
    model.set_trained("last")
    learns = sum(p.numel() for p in model.trunk.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.trunk.parameters())
    assert learns / total == pytest.approx(share, abs=0.02)


def test_the_last_blocks_of_a_vision_transformer_learn_and_no_others() -> None:
    pytest.importorskip("timm")
    model = DenseFeatures(ModelConfig(trunk="timm:vit_tiny_patch16_224", channels=8))
    model.set_trained("last")
    blocks = {name.split(".")[3] for name in learning_weights(model) if "blocks" in name}
    assert blocks == {"9", "10", "11"}
    others = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("blocks" in name or ".norm." in name or name.startswith("head.") for name in others)


def test_tokens_of_a_transformer_lie_where_their_patch_does() -> None:
    """Neither class token nor registers are taken for places: a patch changes its own cell most."""
    pytest.importorskip("timm")
    torch.manual_seed(0)
    trunk = build_trunk("timm:vit_small_patch14_reg4_dinov2").eval()
    plain = torch.randn(1, 3, 56, 84)
    marked = plain.clone()
    marked[..., 28:42, 56:70] += 2
    with torch.inference_mode():
        change = (trunk(marked, ("block0",))["block0"] - trunk(plain, ("block0",))["block0"]).norm(
            dim=1
        )
    assert int(change.flatten().argmax()) == 2 * 6 + 4


def test_weights_of_dinov2_as_its_authors_publish_them_are_read(tmp_path: Path) -> None:
    """Other names for the registers, and one table of places for class token and patches."""
    pytest.importorskip("timm")
    name = "timm:vit_small_patch14_reg4_dinov2"
    torch.manual_seed(0)
    trunk, other = build_trunk(name).eval(), build_trunk(name).eval()
    state = {key.removeprefix("net."): value for key, value in trunk.state_dict().items()}
    of_class = torch.randn(1, 1, 384)
    published = {k: v for k, v in state.items() if k != "reg_token"} | {
        "register_tokens": state["reg_token"], "mask_token": torch.zeros(1, 384),
        "cls_token": state["cls_token"] - of_class,
        "pos_embed": torch.cat([of_class, state["pos_embed"]], dim=1),
    }  # fmt: skip
    torch.save(published, tmp_path / "authors.pth")
    torch.save(state, tmp_path / "timm.pth")
    image = torch.randn(1, 3, 42, 56)
    with torch.inference_mode():
        wanted = trunk(image, ("block8",))["block8"]
        for file in ("authors.pth", "timm.pth"):
            load_initial(other, tmp_path / file, name=name)
            torch.testing.assert_close(other(image, ("block8",))["block8"], wanted)
            other = build_trunk(name).eval()
    del published["blocks.3.attn.qkv.weight"]
    torch.save(published, tmp_path / "partial.pth")
    with pytest.raises(ValueError, match=r"first 'net\.blocks\.3\.attn\.qkv\.weight'"):
        load_initial(other, tmp_path / "partial.pth", name=name)


@pytest.mark.parametrize("name", ["convnext_atto", "swin_tiny_patch4_window7_224", "resnet18"])
def test_weights_with_timm_s_own_names_are_read(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=10).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    trunk = build_trunk(f"timm:{name}").eval()
    load_initial(trunk, tmp_path / "weights.pth", name=name)
    image = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        expected = theirs.forward_intermediates(image, indices=[1], intermediates_only=True)[0]
        torch.testing.assert_close(trunk(image, ("stage1",))["stage1"], expected)


@pytest.mark.parametrize("name", ["resnet5", "timm:no_such_net_at_all"])
def test_unknown_trunks_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"choose|perhaps"):
        build_trunk(name)


def test_missing_or_wrong_weights_are_an_error_that_names_the_fix(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    trunk = build_trunk("small")
    state = trunk.state_dict()
    first = next(iter(state))
    save_file({k: v for k, v in state.items() if k != first}, tmp_path / "missing.safetensors")
    save_file(state | {first: torch.zeros(1)}, tmp_path / "shape.safetensors")
    torch.save({"state_dict": state}, tmp_path / "good.pth")
    with pytest.raises(ValueError, match=r"missing.*--init none"):
        load_initial(trunk, tmp_path / "missing.safetensors", name="small")
    with pytest.raises(ValueError, match=r"needs \(24, 3, 3, 3\)"):
        load_initial(trunk, tmp_path / "shape.safetensors", name="small")
    with pytest.raises(FileNotFoundError, match="--init is a file"):
        load_initial(trunk, tmp_path / "nothing.safetensors", name="small")
    with pytest.raises(ValueError, match="no ImageNet weights"):
        load_initial(trunk, "imagenet", name="small")
    load_initial(trunk, tmp_path / "good.pth", name="small")


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('executed')",))


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    torch.save({"weight": _Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match="no weights that can be read"):
        read_weights(tmp_path / "evil.pth")


def test_a_refused_pickle_is_one_error_and_no_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "new.pth").write_bytes(pickle.dumps({"weight": _Evil()}, protocol=4))
    with pytest.raises(ValueError, match="no weights that can be read"):
        read_weights(tmp_path / "new.pth")
    assert [str(one.message) for one in recwarn] == []


def test_v1_weights_are_recognised_and_fit(data_root: Path) -> None:
    path = data_root / "weights" / "resnet50_v1_imagenet.safetensors"
    assert stride_in_1x1_of(path) is True
    model = DenseFeatures.create(ModelConfig(), init=path)
    assert model.config.stride_in_1x1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ResNet-50 v1: as published", True), ("ResNet-50, stride in the first 1x1", True),
     ("ResNet-50 v1.5, stride in the 3x3", False), ("VGG16 v1: features", None), ("", None)],
)  # fmt: skip
def test_weights_may_say_which_resnet_they_are_for(
    text: str, expected: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"architecture": text})
    assert stride_in_1x1_of(path) is expected
    for silent in (tmp_path / "w.pth", tmp_path / "nowhere.safetensors"):
        assert stride_in_1x1_of(silent) is None


def test_only_the_chosen_layers_learn() -> None:
    model = DenseFeatures(ModelConfig(trunk="resnet50"))
    model.set_trained("last", batch_norm="trained")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.startswith(("trunk.layer4", "head")) for name in learning)
    norms = {name: m.training for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert norms["trunk.layer4.0.bn1"]
    assert not norms["trunk.layer3.0.bn1"]
    model.set_trained("all", batch_norm="frozen")
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    model.set_trained("head")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {f"head.{name}" for name in model.head.state_dict()}


@pytest.mark.parametrize("head", ["linear", "deep"])
def test_sigma_starts_near_one_and_descriptors_are_unit(head: HeadKind) -> None:
    model = DenseFeatures(ModelConfig(trunk="small", lower="conv4", channels=8, head=head)).eval()
    with torch.inference_mode():
        maps = model(torch.rand(2, 3, 64, 64))
    assert maps.uncertainty.median().item() == pytest.approx(1, abs=0.2)
    # Its weights are a tenth of the others', so that it hardly differs from place to place.
    spread = model.head.last.weight.detach().flatten(1).std(1)
    assert float(spread[-1] / spread[:-1].mean()) == pytest.approx(0.1, rel=0.2)
    torch.testing.assert_close(maps.descriptors.norm(dim=1), torch.ones(2, 8, 8))


def test_the_small_trunk_sees_colours_from_minus_2_to_2() -> None:
    model = DenseFeatures(ModelConfig(trunk="small", channels=4, head="linear"))
    scaled = model.normalise_input(torch.tensor([0.0, 0.5, 1.0])[:, None, None])
    assert scaled.flatten().tolist() == [-2.0, 0.0, 2.0]


def test_each_trunk_has_its_lower_layers() -> None:
    layers = {"vgg16": ("pool4",), "vgg16-conv5": ("pool4",), "small": ("conv4",)}
    for trunk, wanted in layers.items():
        assert DenseFeatures(ModelConfig(trunk=trunk)).lower == wanted
    assert DenseFeatures(ModelConfig()).lower == ("res4e", "res5c")
    assert DenseFeatures(ModelConfig(head="linear")).lower == ("res4e",)
    assert DenseFeatures(ModelConfig(trunk="small", lower="conv2+conv5")).lower == (
        "conv2",
        "conv5",
    )
    with pytest.raises(ValueError, match="small has no layer 'res4c'; choose auto"):
        DenseFeatures(ModelConfig(trunk="small", lower="conv2+res4c"))


def test_reading_at_cell_centres_gives_the_cells() -> None:
    model = DenseFeatures(ModelConfig(trunk="small", lower="conv4", channels=8)).eval()
    with torch.inference_mode():
        maps = model(torch.rand(1, 3, 32, 48))
        read, sigma = maps.at(torch.tensor([[[3.5, 3.5], [19.5, 11.5]]]))
    torch.testing.assert_close(read[0], maps.descriptors[0, :, [0, 1], [0, 2]].T)
    torch.testing.assert_close(sigma[0], maps.uncertainty[0, [0, 1], [0, 2]])

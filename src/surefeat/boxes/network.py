"""A detector learned from image labels alone, and its losses: WSDDN (Bilen & Vedaldi 2016).

Proposals are pooled from a trunk's map; two hidden layers and two heads score each of them for
each class. Its folder on disk holds detector.json and detector.safetensors.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import roi_pool

from surefeat.boxes.config import BoxesConfig, DetectorConfig, check_boxes_config
from surefeat.core.files import (
    checked_weights,
    choose_device,
    from_dict,
    read_tensors,
    to_dict,
    write_model,
)
from surefeat.core.geometry import box_iou
from surefeat.model.trunks import Trunk, Vgg16, build_trunk
from surefeat.model.weights import (
    check_finite,
    load_initial,
    model_to_start_from,
    read_weights,
    stride_in_1x1_of,
)


def class_region_scores(
    classes: Tensor, regions: Tensor, valid: Tensor, *, temperature: float
) -> Tensor:
    """Softmax over classes times softmax over regions: (B, R, K) twice -> (B, R, K) in [0, 1].

    classes, regions: outputs of the two heads; valid (B, R): padding takes no part and scores 0.
    Every image needs a valid region.
    """
    kind = classes.float().softmax(-1)
    hidden = (regions.float() / temperature).masked_fill(~valid[..., None], -torch.inf)
    return kind * hidden.softmax(1)


def image_log_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary log loss of image labels: region scores (B, R, K), labels (B, K) -> (B,).

    labels: +1 shown, -1 not shown, 0 not known, which counts for nothing; summed over classes.
    """
    # The image's score is the sum over regions; inside (0, 1), so that no logarithm is infinite.
    total = scores.sum(1).clamp(1e-6, 1 - 1e-6)
    right = torch.where(labels > 0, total, 1 - total)
    return -(right.log() * (labels != 0)).sum(-1)


def spatial_regulariser(
    scores: Tensor, hidden: Tensor, boxes: Tensor, labels: Tensor, valid: Tensor, *, overlap: float
) -> Tensor:
    """Pulls fc7 of the boxes around the best one to it: (B,), the mean over classes.

    scores (B, R, K), hidden (B, R, D) fc7, boxes (B, R, 4) inclusive, labels (B, K), valid (B, R).
    For each class an image shows: half the sum, over boxes with IoU above `overlap` with the best
    scored box, of the squared distance of their fc7, times the best score squared [P, section 3.4].
    """
    best, top = scores.detach().max(1)
    chosen = boxes.gather(1, top[..., None].expand(-1, -1, 4))
    around = torch.vmap(box_iou)(chosen, boxes) > overlap
    hidden = hidden.float()
    centre = hidden.gather(1, top[..., None].expand(-1, -1, hidden.shape[-1]))
    square = (
        centre.square().sum(-1)[:, :, None]
        + hidden.square().sum(-1)[:, None]
        - 2 * centre @ hidden.transpose(1, 2)
    ).clamp_min(0)
    counted = around & valid[:, None] & (labels > 0)[:, :, None]
    return 0.5 * (best.square()[..., None] * square * counted).sum((1, 2)) / labels.shape[1]


WEIGHTS, SETTINGS = "detector.safetensors", "detector.json"


class Detector(nn.Module):
    """Trunk, ROI pooling, fc6, fc7 and the two heads for the given categories."""

    def __init__(self, config: DetectorConfig, categories: tuple[str, ...]) -> None:
        super().__init__()
        if len(categories) < 2:
            raise ValueError(
                f"boxes need two categories or more to tell apart, got {list(categories)}; add "
                "photos that show something else, as a category of their own"
            )
        self.config, self.categories = config, categories
        self.fitted = BoxesConfig(detector=config)
        """What it is fitted with; predicting proposes boxes in the same way."""
        # The trunk is frozen: its maps are computed once.
        self.trunk = _trunk(config).eval().requires_grad_(False)
        self.tap = self.trunk.last if config.tap == "auto" else config.tap
        if self.tap not in self.trunk.taps:
            known = ", ".join(self.trunk.taps)
            raise ValueError(f"{config.trunk} has no layer {self.tap!r}; choose one of {known}")
        inputs = self.trunk.taps[self.tap] * config.pooled**2
        self.fc6 = nn.Linear(inputs, config.hidden)
        self.fc7 = nn.Linear(config.hidden, config.hidden)
        self.classify = nn.Linear(config.hidden, len(categories))
        self.localise = nn.Linear(config.hidden, len(categories))
        for layer in (self.fc6, self.fc7):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        for layer in (self.classify, self.localise):
            nn.init.normal_(layer.weight, std=0.01)
        for layer in (self.fc6, self.fc7, self.classify, self.localise):
            nn.init.zeros_(layer.bias)
        self.hidden_given = False  # whether fc6 and fc7 came with the initial weights
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.tensor(self.trunk.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(self.trunk.std)[:, None, None], persistent=False)
        self.scale: Tensor
        self.mean: Tensor
        self.std: Tensor

    @classmethod
    def create(
        cls, config: DetectorConfig, categories: tuple[str, ...], *, init: str | Path = "imagenet"
    ) -> Detector:
        """A detector ready for training; hidden layers too where the weights have fitting ones."""
        if config.trunk == "resnet50":
            said = stride_in_1x1_of(init)
            config = config if said is None else replace(config, stride_in_1x1=said)
        detector = cls(config, categories)
        load_initial(detector.trunk, init, name=config.trunk)
        plain = model_to_start_from(init, config.trunk) is None and str(init) != "none"
        if config.trunk == "vgg16" and plain:
            detector.hidden_given = detector.load_hidden(_vgg16_state(init))
        return detector

    def load_hidden(self, state: dict[str, Tensor]) -> bool:
        """Take fc6 and fc7 from VGG16's classifier; False where it has none or sizes differ."""
        layers = {"classifier.0": self.fc6, "classifier.3": self.fc7}  # torchvision's names
        for name, layer in layers.items():
            given = state.get(f"{name}.weight")
            if given is None or given.shape != layer.weight.shape:
                return False
        for name, layer in layers.items():
            layer.load_state_dict({k: state[f"{name}.{k}"].float() for k in ("weight", "bias")})
        return True

    def maps(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] -> the pooled layer (B, C, h, w)."""
        maps: Tensor = self.trunk((images - self.mean) / self.std, (self.tap,))[self.tap]
        return maps

    def pooled(self, maps: Tensor, cells: Tensor) -> Tensor:
        """What fc6 sees of the boxes: (B, R, D)."""
        return pool(maps, cells, size=self.config.pooled) * self.scale

    def forward(
        self, maps: Tensor, cells: Tensor, valid: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Maps (B, C, h, w), boxes as cells (B, R, 4), valid (B, R) -> scores (B, R, K) as by
        `class_region_scores`, and fc7 (B, R, D) after its ReLU.

        generator: draws what dropout switches off; without it nothing is.
        """
        hidden = self.pooled(maps, cells)
        for layer in (self.fc6, self.fc7):
            hidden = drop(F.relu(layer(hidden)), self.config.dropout, generator)
        heads = self.classify(hidden), self.localise(hidden)
        return class_region_scores(*heads, valid, temperature=self.config.temperature), hidden

    def save(self, folder: str | Path) -> None:
        """Write detector.json and detector.safetensors (half precision)."""
        folder, state = Path(folder), self.state_dict()
        halves = {k: v.half() if v.is_floating_point() and v.ndim else v for k, v in state.items()}
        fitted = replace(self.fitted, detector=self.config)
        about = {"config": to_dict(fitted), "categories": list(self.categories)}
        write_model(folder / WEIGHTS, halves, folder / SETTINGS, about)

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device | None = None) -> Detector:
        """Read what `save` wrote, also from inside a run folder."""
        folders = [f for f in (Path(folder), Path(folder) / "model") if (f / SETTINGS).is_file()]
        if not folders:
            raise FileNotFoundError(
                f"no detector at {folder} (looked for {SETTINGS}, also in model/); pass a folder "
                "written by `surefeat boxes fit`"
            )
        try:
            about = json.loads((folders[0] / SETTINGS).read_text())
            wanted = about["sha256"]
            fitted: BoxesConfig = from_dict(BoxesConfig, about["config"])
            check_boxes_config(fitted)
            categories = tuple(map(str, about["categories"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            fix = "it is damaged or of another version: fit it anew"
            raise ValueError(f"{folders[0] / SETTINGS}: {error}; {fix}") from error
        state = read_tensors(checked_weights(folders[0] / WEIGHTS, wanted))[0]
        check_finite(state, what=str(folders[0]))
        detector = cls(fitted.detector, categories)
        detector.fitted = fitted
        try:
            detector.load_state_dict({k: v.float() for k, v in state.items()})
        except RuntimeError as error:
            what = f"weights and {SETTINGS} are of different detectors"
            raise ValueError(f"{folders[0]}: {what}; fit it anew") from error
        return detector.eval().to(choose_device(device))


def pool(maps: Tensor, cells: Tensor, *, size: int) -> Tensor:
    """ROI max pooling: maps (B, C, h, w), cells (B, R, 4) -> (B, R, C * size^2) float32.

    cells are whole numbers x1, y1, x2, y2, inclusive. Of n cells, bin k takes floor(k n / size) up
    to ceil((k+1) n / size), so none is empty and neighbours may share a cell.
    """
    count, boxes = cells.shape[:2]
    image = torch.arange(count, device=cells.device).repeat_interleave(boxes)
    rois = torch.cat([image[:, None], cells.reshape(-1, 4)], dim=1)
    # The kernel divides boxes into bins in the precision of the maps, which half would blur.
    pooled: Tensor = roi_pool(maps.float(), rois.float(), size)
    return pooled.reshape(count, boxes, -1)


def drop(values: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """Dropout with its randomness as an argument; without a generator the values as they are."""
    if generator is None or not share:
        return values
    kept = torch.empty_like(values).bernoulli_(1 - share, generator=generator)
    return values * kept / (1 - share)


def _trunk(config: DetectorConfig) -> Trunk:
    if config.trunk == "vgg16":
        return Vgg16(conv5=True)
    if config.trunk == "vgg16-conv5":
        # Its hidden layers would stay random: they are looked for under the detector's own name.
        fix = "pass vgg16, which is conv5 here"
        raise ValueError(f"--detector.trunk vgg16-conv5 is the name for pretraining; {fix}")
    return build_trunk(config.trunk, stride_in_1x1=config.stride_in_1x1)


def _vgg16_state(init: str | Path) -> dict[str, Tensor]:
    from torchvision.models import VGG16_Weights

    if str(init) != "imagenet":
        return read_weights(Path(init))
    return dict(VGG16_Weights.IMAGENET1K_V1.get_state_dict(check_hash=True))

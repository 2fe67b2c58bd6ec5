"""Features of one image: descriptors, confidence and the frame they live in."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.geometry import Frame, pixel_to_grid, sample

# The file says what it is, so that another safetensors file is refused in words.
_FORMAT = "surefeat-features-1"


@dataclass(frozen=True)
class Features:
    """What the network knows of one image; all questions are asked in original pixels."""

    descriptors: Tensor
    """(C, h, w), unit length along C."""
    uncertainty: Tensor
    """(h, w): sigma; small where the descriptor can be trusted."""
    lower: Tensor
    """(D, h', w'): the lower layer matching adds, unit length along D."""
    frame: Frame
    """Original and network size of the image."""
    stride: int
    """Network pixels per cell of `descriptors`."""
    name: str = ""
    """Where the image came from."""

    @property
    def confidence(self) -> Tensor:
        """(h, w): 1/sigma, the paper's confidence."""
        return self.uncertainty.reciprocal()

    def cells(self, points: Tensor, *, stride: float | None = None) -> Tensor:
        """Original pixels (..., 2) -> cells (..., 2) of a map with this stride."""
        return pixel_to_grid(self.frame.to_network(points), stride or self.stride)

    def at(self, points: Tensor) -> Tensor:
        """Descriptors at points: (N, 2) original pixels (x, y) -> (N, C), unit length.

        Convention: pixel centres at integers; outside the image the border value is used.
        """
        return F.normalize(self._read(self.descriptors, points), dim=-1)

    def lower_at(self, points: Tensor) -> Tensor:
        """The lower layer at points: (N, 2) original pixels -> (N, D), unit length."""
        return F.normalize(self._read(self.lower, points), dim=-1)

    def confidence_at(self, points: Tensor) -> Tensor:
        """1/sigma at points: (N, 2) original pixels -> (N,)."""
        return self._read(self.uncertainty[None], points)[:, 0].reciprocal()

    def _read(self, maps: Tensor, points: Tensor) -> Tensor:
        points = points.to(maps.device, torch.float32)
        # A lower layer may be finer than the descriptors; its stride follows from its size.
        stride = self.frame.network[1] / maps.shape[-1]
        return sample(maps[None].float(), self.cells(points, stride=stride)[None])[0]

    def to(self, device: torch.device | str) -> Features:
        """The same features on another device."""
        return replace(
            self,
            descriptors=self.descriptors.to(device),
            uncertainty=self.uncertainty.to(device),
            lower=self.lower.to(device),
        )

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file in half precision, whole or not at all."""
        from safetensors.torch import save

        tensors = {
            "descriptors": self.descriptors.half().cpu().contiguous(),
            "uncertainty": self.uncertainty.float().cpu().contiguous(),
            "lower": self.lower.half().cpu().contiguous(),
        }
        about = {"original": self.frame.original, "network": self.frame.network,
                 "stride": self.stride, "name": self.name}  # fmt: skip
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(save(tensors, {"format": _FORMAT, "about": json.dumps(about)}))
        part.replace(path)

    @staticmethod
    def load(path: str | Path) -> Features:
        """Read what `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                if meta.get("format") != _FORMAT:
                    raise ValueError(f"{path} holds no surefeat features; write it with Features.save")
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable features file ({error})") from error
        about = json.loads(meta["about"])
        frame = Frame(tuple(about["original"]), tuple(about["network"]))
        return Features(**tensors, frame=frame, stride=about["stride"], name=about["name"])


def stack_points(points: object) -> Tensor:
    """Points as users write them (list, array, tensor) -> (N, 2) float32; anything else is an error."""
    tensor = torch.as_tensor(points, dtype=torch.float32)
    if tensor.ndim == 1 and tensor.numel() == 2:
        tensor = tensor[None]
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ValueError(f"points must be (N, 2) as x, y in pixels; got {tuple(tensor.shape)}")
    return tensor

"""EdgeBoxes (Zitnick & Dollár 2014) by OpenCV contrib: boxes with scores, from an edge map.

The edge map is OpenCV's structured edge detector's, with the user's own model file, as published;
or, without one, a thinned gradient map, which is weaker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

# Blur before the gradient, pixels.
_BLUR = 1.5


def edge_boxes(image: Tensor, *, count: int, model: str = "") -> tuple[Tensor, Tensor]:
    """Image (3, H, W) uint8 RGB -> at most `count` boxes (N, 4) and scores (N,), best first.

    Convention: inclusive boxes in the image's pixels. An image without edges has no boxes.
    """
    import numpy as np

    cv2 = _contrib()
    pixels: Floats = np.ascontiguousarray((image.cpu().float() / 255).permute(1, 2, 0).numpy())
    edges, angles = _structured(cv2, pixels, model) if model else gradient_edges(pixels)
    finder = cv2.ximgproc.createEdgeBoxes()
    finder.setMaxBoxes(count)
    boxes, scores = finder.getBoundingBoxes(edges, angles)
    if not len(boxes):
        return torch.zeros(0, 4), torch.zeros(0)
    x, y, w, h = torch.from_numpy(np.asarray(boxes)).float().unbind(-1)
    found = torch.stack([x, y, x + w - 1, y + h - 1], dim=-1)
    return found, torch.from_numpy(np.asarray(scores)).float().reshape(-1)


def gradient_edges(pixels: Floats) -> tuple[Floats, Floats]:
    """RGB (H, W, 3) in [0, 1] -> edge strength (H, W) in [0, 1], thinned, and angle in [0, pi).

    The strongest of the three channels' gradients counts; a pixel is kept where it is the largest
    across the edge. The angle is that of the edge's normal, as EdgeBoxes expects it.
    """
    import cv2
    import numpy as np

    blurred = cv2.GaussianBlur(pixels, (0, 0), _BLUR)
    across = np.asarray(cv2.Sobel(blurred, cv2.CV_32F, 1, 0, ksize=3))
    down = np.asarray(cv2.Sobel(blurred, cv2.CV_32F, 0, 1, ksize=3))
    channel = (across**2 + down**2).argmax(-1)[..., None]
    gx = np.take_along_axis(across, channel, -1)[..., 0]
    gy = np.take_along_axis(down, channel, -1)[..., 0]
    strength = np.hypot(gx, gy)
    unit = np.maximum(strength, 1e-12)
    rows, columns = np.indices(strength.shape, dtype=np.float32)
    largest = strength > 0
    for sign in (-1, 1):
        beside = cv2.remap(
            strength, columns + sign * gx / unit, rows + sign * gy / unit, cv2.INTER_LINEAR
        )
        largest &= strength >= beside
    top = float(np.quantile(strength, 0.99)) or 1.0
    edges = np.where(largest, np.minimum(strength / top, 1.0), 0.0).astype(np.float32)
    angles = np.mod(np.arctan2(gy, gx), np.pi).astype(np.float32)
    # Rounding takes angles just below zero to pi itself.
    return edges, np.where(angles >= np.pi, np.float32(0), angles)


def _structured(cv2: Any, pixels: Floats, model: str) -> tuple[Floats, Floats]:
    detector = cv2.ximgproc.createStructuredEdgeDetection(model)
    edges = detector.detectEdges(pixels)
    angles = detector.computeOrientation(edges)
    return detector.edgesNms(edges, angles), angles


def _contrib() -> Any:
    try:
        import cv2

        _ = cv2.ximgproc
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "EdgeBoxes need OpenCV's contrib modules: pip install 'surefeat[proposals]'"
        ) from error
    return cv2

"""`surefeat export`: a model or a keypoint detector as one file; heavy imports inside run()."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tyro.conf import Positional

from surefeat.cli_evaluate import say


@dataclass(frozen=True)
class Export:
    """Write the extractor, or a keypoint detector, as ONNX (.onnx) or torch.export (.pt2).

    Batch and size of the images stay open.
    """

    path: Positional[Path]
    """File to write; its extension decides."""
    model: str | None = None
    """Model or run folder, or a shipped model: resnet50 (default), vgg16."""
    detector: Path | None = None
    """Folder of a keypoint detector fitted on that model: it is written with it, as ONNX."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        from surefeat.exporting import export
        from surefeat.exporting_keypoints import export_detector
        from surefeat.keypoints import KeypointDetector
        from surefeat.model import DenseFeatures

        model = DenseFeatures.from_pretrained(self.model, device="cpu")
        if self.detector is None:
            done = export(model, self.path)
        else:
            done = export_detector(KeypointDetector.load(self.detector, model), self.path)
        say(asdict(done) | {"path": str(done.path)}, to_script=self.json)

"""Match two photos with an exported model: needs only numpy, Pillow and onnxruntime.

    surefeat export model.onnx
    python onnx_match.py model.onnx a.jpg b.jpg --out matches.png

Prints one match per line, best first: x0 y0 x1 y1 similarity confidence, in original pixels
(pixel centres at integers). Every cell of the one photo looks for its nearest neighbour in the
other, and a match is kept if both cells choose each other.
"""

from __future__ import annotations

import argparse
import colorsys

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps


def describe(session, path):
    """A photo, its cells' vectors (N, K), uncertainties (N,) and centres (N, 2) in its pixels."""
    about = session.get_modelmeta().custom_metadata_map
    stride, longest = int(about["stride"]), int(about["longest_side"])
    photo = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    # The longest side becomes the model's own; both are rounded to whole cells.
    cells = [max(1, int(side * longest / max(photo.size) / stride + 0.5)) for side in photo.size]
    small = photo.resize([n * stride for n in cells], Image.Resampling.BILINEAR)
    images = np.asarray(small, np.float32).transpose(2, 0, 1)[None] / 255
    descriptors, uncertainty, lower = (x[0] for x in session.run(None, {"images": images}))
    rows, columns = uncertainty.shape
    # A lower layer with finer cells is averaged over each cell of the descriptors.
    lower = lower.reshape(len(lower), rows, lower.shape[1] // rows, columns, -1).mean((2, 4))
    lower /= np.linalg.norm(lower, axis=0)
    # The inner product of two vectors is 1/3 descriptors' + 2/3 lower layers' similarity.
    vectors = np.concatenate([descriptors * (1 / 3) ** 0.5, lower * (2 / 3) ** 0.5])
    y, x = np.indices((rows, columns)).reshape(2, -1)
    centres = (np.stack([x, y], 1) + 0.5) * np.divide(photo.size, cells) - 0.5
    return photo, vectors.reshape(len(vectors), -1).T, uncertainty.ravel(), centres


def match(vectors0, vectors1):
    """Indices of the cells that are each other's nearest neighbours, and their similarity."""
    similarity = vectors0 @ vectors1.T
    there, back = similarity.argmax(1), similarity.argmax(0)
    index0 = np.flatnonzero(back[there] == np.arange(len(there)))
    index1 = there[index0]
    best_first = np.argsort(-similarity[index0, index1], kind="stable")
    index0, index1 = index0[best_first], index1[best_first]
    return index0, index1, similarity[index0, index1]


def picture(photo0, photo1, points0, points1):
    """Both photos side by side at one height, with a line for each match."""
    height = 480
    scales = [height / photo.height for photo in (photo0, photo1)]
    left, right = (
        photo.resize((max(1, round(photo.width * scale)), height))
        for photo, scale in zip((photo0, photo1), scales, strict=True)
    )
    page = Image.new("RGB", (left.width + 8 + right.width, height), "white")
    page.paste(left, (0, 0))
    page.paste(right, (left.width + 8, 0))
    draw = ImageDraw.Draw(page)
    starts = (points0 + 0.5) * scales[0]
    ends = (points1 + 0.5) * scales[1] + [left.width + 8, 0]
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        colour = tuple(int(255 * c) for c in colorsys.hsv_to_rgb(i * 0.618 % 1, 0.8, 1))
        draw.line([*start, *end], fill=colour, width=2)
        for x, y in (start, end):
            draw.ellipse([x - 4, y - 4, x + 4, y + 4], fill=colour, outline="white")
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="file written by `surefeat export`, .onnx")
    parser.add_argument("photos", nargs=2, help="the two photos")
    parser.add_argument("--count", type=int, default=40, help="matches to keep, the best ones")
    parser.add_argument("--out", help="picture to write, for example matches.png")
    arguments = parser.parse_args()
    session = onnxruntime.InferenceSession(arguments.model, providers=["CPUExecutionProvider"])
    (photo0, vectors0, sigma0, centres0), (photo1, vectors1, sigma1, centres1) = (
        describe(session, path) for path in arguments.photos
    )
    index0, index1, similarity = (each[: arguments.count] for each in match(vectors0, vectors1))
    points0, points1 = centres0[index0], centres1[index1]
    confidence = 2 / (sigma0[index0] + sigma1[index1])
    for row in np.column_stack([points0, points1, similarity, confidence]):
        print("{:.2f} {:.2f} {:.2f} {:.2f} {:.4f} {:.3f}".format(*row))
    if arguments.out:
        picture(photo0, photo1, points0, points1).save(arguments.out)


if __name__ == "__main__":
    main()

"""SLEAP's .slp and .pkg.slp files, through sleap-io.

Convention: the centre of the top-left pixel is (0, 0), as ours; sleap-io shifts files from before
SLEAP's format 1.1, which measured from the corner. A point with a place that is not visible is a
hidden one; skeletons are categories, with their edges and symmetries. A package (.pkg.slp) holds
its photos; other files name them. There are no boxes.
"""

from __future__ import annotations

import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from surefeat.core.files import write_bytes
from surefeat.core.image import read_bytes
from surefeat.data.coco import Annotation, Category, Coco, CocoImage, make_category
from surefeat.data.decode import Place, SourceError

PACKAGE = ".pkg.slp"

_FIX = "pass a .slp or .pkg.slp that SLEAP saved"


def read_sleap(path: Path) -> Coco:
    """What people labelled in photos; where nobody did, what was predicted in them."""
    sleap_io = _sleap_io()
    read_bytes(path, size=0)  # that it is there, in our words
    try:
        labels = sleap_io.load_slp(str(path), open_videos=False)
        frames = [(frame, _frame_name(frame, path)) for frame in labels.labeled_frames]
    except SourceError:
        raise
    except Exception as error:  # h5py raises nearly anything for a damaged file
        said = " ".join(str(error).split())[:200]
        raise SourceError(f"{path} is no file of SLEAP's ({said}); {_FIX}") from error
    categories = tuple(_category(skeleton) for skeleton in labels.skeletons)
    user = any(frame.user_instances for frame, _ in frames)
    short = _short_names([name for _, name in frames], path)
    images: list[CocoImage] = []
    rows: dict[str, int] = {}
    notes = []
    for frame, name in frames:
        if rows.setdefault(short[name], len(images)) == len(images):
            images.append(CocoImage(short[name], _size(frame.video)))
        for one in frame.user_instances if user else frame.predicted_instances:
            notes.append(_note(one, rows[short[name]], labels.skeletons.index(one.skeleton)))
    return Coco(tuple(images), _apart(categories), tuple(notes))


def _frame_name(frame: Any, path: Path) -> str:
    """The photo of a frame: its file, or what a package calls it."""
    video, number = frame.video, int(frame.frame_idx)
    if isinstance(video.filename, list):
        return str(video.filename[number])
    source = video.source_video
    if source is not None and isinstance(source.filename, list):
        return str(source.filename[number])
    if _is_embedded(video):
        stem = Path(str(source.filename if source is not None else path)).stem
        return f"{stem}_{number:06d}.png"
    fix = f"save it as a package ({PACKAGE}), which holds the frames as photos"
    raise SourceError(f"{path} labels a video ({video.filename}); {fix}")


def _is_embedded(video: Any) -> bool:
    about = video.backend_metadata
    return bool(about.get("has_embedded_images")) or about.get("filename") == "."


def _size(video: Any) -> tuple[int, int] | None:
    """(height, width) of a package's photos; a list of files may hold several sizes."""
    shape = video.backend_metadata.get("shape")
    return (int(shape[1]), int(shape[2])) if shape and _is_embedded(video) else None


def _short_names(names: Sequence[str], path: Path) -> dict[str, str]:
    """Names as they are; absolute ones below the file's folder, or that lead nowhere, shortened."""
    short = {}
    whole = [name for name in names if os.path.isabs(name)]
    shared = os.path.commonpath([os.path.dirname(name) for name in whole]) if whole else ""
    here = str(path.absolute().parent)
    for name in names:
        if not os.path.isabs(name):
            short[name] = name
        elif name.startswith(f"{here}{os.sep}"):
            short[name] = Path(name).relative_to(here).as_posix()
        else:
            inside = PurePosixPath(Path(os.path.relpath(name, shared)).as_posix())
            short[name] = name if os.path.exists(name) else str(inside)
    return short


def _category(skeleton: Any) -> Category:
    names = list(skeleton.node_names)
    flip = list(range(len(names)))
    for symmetry in skeleton.symmetries:
        first, second = (names.index(node.name) for node in symmetry.nodes)
        flip[first], flip[second] = second, first
    own = flip if skeleton.symmetries else None
    return make_category(skeleton.name or "object", names, own, skeleton.edge_inds)


def _apart(categories: Sequence[Category]) -> tuple[Category, ...]:
    """Categories with names of their own: SLEAP calls all its skeletons Skeleton-0."""
    names: list[str] = []
    for kind in categories:
        taken = names.count(kind.name)
        names.append(f"{kind.name} {taken + 1}" if taken else kind.name)
    return tuple(
        make_category(name, kind.keypoints, kind.flip, kind.edges)
        for name, kind in zip(names, categories, strict=True)
    )


def _note(one: Any, image: int, category: int) -> Annotation:
    keypoints: list[float] = []
    for (x, y), seen in zip(one.points["xy"].tolist(), one.points["visible"], strict=True):
        there = math.isfinite(x) and math.isfinite(y)
        keypoints += [x, y, 2 if seen else 1] if there else [0, 0, 0]
    known = one.track.name if one.track is not None else ""
    more = {}
    if "score" in (one.points.dtype.names or ()):
        more = {"keypoint_scores": [round(float(score), 4) for score in one.points["score"]]}
    return Annotation(image, category, None, tuple(keypoints), individual=known, more=more)


def packed_photos(path: Path) -> dict[str, Place]:
    """Of a package: the name of each photo, and where its bytes lie in the file; {}: it has none.

    A photo that is compressed once more, or whose colours are swapped, is refused with the fix.
    """
    import h5py

    labels = _sleap_io().load_slp(str(path), open_videos=False)
    names = [_frame_name(frame, path) for frame in labels.labeled_frames]
    short, places = _short_names(names, path), {}
    with h5py.File(path, "r") as file:
        for frame, name in zip(labels.labeled_frames, names, strict=True):
            if _is_embedded(frame.video):
                places[short[name]] = _packed(file, frame, path)
    return places


def _packed(file: Any, frame: Any, path: Path) -> Place:
    data = file[frame.video.backend_metadata["dataset"]]
    numbers = data.parent["frame_numbers"][()].tolist() if "frame_numbers" in data.parent else None
    row = numbers.index(int(frame.frame_idx)) if numbers else int(frame.frame_idx)
    start = data.id.get_offset()
    order = data.attrs.get("channel_order", "RGB")
    if start is None or data.ndim != 2 or order != "RGB" or data.dtype.itemsize != 1:
        fix = "save it anew with sleap-io, or pass the photos it was made of"
        return Place(str(path), refused=f"is packed in a way that is not read; {fix}")
    width = data.shape[1]
    return Place(str(path), int(start) + row * width, width)


def write_sleap(path: Path, coco: Coco, photos: Callable[[str], Place] | None) -> None:
    """Write labels; as a package, with the photos in it. What a detector found is predicted."""
    with tempfile.TemporaryDirectory() as made:
        packed = path.name.lower().endswith(PACKAGE)
        folder = Path(made) / "photos" if packed else None
        if folder is not None:
            _unpack(folder, coco, photos)
        labels = _labels(coco, folder)
        file = Path(made) / f"made{PACKAGE if packed else '.slp'}"
        labels.save(str(file), embed=packed, verbose=False)
        data = file.read_bytes()
        write_bytes(path, _with_own_names(data, f"{folder}/") if packed else data)


def _unpack(folder: Path, coco: Coco, photos: Callable[[str], Place] | None) -> None:
    for image in coco.images:
        place = photos(image.name) if photos else Place("", refused="is not there")
        if place.refused:
            fix = "pass --images, or write a plain .slp, which only names the photos"
            raise SourceError(f"{image.name} {place.refused}; {fix}")
        data = read_bytes(place.path, offset=place.offset, size=place.size)
        write_bytes(folder / image.name.lstrip("/"), data)


def _labels(coco: Coco, folder: Path | None) -> Any:
    sleap_io = _sleap_io()
    skeletons = [_skeleton(kind) for kind in coco.categories]
    tracks = {name: sleap_io.Track(name) for name in dict.fromkeys(
        note.individual for note in coco.annotations if note.individual)}  # fmt: skip
    videos = {size: _video([i for i in coco.images if i.size == size], folder)
              for size in dict.fromkeys(image.size for image in coco.images)}  # fmt: skip
    numbers: dict[tuple[int, int] | None, Iterator[int]] = {size: iter(range(len(coco.images)))
                                                            for size in videos}  # fmt: skip
    frames = []
    for image, notes in zip(coco.images, coco.by_image(), strict=True):
        found = [_instance(note, skeletons, tracks) for note in notes]
        number = next(numbers[image.size])
        frames.append(sleap_io.LabeledFrame(videos[image.size], number, found))
    return sleap_io.Labels(
        frames, videos=list(videos.values()), skeletons=skeletons, tracks=list(tracks.values())
    )


def _video(images: Sequence[CocoImage], folder: Path | None) -> Any:
    """Photos of one size, as SLEAP has them: a video made of files."""
    names = [image.name for image in images]
    if folder is not None:
        return _sleap_io().Video.from_filename([str(folder / name.lstrip("/")) for name in names])
    size = images[0].size
    about = {"type": "ImageVideo", "filename": names[0], "filenames": names, "grayscale": False,
             "shape": [len(names), *size, 3] if size else None}  # fmt: skip
    return _sleap_io().Video(filename=names, backend_metadata=about, open_backend=False)


def _skeleton(kind: Category) -> Any:
    pairs = {tuple(sorted((i, twin))) for i, twin in enumerate(kind.flip) if i != twin}
    return _sleap_io().Skeleton(
        nodes=list(kind.keypoints),
        edges=[(kind.keypoints[a], kind.keypoints[b]) for a, b in kind.edges],
        symmetries=[(kind.keypoints[a], kind.keypoints[b]) for a, b in sorted(pairs)],
        name=kind.name,
    )


def _instance(note: Annotation, skeletons: Sequence[Any], tracks: dict[str, Any]) -> Any:
    sleap_io = _sleap_io()
    assert note.category is not None
    skeleton, track = skeletons[note.category], tracks.get(note.individual)
    count = len(skeleton.nodes)
    triples = np.array(note.keypoints or [0.0] * 3 * count, np.float64).reshape(-1, 3)
    points = np.where(triples[:, 2:] > 0, triples[:, :2], np.nan)
    scores = note.more.get("keypoint_scores")
    if scores is None:
        one = sleap_io.Instance.from_numpy(points, skeleton=skeleton, track=track)
    else:
        one = sleap_io.PredictedInstance.from_numpy(
            points, skeleton=skeleton, track=track, point_scores=np.array(scores, np.float64),
            score=float(note.more.get("score", 0.0)),
        )  # fmt: skip
    one.points["visible"] = triples[:, 2] == 2
    return one


def _with_own_names(data: bytes, folder: str) -> bytes:
    """A package whose photos are called as they were before they were copied for packing."""
    import h5py

    buffer = io.BytesIO(data)
    with h5py.File(buffer, "r+") as file:
        for group in file.values():
            if isinstance(group, h5py.Group) and "source_video" in group:
                source = group["source_video"]
                text = json.dumps(json.loads(source.attrs["json"]))
                source.attrs["json"] = text.replace(folder, "")
    return buffer.getvalue()


def _sleap_io() -> Any:
    try:
        import sleap_io
    except ImportError as error:
        raise ImportError("SLEAP's files need sleap-io: pip install 'surefeat[pose]'") from error
    return sleap_io

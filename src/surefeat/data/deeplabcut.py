"""DeepLabCut's labels: CollectedData_<scorer>, as CSV or as the HDF5 that pandas writes.

Convention: DeepLabCut labels in napari, whose pixel centres are integers, as ours are. A table has
a row for each photo and a column for x and y of each body part, of each individual where there are
several. It has no boxes, no kinds of objects and no hidden parts: a part has a place or none.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from surefeat.core.files import write_bytes, write_text
from surefeat.core.image import read_bytes
from surefeat.data.coco import Annotation, Coco, CocoImage, make_category
from surefeat.data.decode import SourceError

if TYPE_CHECKING:
    import h5py

KEY = "df_with_missing"
"""Of the table in an HDF5 file."""

UNIQUE = "single"
"""The individual of those body parts that no animal has: a corner of the cage."""

_HEADS = ("scorer", "individuals", "bodyparts", "coords")

_FIX = "pass CollectedData_<scorer>.csv as DeepLabCut wrote it"

# None, as PyTables keeps it.
_NONE = np.bytes_(b"N.")


@dataclass(frozen=True)
class _Table:
    """The labels of some photos."""

    photos: tuple[str, ...]
    columns: tuple[tuple[str, str, str], ...]
    """Individual (none: ""), body part, x or y (or likelihood)."""
    values: npt.NDArray[np.float64]
    """(photos, columns), NaN where there is no label."""


def read_deeplabcut(path: Path) -> Coco:
    """The labels of a table, or of all tables below a folder; photos are named as they name them.

    Body parts are the keypoints of one category, called object; those of no animal are another's,
    called single. Edges come from the project's config.yaml, where the tables lie in one.
    """
    files = _tables_below(path) if path.is_dir() else [path]
    tables = [_read_csv(file) if _is_text(file) else _read_h5(file) for file in files]
    images: list[CocoImage] = []
    notes: list[Annotation] = []
    kinds: dict[str, tuple[str, ...]] = {}
    for file, table in zip(files, tables, strict=True):
        for individual, parts in _individuals(table).items():
            name = UNIQUE if individual == UNIQUE else "object"
            if kinds.setdefault(name, parts) != parts:
                fix = "give every animal and every table the same body parts"
                raise SourceError(f"{file}: {individual or 'it'} has other body parts; {fix}")
        order = list(kinds)
        for row, photo in enumerate(table.photos):
            notes += _objects(table, row, len(images), kinds, order)
            images.append(CocoImage(photo))
    edges = _project_edges(files[0])
    categories = tuple(
        make_category(name, parts, edges=[(parts.index(a), parts.index(b))
                                          for a, b in edges if {a, b} <= set(parts)])
        for name, parts in kinds.items()
    )  # fmt: skip
    return Coco(tuple(images), categories, tuple(notes))


def _tables_below(folder: Path) -> list[Path]:
    """Of every folder with a table its CSV, or where there is none its HDF5."""
    files = sorted(folder.rglob("CollectedData_*.csv"))
    there = {file.parent for file in files}
    files += [f for f in sorted(folder.rglob("CollectedData_*.h5")) if f.parent not in there]
    if not files:
        raise SourceError(f"{folder} holds no CollectedData_*.csv; {_FIX}")
    return files


def _is_text(file: Path) -> bool:
    return file.suffix.lower() == ".csv"


def _individuals(table: _Table) -> dict[str, tuple[str, ...]]:
    """Individual -> its body parts, in their order."""
    parts: dict[str, dict[str, None]] = {}
    for individual, part, _ in table.columns:
        parts.setdefault(individual, {})[part] = None
    return {individual: tuple(names) for individual, names in parts.items()}


def _objects(
    table: _Table, row: int, image: int, kinds: dict[str, tuple[str, ...]], order: list[str]
) -> list[Annotation]:
    places = dict(zip(table.columns, table.values[row].tolist(), strict=True))
    notes = []
    for individual in _individuals(table):
        name = UNIQUE if individual == UNIQUE else "object"
        numbers: list[float] = []
        for part in kinds[name]:
            x, y = (places.get((individual, part, axis), math.nan) for axis in "xy")
            numbers += [x, y, 2] if math.isfinite(x) and math.isfinite(y) else [0, 0, 0]
        if any(numbers[2::3]):
            known = "" if individual == UNIQUE else individual
            about = (image, order.index(name), None, tuple(numbers))
            notes.append(Annotation(*about, id=table.photos[row], individual=known))
    return notes


def _read_csv(path: Path) -> _Table:
    try:
        text = read_bytes(path).decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} is no table ({error}); {_FIX}") from error
    heads = {row[0]: row for row in rows[:4] if row[0] in _HEADS}
    if not {"bodyparts", "coords"} <= heads.keys() or "x" not in heads["coords"]:
        what = "has no lines scorer, bodyparts and coords at its top"
        raise SourceError(f"{path} {what}; {_FIX}")
    first, body = heads["coords"].index("x"), rows[len(heads) :]
    nobody = [""] * len(heads["coords"])
    names = [heads.get(head, nobody)[first:] for head in _HEADS[1:]]
    columns = tuple(zip(*names, strict=False))
    try:
        values = [[float(cell) if cell.strip() else math.nan for cell in row[first:]]
                  for row in body]  # fmt: skip
        table = np.array(values, np.float64).reshape(len(body), len(columns))
    except ValueError as error:
        raise SourceError(f"{path} holds what is no number ({error}); {_FIX}") from error
    photos = tuple(_photo(row[:first], path) for row in body)
    return _Table(photos, columns, table)


def _photo(parts: Sequence[str], path: Path) -> str:
    """A row's name: the path of a photo, in one piece or in its parts."""
    name = "/".join(part for part in parts if part).replace("\\", "/")
    if not PurePosixPath(name).suffix:
        what = f"has a row {name!r}, which is a frame of a video and no photo"
        raise SourceError(f"{path} {what}; pass labels of photos, CollectedData_<scorer>.csv")
    return name


def _read_h5(path: Path) -> _Table:
    """The fixed layout, read as arrays: nothing of it is unpickled."""
    h5py = _h5py()
    try:
        with h5py.File(io.BytesIO(read_bytes(path)), "r") as file:
            group = next(iter(file.values()), None)
            if not isinstance(group, h5py.Group) or "axis0_level0" not in group:
                fix = f"pass {path.stem}.csv, which DeepLabCut writes beside it"
                raise SourceError(f"{path} is not in pandas' fixed layout; {fix}")
            columns = _axis(group, "axis0")
            photos = _axis(group, "axis1")
            values = np.full((len(photos), len(columns)), np.nan)
            for block in range(int(group.attrs["nblocks"])):
                places = [columns.index(item) for item in _axis(group, f"block{block}_items")]
                values[:, places] = group[f"block{block}_values"][()]
            names = [_text(group[f"axis0_level{level}"].attrs.get("name", b""))
                     for level in range(len(columns[0]))]  # fmt: skip
    except SourceError:
        raise
    except Exception as error:  # h5py raises nearly anything for a damaged file
        raise SourceError(f"{path} is no table of DeepLabCut's ({error}); {_FIX}") from error
    kept = [names.index(head) if head in names else None for head in _HEADS[1:]]
    if None in kept[1:]:
        raise SourceError(f"{path} has no levels bodyparts and coords; {_FIX}")
    tidy = tuple(tuple("" if k is None else column[k] for k in kept) for column in columns)
    return _Table(tuple(_photo(row, path) for row in photos), tidy, values)  # type: ignore[arg-type]


def _axis(group: h5py.Group, name: str) -> list[tuple[str, ...]]:
    """The labels of an axis, level by level; an axis with one level has its values as they are."""
    if name in group:
        return [(_text(value),) for value in group[name][()]]
    levels: list[list[str]] = []
    while f"{name}_level{len(levels)}" in group:
        known = [_text(value) for value in group[f"{name}_level{len(levels)}"][()]]
        codes = group[f"{name}_label{len(levels)}"][()].tolist()
        levels.append(["" if code < 0 else known[code] for code in codes])
    return list(zip(*levels, strict=True))


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _project_edges(table: Path) -> list[tuple[str, str]]:
    """The lines between body parts that the config.yaml of a table's project names."""
    config = table.absolute().parents[min(2, len(table.absolute().parents) - 1)] / "config.yaml"
    if not config.is_file():
        return []
    try:
        import yaml
    except ImportError:
        return []
    try:
        content = yaml.safe_load(read_bytes(config))
        return [(str(first), str(second)) for first, second in content.get("skeleton") or ()]
    except (yaml.YAMLError, AttributeError, TypeError, ValueError):
        return []  # a file of that name that is none of DeepLabCut's


def write_deeplabcut(path: Path, coco: Coco) -> None:
    """Write the objects of one category (and of one called single) as a table, CSV or HDF5."""
    animals = [row for row, kind in enumerate(coco.categories) if kind.name != UNIQUE]
    used = {note.category for note in coco.annotations}
    several = [coco.categories[row].name for row in animals if row in used]
    if len(several) > 1:
        names = ", ".join(several)
        fix = "choose one with --categories"
        raise SourceError(f"DeepLabCut labels one kind of thing, here are {names}; {fix}")
    columns, values = _columns(coco)
    scorer = path.stem.removeprefix("CollectedData_") if "_" in path.stem else "surefeat"
    named = any(individual for individual, _, _ in columns)
    table = _Table(tuple(image.name for image in coco.images), tuple(columns), values)
    if _is_text(path):
        write_text(path, _as_csv(table, scorer, several=named))
    else:
        write_bytes(path, _as_h5(table, scorer, several=named))


def _columns(coco: Coco) -> tuple[list[tuple[str, str, str]], npt.NDArray[np.float64]]:
    """Columns and values; where photos show several objects, or animals are known, individuals."""
    named: dict[str, int] = {}
    places: list[tuple[int, str, Annotation]] = []
    several = any(note.individual for note in coco.annotations)
    for image, notes in enumerate(coco.by_image()):
        taken: set[str] = set()
        for note in notes:
            assert note.category is not None
            if coco.categories[note.category].name == UNIQUE:
                name = UNIQUE
            else:
                free = (f"individual{i}" for i in range(1, len(notes) + 1))
                name = note.individual or next(n for n in free if n not in taken)
            several |= name in (UNIQUE, "individual2")
            if name in taken:
                fix = "give every individual its own name"
                raise SourceError(f"{coco.images[image].name} shows {name!r} twice; {fix}")
            taken.add(name)
            named.setdefault(name, note.category)
            places.append((image, name, note))
    named = named or {"individual1": 0}
    columns = [
        (individual, part, axis)
        for individual in sorted(named, key=lambda name: (name == UNIQUE, name))
        for part in coco.categories[named[individual]].keypoints
        for axis in "xy"
    ]
    first = {column[0]: place for place, column in reversed(list(enumerate(columns)))}
    values = np.full((len(coco.images), len(columns)), np.nan)
    for image, name, note in places:
        triples = np.array(note.keypoints, np.float64).reshape(-1, 3)
        points = np.where(triples[:, 2:] > 0, triples[:, :2], np.nan).ravel()
        values[image, first[name] : first[name] + len(points)] = points
    return [(name if several else "", part, axis) for name, part, axis in columns], values


def _as_csv(table: _Table, scorer: str, *, several: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    index = _index(table.photos)
    for head, labels in _header(table, scorer, several=several):
        writer.writerow([head, *[""] * (len(index[0]) - 1), *labels])
    for parts, row in zip(index, table.values.tolist(), strict=True):
        writer.writerow([*parts, *("" if math.isnan(value) else repr(value) for value in row)])
    return text.getvalue()


def _header(table: _Table, scorer: str, *, several: bool) -> list[tuple[str, list[str]]]:
    individuals, parts, axes = (list(level) for level in zip(*table.columns, strict=True))
    levels = [("scorer", [scorer] * len(parts)), ("bodyparts", parts), ("coords", axes)]
    return [levels[0], ("individuals", individuals), *levels[1:]] if several else levels


def _index(photos: Sequence[str]) -> list[tuple[str, ...]]:
    """labeled-data, video, photo, as DeepLabCut has them; other paths in one piece."""
    parts = [PurePosixPath(photo).parts for photo in photos]
    usual = bool(parts) and all(len(p) == 3 and p[0] == "labeled-data" for p in parts)
    return [tuple(p) for p in parts] if usual else [(photo,) for photo in photos] or [("",)]


def _as_h5(table: _Table, scorer: str, *, several: bool) -> bytes:
    """As pandas' to_hdf writes a frame of one block: DataFrames are read back by read_hdf."""
    buffer = io.BytesIO()
    with _h5py().File(buffer, "w") as file:
        _mark(file, "GROUP", {"PYTABLES_FORMAT_VERSION": np.bytes_(b"2.1")})
        group = file.create_group(KEY)
        utf8 = {"encoding": np.bytes_(b"UTF-8"), "errors": np.bytes_(b"strict")}
        frame = {"pandas_type": np.bytes_(b"frame"), "ndim": 2, "nblocks": 1}
        _mark(group, "GROUP", frame | utf8)
        header = _header(table, scorer, several=several)
        columns = list(zip(*(labels for _, labels in header), strict=True))
        names = [head for head, _ in header]
        for axis in ("axis0", "block0_items"):
            _add_axis(group, axis, columns, names)
        _add_axis(group, "axis1", _index(table.photos), None)
        _add(group, "block0_values", table.values)
    return buffer.getvalue()


def _add_axis(
    group: h5py.Group, axis: str, labels: Sequence[tuple[str, ...]], names: list[str] | None
) -> None:
    depth = len(labels[0])
    _say(group, f"{axis}_variety", np.bytes_(b"multi" if depth > 1 else b"regular"))
    about = {"kind": np.bytes_(b"string"), "nan_rep": _empty()}
    if depth == 1:
        _add(group, axis, _strings([label[0] for label in labels]), about | {"name": _NONE})
        return
    group.attrs[f"{axis}_nlevels"] = depth
    for level, values in enumerate(zip(*labels, strict=True)):
        known = sorted(set(values))
        name = _NONE if names is None else np.bytes_(names[level].encode())
        said = f"{axis}_name{None if names is None else names[level]}"
        named = about | {"name": name, said: name}
        _add(group, f"{axis}_level{level}", _strings(known), named)
        codes = np.array([known.index(value) for value in values], np.int32)
        _add(group, f"{axis}_label{level}", codes)


def _strings(values: Sequence[str]) -> npt.NDArray[np.bytes_]:
    return np.array([value.encode("utf-8") for value in values])


def _add(
    group: h5py.Group, name: str, data: npt.NDArray[Any], about: dict[str, Any] | None = None
) -> None:
    array = group.create_dataset(name, data=data)
    flavour = {"FLAVOR": np.bytes_(b"numpy"), "transposed": np.uint8(1)}
    _mark(array, "ARRAY", flavour | (about or {}), version=b"2.4")


def _mark(node: Any, kind: str, about: dict[str, Any], *, version: bytes = b"1.0") -> None:
    """What PyTables wants to read of every node."""
    plain = {"CLASS": np.bytes_(kind.encode()), "VERSION": np.bytes_(version), "TITLE": _empty()}
    for name, value in (plain | about).items():
        _say(node, name, value)


def _say(node: Any, name: str, value: Any) -> None:
    """PyTables reads text as text only where it is marked as UTF-8; None is none."""
    text = isinstance(value, np.bytes_) and value is not _NONE
    node.attrs.create(
        name, value, dtype=_h5py().string_dtype("utf-8", len(value)) if text else None
    )


def _empty() -> Any:
    return _h5py().Empty(_h5py().string_dtype("utf-8", 1))


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        fix = "pip install 'surefeat[pose]'"
        raise ImportError(f"DeepLabCut's HDF5 files need h5py: {fix}") from error
    return h5py

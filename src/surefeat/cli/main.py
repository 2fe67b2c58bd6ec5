"""The command line: one frozen dataclass per command; heavy imports inside run().

Help must come in under half a second, so nothing here imports torch at the top.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro
from tyro.conf import Positional, arg, subcommand

from surefeat import __version__
from surefeat.cli.boxes import Boxes
from surefeat.cli.data import Data, Export
from surefeat.cli.evaluate import Evaluate
from surefeat.cli.help import parse_or_say, print_help
from surefeat.cli.keypoints import Keypoints
from surefeat.cli.output import (
    Device,
    Json,
    Model,
    Tiles,
    drawing,
    in_a_line,
    read_points,
    refuse_numbers,
    say,
    say_aside,
)
from surefeat.cli.peers import Peers
from surefeat.cli.search import Find, Index
from surefeat.learn.config import Config, Preset, preset, refuse_preset

if TYPE_CHECKING:
    from surefeat.index.engines import CellsWritten
    from surefeat.match.points import Matches
    from surefeat.model.extract import Extracted


@dataclass(frozen=True)
class Pretrain:
    """Learn features and confidence from a folder, a list, tar shards or a COCO json."""

    source: Positional[Path]
    """Folder at any depth, list file, .tar shard(s) or COCO json (whose boxes become crops)."""
    out: Path
    """Run folder to create."""
    preset: Preset = "auto"
    """auto: ours, or on a CPU quick, with steps by the number of photos; ours: what worked best;
    quick: minutes on a CPU; one-way: for things that always face one way; paper: as printed; small:
    a tiny network. Sets the defaults below."""
    init: str | None = None
    """Where to start: shipped (the model in the package; the default), another model's folder or
    run, imagenet (downloaded), a file of weights (safetensors, state dict), or none."""
    steps: int | None = None
    """The same as --train.steps; with --resume, the run's new last step."""
    images: Path | None = None
    """Where a list or COCO json finds its images: a folder or tar shards."""
    crop: Path | None = None
    """COCO json whose boxes are cut from the images."""
    keep: Path | None = None
    """List of the image names to use."""
    categories: tuple[str, ...] | None = None
    """Only boxes of these categories."""
    context: float | None = None
    """Boxes grow by this share of their size on each side; by default a fifth."""
    resume: bool = False
    """Continue the run in --out exactly, with its own settings; only --steps may change."""
    overfit: int = 0
    """Learn this many images by heart: a check that learning works."""
    device: Device = None
    tensorboard: bool = False
    """Also write TensorBoard files (the tensorboard extra)."""
    json: Json = False
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)

    def run(self) -> None:
        from surefeat.learn.loop import join_processes
        from surefeat.learn.pretrain import pretrain
        from surefeat.learn.runs import Run

        if self.resume:
            run = Run.open(self.out)
            refuse_preset(self.preset, run.settings(Config), run=self.out)
            run.refuse_others(self.config, usual=preset(self.preset))
        done = pretrain(
            self.source, out=self.out, steps=self.steps, config=self.config, init=self.init,
            fit=self.preset == "auto",
            crop=self.crop, resume=self.resume, overfit=self.overfit, device=self.device,
            quiet=self.json, tensorboard=self.tensorboard, images=self.images, keep=self.keep,
            categories=self.categories, context=self.context,
        )  # fmt: skip
        if join_processes(self.device)[0].rank > 0:
            return  # of torchrun's processes the first speaks, and draws, for all
        result = {
            "model": str(done.folder / "model"), "steps": done.progress.step,
            "seconds": round(done.progress.seconds, 1), "skipped": len(done.skipped),
            "self_check": done.check.to_dict() if done.check else None,
            "probability": done.trust,
        }  # fmt: skip
        say(result | {"report": _report(done.folder)}, to_script=self.json)


@dataclass(frozen=True)
class Extract:
    """Features of images to disk: a file each, or tables of cells; continues where it stopped."""

    images: Positional[tuple[Path, ...]]
    """Images and folders; with --format parquet also lists, tar shards and Parquet files."""
    out: Path
    """Folder for the feature files."""
    model: Model = None
    side: int | None = None
    """Longest side at which images are seen, network pixels."""
    format: Literal["safetensors", "parquet"] = "safetensors"
    """safetensors: all features of an image in a file of its own; parquet: descriptors cell by
    cell, some hundred photos a file (the scale extra)."""
    budget: int | None = None
    """Parquet: keep so many cells of an image, confident ones spread out; by default all."""
    kind: Literal["half", "int8"] = "int8"
    """Parquet: how descriptors are stored; int8 is times 127, rounded."""
    engine: Literal["here", "ray"] = "here"
    """Parquet: this process (of torchrun's, its share), or workers on Ray (the scale extra)."""
    address: str | None = None
    """Parquet, Ray: of a cluster, such as 10.0.0.1:6379, or auto; by default this machine."""
    workers: int | None = None
    """Parquet: files made at the same time; by default one a core, or one a GPU."""
    shard: int = 256
    """Parquet: photos a file; a lost worker costs no more."""
    batch: int = 16
    """Images per pass."""
    tiles: Tiles = False
    device: Device = None
    json: Json = False

    def run(self) -> None:
        done: Extracted | CellsWritten
        if self.format == "parquet":
            done = self._tables()
        else:
            from surefeat.model.extract import extract_to_folder

            self._refuse_table_options()
            done = extract_to_folder(
                self.images, self.out, model=self.model, longest_side=self.side, batch=self.batch,
                tiles=self.tiles, device=self.device, quiet=self.json,
            )  # fmt: skip
        result = asdict(done)
        if not self.json:
            listed = f", listed in {done.listed}" if done.listed else ""
            result = result | {"skipped": f"{len(done.skipped)}{listed}"}
            del result["listed"]
        say(result, to_script=self.json)

    def _tables(self) -> CellsWritten:
        from surefeat.index.engines import write_cells
        from surefeat.index.shards import CellSettings

        settings = CellSettings(
            kind=self.kind, budget=self.budget, photos=self.shard, batch=self.batch,
            longest_side=self.side, tiles=self.tiles,
        )  # fmt: skip
        return write_cells(
            self.images, self.out, model=self.model, settings=settings, engine=self.engine,
            address=self.address, workers=self.workers, device=self.device, quiet=self.json,
        )  # fmt: skip

    def _refuse_table_options(self) -> None:
        """An option that would have no effect is a misunderstanding."""
        asked = {"engine": self.engine != "here", "kind": self.kind != "int8"}
        asked["shard"] = self.shard != 256
        for name in ("budget", "address", "workers"):
            asked[name] = getattr(self, name) is not None
        if any(asked.values()):
            name = next(name for name, given in asked.items() if given)
            raise ValueError(f"--{name} is for tables of cells; add --format parquet")


@dataclass(frozen=True)
class Report:
    """Write RUN/report.html anew: curves, warped views, confidence maps, PCA, settings."""

    folder: Positional[Path]
    """Run folder."""
    images: tuple[Path, ...] = ()
    """Images to show; by default those the run kept as examples."""
    json: Json = False

    def run(self) -> None:
        from surefeat.show.report import write_report

        page = str(write_report(self.folder, images=self.images))
        say({"report": page}, to_script=self.json, words=page)


@dataclass(frozen=True)
class Match:
    """Match two photos: writes a picture, a page and JSON, all in original pixels."""

    image0: Positional[Path]
    """Photo A."""
    image1: Positional[Path]
    """Photo B."""
    out: Path = Path("match")
    """Folder for matches.png, matches.json and index.html."""
    points: tuple[str, ...] | None = None
    """Points of A as x,y x,y ...; by default confident ones near its middle, spread."""
    count: int = 60
    """How many points to choose when none are given."""
    regions: int = 0
    """Also match this many proposed regions (the proposals extra); the paper has 1000."""
    mutual: bool = True
    """Keep only matches that lead back."""
    voting: bool = True
    """Let neighbouring matches agree, whichever way things face; the paper goes without."""
    model: Model = None
    slower: bool = False
    """See the photos larger and mirrored too: a point or two better, eight times as long."""
    side: int | None = None
    """Longest side at which photos are seen, network pixels."""
    tiles: Tiles = False
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.core.files import check_folder
        from surefeat.show.matches import match_photos

        check_folder(self.out)
        points = None if self.points is None else read_points(self.points, flag="--points")
        matches, page = match_photos(
            self.image0, self.image1, out=self.out, points=points, count=self.count,
            regions=self.regions, mutual=self.mutual, model=self.model, side=self.side,
            slower=self.slower, voting=self.voting, tiles=self.tiles, device=self.device,
        )  # fmt: skip
        print(matches.to_json() if self.json else f"{_verdict(matches)}; look at {page}")


@dataclass(frozen=True)
class Relate:
    """Which photos show the same kind of thing: groups, a matrix and a contact sheet."""

    photos: Positional[tuple[Path, ...]]
    """Photos and folders."""
    out: Path = Path("relate")
    """Folder for relations.json, groups.png and matrix.png."""
    threshold: float = 0.5
    """Photos form a group while the mean probability between its parts is above this."""
    model: Model = None
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.core.files import check_folder, write_json
        from surefeat.match.relations import relate
        from surefeat.model.network import DenseFeatures

        check_folder(self.out)
        if not self.photos:
            raise ValueError("no photos are given; name photos or folders to compare")
        model = DenseFeatures.from_pretrained(self.model, device=self.device)
        relations = relate(self.photos, model, threshold=self.threshold, quiet=self.json)
        write_json(self.out / "relations.json", relations.to_dict())
        with drawing("pictures"):
            from surefeat.show.relations import group_sheet, relation_matrix
            from surefeat.show.style import write_figure

            write_figure(group_sheet(relations), self.out / "groups.png")
            write_figure(relation_matrix(relations), self.out / "matrix.png")
        large = [len(group) for group in relations.groups if len(group) > 1]
        said = f"photos: {len(relations.names)}; groups: {len(large)}"
        said += f" (of {', '.join(map(str, large[:8]))}{' ...' if large[8:] else ''})" * bool(large)
        said += f"; alone: {len(relations.groups) - len(large)}; "
        said += f"skipped: {len(relations.skipped)}; " * bool(relations.skipped)
        say(relations.to_dict(), to_script=self.json, words=f"{said}look at {self.out}")


UNRELATED = "these two photos seem to have nothing in common"


def _verdict(matches: Matches) -> str:
    """What `surefeat match` says in a line: related or not, how many, how sure, what is missing."""
    from surefeat.show.match_page import percent

    said = f"{len(matches)} match{'es' * (len(matches) != 1)}"
    astray = len(matches) - int(matches.mutual.sum())
    back = f"{'does' if astray == 1 else 'do'} not lead back (mutual: false in matches.json)"
    said += f", {astray} of which {back}" * bool(astray)
    if matches.related is None or matches.probability is None:
        return f"{said}; no probability: it is not fitted for this model, size or matching"
    said += f", {int((matches.probability > 0.5).sum())} of them probably right"
    verdict = UNRELATED if matches.related < 0.5 else "these two photos show the same kind of thing"
    how = ", fitted without labels" if matches.without_labels else ""
    return f"{verdict} (probability {percent(matches.related)}{how}); {said}"


@dataclass(frozen=True)
class Demo:
    """A web page on this machine: match two photos, learn parts, label a folder from one photo."""

    model: Model = None
    photos: Path | None = None
    """Folder to label: the tab Folder starts with its photos."""
    port: int = 7860
    """Local port."""

    def run(self) -> None:
        try:
            from surefeat.demo.app import launch
        except ModuleNotFoundError as error:
            fix = "pip install 'surefeat[demo]'"
            raise ImportError(f"the web page needs {error.name}: {fix}") from error
        launch(self.model, photos=self.photos, port=self.port)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `surefeat`: errors are one line that names the fix, and exit code 2."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv == ["--version"]:
        print(f"surefeat {__version__}")
        return
    if isinstance(sys.stdout, TextIOWrapper):  # a name on disk need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("surefeat").setLevel(logging.INFO)  # other packages' notes are no use here

    def parse() -> Any:
        return tyro.cli(_commands(argv), args=argv, prog="surefeat", description=_ABOUT)

    try:
        if {"-h", "--help"} & set(argv):
            print_help(argv, parse)
        command = parse_or_say(argv, parse)
        refuse_numbers(command, argv)
        getattr(command, "what", command).run()  # of a group like `boxes`, what was asked for
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        say_aside(f"surefeat: {str(stop) or 'stopped'}")
        sys.exit(130)
    except BrokenPipeError:  # somebody had read enough: `surefeat peers list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if "-X" in sys.orig_argv or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        say_aside(f"surefeat: {in_a_line(error)}")
        sys.exit(2)


def _commands(argv: list[str]) -> Any:
    """The union of all commands; --preset is read first, since it sets other defaults."""
    name: Any = "auto"
    for word, following in pairwise([*argv, ""]):
        flag, joined, value = word.partition("=")
        value = value if joined else following
        if flag == "--preset" and value in get_args(Preset):
            name = value
    start: Any = Pretrain(source=tyro.MISSING, out=tyro.MISSING, preset=name, config=preset(name))
    return (
        Annotated[Pretrain, subcommand("pretrain", default=start)]
        | Annotated[Extract, subcommand("extract")]
        | Annotated[Match, subcommand("match")]
        | Annotated[Relate, subcommand("relate")]
        | Annotated[Index, subcommand("index")]
        | Annotated[Find, subcommand("find")]
        | Annotated[Boxes, subcommand("boxes")]
        | Annotated[Keypoints, subcommand("keypoints")]
        | Annotated[Evaluate, subcommand("evaluate")]
        | Annotated[Peers, subcommand("peers")]
        | Annotated[Report, subcommand("report")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Demo, subcommand("demo")]
        | Annotated[Data, subcommand("data")]
    )


def _report(folder: Path) -> str | None:
    """Write a run's report, or say what is missing for it."""
    with drawing("report"):
        from surefeat.show.report import write_report

        return str(write_report(folder))
    return None


_ABOUT = (
    "Dense visual features with a per-pixel confidence, learned from unlabelled photos. "
    "`surefeat COMMAND --help` explains each command; `surefeat --version` says which one this is."
)

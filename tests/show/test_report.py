"""The report is one file, says what it must, and no file name can harm it."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from surefeat import viz
from surefeat.core.image import ImageError
from surefeat.data.drawn import draw_many, write_folder
from surefeat.learn.config import Config, preset
from surefeat.learn.pretrain import pretrain
from surefeat.learn.runs import Run
from surefeat.show.page import Number, Section, write_page
from surefeat.show.report import _examples, write_report

HOSTILE = "<script>alert('$x$')<&.png"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A page, read strictly: every element is closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(path.read_text())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())

    def sources(self) -> list[str]:
        return [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]


def tiny() -> Config:
    config = preset("small")
    return replace(
        config,
        warp=replace(config.warp, size=48),
        loss=replace(config.loss, points=32),
        train=replace(config.train, steps=3, batch=2, log_every=1, check_every=2),
        data=replace(config.data, side=64, workers=1),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps, one file of which could not be read."""
    root = tmp_path_factory.mktemp("report")
    write_folder(root / "images", count=10, size=64, seed=0)
    (root / "images" / HOSTILE).write_bytes(b"no image")
    done = pretrain(
        root / "images", out=root / "run", config=tiny(), init="none", device="cpu", quiet=True
    )
    write_auroc(done.folder, 0.74)  # three steps teach no confidence
    return done.folder


def write_auroc(folder: Path, value: float | None) -> None:
    """Into a run's own check."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["self_check"] |= {"auroc": value, "auroc_score": value}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    tall = draw_many(2, size=96, seed=3)[1].image[:, :, :60]
    images = [run.parent / "images", tall]
    return Page(write_report(run, images=images))


def test_report_has_every_section(page: Page) -> None:
    assert page.texts["h2"] == [
        "Summary", "Label-free check", "Training", "Warped views", "Confidence", "Descriptors",
        "The loss", "Skipped files", "Settings", "Environment",
    ]  # fmt: skip
    assert page.texts["h1"] == ["Run run"]
    # Training, views, confidence, colours, two times channels, loss surface.
    assert len(page.sources()) == 7
    assert any("bright where" in text for some in page.texts.values() for text in some)


def test_report_is_self_contained(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed"}
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/", "#"))
    style = "".join(page.texts["style"])
    assert "url(" not in style
    assert "@import" not in style


def test_links_lead_to_their_sections(page: Page) -> None:
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    places = {f"#{attributes['id']}" for tag, attributes in page.tags if tag == "section"}
    assert links == places


def test_inlined_pictures_decode_and_are_sharp(page: Page) -> None:
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) > 3
    for attributes in pictures:
        found = re.fullmatch(r"data:image/(png|jpeg);base64,(.+)", attributes["src"] or "")
        assert found
        image = Image.open(io.BytesIO(base64.b64decode(found[2], validate=True)))
        image.load()
        assert image.format == found[1].upper()
        # Twice the page's pixels, or print and good screens blur it.
        width, height = int(attributes["width"] or 0), int(attributes["height"] or 0)
        assert image.size == pytest.approx((2 * width, 2 * height), abs=2)
        assert attributes["alt"]


def test_hostile_names_are_inert(page: Page, run: Path) -> None:
    assert HOSTILE in page.texts["td"]
    assert "<script" not in (run / "report.html").read_text().lower()


def test_report_states_the_run_s_numbers(page: Page, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    values = page.texts["dd"]
    assert "3" in values
    assert f"{100 * summary['self_check']['accuracy@0.05']:.1f}\N{NO-BREAK SPACE}%" in values
    cells = page.texts["td"]
    assert cells[cells.index("warp.size") + 1] == "48"
    assert cells[cells.index("warp.zoom") + 1] == "0.7 to 1.3"
    environment = json.loads((run / "environment.json").read_text())
    assert cells[cells.index("torch") + 1] == environment["torch"]
    assert cells[cells.index("hardware") + 1] == environment["hardware"]


@pytest.mark.usefixtures("undrawn")
def test_report_of_an_unfinished_run_without_images(run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "environment.json"):
        shutil.copy(run / name, tmp_path / name)
    page = Page(write_report(tmp_path))
    assert any("not finished" in text for text in page.texts["p"])
    assert page.texts["h2"] == ["Summary", "Example images", "The loss", "Settings", "Environment"]
    (tmp_path / "environment.json").write_bytes(b"")
    with pytest.raises(ValueError, match=r"environment\.json is damaged .*; remove it, or put"):
        write_report(tmp_path)
    (tmp_path / "environment.json").unlink()
    write_report(tmp_path)  # which is a way out, as the line says


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "content"),
    [("images.json", '{"images": "many", "held_out": 2}'), ("images.json", '{"held_out_names": 5}'),
     ("summary.json", '{"seconds": null}'), ("summary.json", '{"self_check": {"auroc": "x"}}'),
     ("before.json", '{"self_check": 3}')],
)  # fmt: skip
def test_a_record_of_other_values_is_named(
    run: Path, tmp_path: Path, name: str, content: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged \(its .*\); remove it, or put back"):
        write_report(tmp_path / "run")


@pytest.mark.usefixtures("undrawn")
def test_lines_of_the_log_without_what_a_training_writes_are_left_out(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    strange = ['{"step": 2}', '{"step": 3, "loss": null, "pairs_per_s": 4}']
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(strange))
    (tmp_path / "run" / "images.json").write_text("{}")
    page = Page(write_report(tmp_path / "run"))
    assert "Training" not in page.texts["h2"]
    assert any("learned from its images" in text for text in page.texts["p"])


@pytest.mark.usefixtures("undrawn")
def test_report_of_a_run_without_confidence_shows_none(run: Path, tmp_path: Path) -> None:
    for name in ("environment.json", "metrics.jsonl", "summary.json"):
        shutil.copy(run / name, tmp_path / name)
    shutil.copytree(run / "model", tmp_path / "model")
    values = json.loads((run / "config.json").read_text())
    values["loss"]["kind"] = "plain"
    (tmp_path / "config.json").write_text(json.dumps(values))
    page = Page(write_report(tmp_path, images=[draw_many(1, size=64, seed=1)[0].image]))
    assert "Descriptors" in page.texts["h2"]
    assert not {"Confidence", "The loss"} & set(page.texts["h2"])


@pytest.mark.usefixtures("undrawn")
def test_confidence_that_only_guesses_is_not_drawn(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    write_auroc(copy, 0.26)
    page = Page(write_report(copy, images=[draw_many(1, size=64, seed=1)[0].image]))
    assert any("AUROC 0.26" in text and "is not drawn" in text for text in page.texts["p"])
    assert not any("bright where" in text for some in page.texts.values() for text in some)


@pytest.mark.usefixtures("undrawn")
def test_skipped_files_are_listed_up_to_fifty(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "config.json", tmp_path / "config.json")
    lines = [f"{i:03d}.jpg\tis empty\n" for i in range(1234)]
    (tmp_path / "skipped.txt").write_text("".join(lines))
    page = Page(write_report(tmp_path))
    assert "049.jpg" in page.texts["td"]
    assert "050.jpg" not in page.texts["td"]
    assert "1,234 files were left out; the first 50 are listed." in page.texts["p"]


@pytest.mark.usefixtures("undrawn")
def test_report_draws_the_images_a_run_left_behind(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "config.json", tmp_path / "config.json")
    write_folder(tmp_path / "examples", count=2, size=64, seed=0)
    assert "Warped views" in Page(write_report(tmp_path)).texts["h2"]


def test_held_out_photos_have_their_own_names(run: Path) -> None:
    names = json.loads((run / "images.json").read_text())["held_out_names"]
    assert names
    shown = [name for name, _ in _examples(Run.open(run), ())]
    assert shown == [Path(name).name for name in names[: len(shown)]]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("before", "said"), [(0.99, True), (0.0, False)])
def test_a_check_that_fell_is_explained(
    run: Path, tmp_path: Path, before: float, said: bool
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    for name, value in (("before.json", before), ("summary.json", 0.5)):
        about = json.loads((copy / name).read_text())
        about["self_check"]["accuracy@0.1"] = value
        (copy / name).write_text(json.dumps(about))
    shown = " ".join(Page(write_report(copy)).texts["p"])
    assert ("It was higher before training" in shown) is said


def test_a_named_image_that_is_none_is_an_error(run: Path) -> None:
    with pytest.raises(ImageError, match="is text, not an image"):
        write_report(run, images=[run.parent / "images" / HOSTILE])


@pytest.mark.usefixtures("undrawn")
def test_page_holds_what_it_is_given(tmp_path: Path) -> None:
    numbers = (Number("A & B", "1 < 2", "So it is."),)
    section = Section(
        "One", "First.\n\nSecond <i>.", figures=(viz.loss_surface(),), numbers=numbers,
        table=[("k", "v"), ("\udcff", 3.5)],
    )  # fmt: skip
    page = Page(write_page(tmp_path / "deep" / "page.html", "T", [section], lead="L", foot="F"))
    assert page.texts["p"] == ["L", "First.", "Second <i>."]
    assert page.texts["dd"] == ["1 < 2", "So it is."]
    assert page.texts["th"] == ["k", "v"]
    assert page.texts["td"] == ["?", "3.5"]
    assert page.texts["footer"] == ["F"]
    assert page.texts["figcaption"][0].startswith("What a matching pair costs.")


def test_folded_parts_are_opened_by_their_title_and_not_listed_above(tmp_path: Path) -> None:
    table = [("row", "a", "b", "c"), ("x", 1, 2, 3)]
    parts = [Section(name, table=table, folded=name == "More") for name in ("A", "B", "More", "C")]
    page = Page(write_page(tmp_path / "page.html", "T", parts))
    assert page.texts["summary"] == ["More"]
    assert page.texts["h2"] == page.texts["a"] == ["A", "B", "C"]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["#section-1", "#section-2", "#section-3"]
    assert page.texts["td"].count("x") == 4


def test_report_of_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run"):
        write_report(tmp_path)
    assert not Run(tmp_path).metrics()


@pytest.mark.usefixtures("undrawn")
def test_a_check_that_could_not_rank_is_reported_as_undefined(run: Path, tmp_path: Path) -> None:
    """When every match was right there is no AUROC: summary.json says null, the page undefined."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    write_auroc(copy, None)
    assert "undefined" in write_report(copy).read_text()

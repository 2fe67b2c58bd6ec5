"""README's tables beside the benchmarks: the search for the recipe, confidence, speed, parts."""

from __future__ import annotations

from table_files import link, markdown, read

WAYS = {
    "flow": "regions, flow", "mean-flow": "pooled by means", "small-first": "small first",
    "nearest": "nearest neighbour", "voting": "voting", "wide-voting": "wide voting",
    "shifted nearest": "nearest, shifted", "shifted voting": "voting, shifted",
}  # fmt: skip


def development() -> str:
    """How the recipe was chosen, and what the shipped model reaches on development pairs."""
    found = read("recipe_search.json")["metrics"]
    ways = {way: title for way, title in WAYS.items() if way != "wide-voting"}  # came later
    rows = [["trained for", *ways.values()]]
    for name, (search, key) in SEARCH.items():
        values = [found[search][key].get(f"{way} pck@0.1 scnet") for way in ways]
        rows.append([name, *("" if v is None else f"{v:.1f}" for v in values)])
    table = markdown(rows) + f"\n\nAll of it: {link('recipe_search.json')}."
    final = read("reliability.json")["metrics"]
    shipped = [["shipped model, aspect kept", "nearest neighbour", "with voting", "from"]]
    for side in (224, 320, 448):
        values = [final[f"val, {side} px, {w}"]["pck@0.1 scnet"] for w in ("nearest", "voting")]
        cells = [f"{value:.1f}" for value in values]
        shipped.append([f"longest side {side}", *cells, link("reliability.json")])
    return table + "\n\n" + markdown(shipped)


SEARCH = {
    "1,000 steps at 224 px, cosine": ("first search", "base, 1/2:1"),
    "the same, another seed": ("first search", "seed1, 1/2:1"),
    "500 steps of 32 pairs, constant rate": ("first search", "short-constant, 1/2:1"),
    "zooming in (0.5 to 1)": ("first search", "zoom-in, 1/2:1"),
    "1,000 steps at 320 px, cosine": ("second search", "view-320, 1/2:1"),
    "500 steps at 320 px, constant rate (shipped)": ("second search", "view-320-mid, 1/2:1"),
    "the same with 32 pairs a step": ("second search", "view-320-short, 1/2:1"),
    "true boxes of the 12 classes": ("third search", "boxes, 1/2:1"),
    "occluders over the second views": ("third search", "occluders, 1/2:1"),
    "occluders w/o confidence": ("third search", "occluders-without-confidence, 1/2:1"),
    "the paper's wide warps": ("fourth search", "wide, 1/2:1"),
    "these w/o confidence": ("fourth search", "wide-without-confidence, 1/2:1"),
    "VGG16 to pool4, conv4 + head": ("second search", "vgg16-ours, 1/2:1"),
    "VGG16 with conv5, conv5 + head (shipped)": ("third search", "vgg16-conv5, 1/2:1"),
}
"""Line of the table -> where it is in recipe_search.json."""

RULES = (
    "confidence (one image)", "edge energy (one image)", "distinctiveness (one image)",
    "confidence x distinctiveness (one image)", "confidence of both", "score", "margin",
)  # fmt: skip


def confidence() -> str:
    """Right matches among the places each rule likes best, on the object, development pairs."""
    found = read("confidence.json")["metrics"]["places on the object, PF-PASCAL val"]
    rows = [["places on the object", "right by nearest neighbour", "right with voting", "from"]]
    every = {"all of them": "all places"}
    every |= {f"best quarter by {rule}": f"best quarter by {rule}" for rule in RULES}
    for title, key in every.items():
        cells = [f"{found['right, percent'][f'{way}, {key}']:.1f}" for way in ("nearest", "voting")]
        rows.append([title, *cells, link("confidence.json")])
    boxes = read("confidence.json")["metrics"]["auroc of cells in VOC boxes, val photos"]
    inside = (
        f"Cells inside VOC boxes are ranked before those outside with an AUROC of "
        f"{boxes['confidence']:.2f} by confidence, {boxes['edge energy']:.2f} by edge energy and "
        f"{boxes['closeness to the centre']:.2f} by closeness to the image's centre "
        f"({boxes['photos']} val photos)."
    )
    return f"{markdown(rows)}\n\n{inside}"


def speed() -> str:
    found = read("train_speed.json")
    names = {
        "last+compile": "res5 + head, compiled",
        "all+compile": "whole trunk, compiled",
        "last": "res5 + head, eager",
    }
    heading = ["", "pairs/s", "ms a step", "loading, warping, colour", "peak memory"]
    rows = [heading]
    for key, name in names.items():
        row = found["metrics"][key]
        rows.append([
            name, f"{row['pairs_per_s']:,.0f}", f"{row['whole_step_ms']:.1f}",
            f"{row['loading_share']:.1%}", f"{row['peak_memory_gib']:.1f} GiB",
        ])  # fmt: skip
    return markdown(rows) + f"\n\n{found['hardware']}, {link('train_speed.json')}."


def parts() -> str:
    boxes, flow = read("proposals_recall.json"), read("flow_speed.json")
    match, fit = read("match_speed.json"), read("reliability.json")
    prim, search = boxes["metrics"]["prim"], boxes["metrics"]["selective_random"]
    ratio = boxes["metrics"]["speed_ratio"]["prim"]
    solver, auroc = flow["metrics"], fit["metrics"]["auroc on val"]
    error = fit["metrics"]["calibration on val"]["expected calibration error"]
    rows = [["part", "measured", "beside", "from"], _beside_peers()]
    rows.append([
        "region proposals, recall at IoU .5 / .7, 1000 boxes, VOC val",
        f"{prim['recall@0.5']:.3f} / {prim['recall@0.7']:.3f}",
        f"selective search {search['recall@0.5']:.3f} / {search['recall@0.7']:.3f}, "
        f"{ratio:.1f} times slower", link("proposals_recall.json"),
    ])  # fmt: skip
    rows.append([
        "SD filter, 224 x 224", f"{1000 * solver['seconds_ours']:.0f} ms",
        f"scipy spsolve {1000 * solver['seconds_spsolve']:.0f} ms, best of scipy "
        f"{1000 * solver['seconds_splu_shared']:.0f} ms", link("flow_speed.json"),
    ])  # fmt: skip
    rows.append([
        "dense flow of a pair from 1000 regions", f"{1000 * solver['seconds_dense_ours']:.0f} ms",
        f"plain loops and spsolve {1000 * solver['seconds_dense_plain']:,.0f} ms",
        link("flow_speed.json"),
    ])  # fmt: skip
    for key, name in MATCH_ROWS.items():
        row = match["metrics"][key]
        rows.append([
            name, f"{row['ours_ms']:.0f} ms", f"plain numpy {row['numpy_ms']:,.0f} ms",
            link("match_speed.json"),
        ])  # fmt: skip
    rows.append([
        "probability of a match, AUROC on val pairs", f"{auroc['probability']:.3f}",
        f"score {auroc['score']:.3f}, margin {auroc['margin']:.3f}, "
        f"confidence alone {auroc['confidence']:.3f}", link("reliability.json"),
    ])  # fmt: skip
    rows.append(["its calibration error", f"{error:.3f}", "", link("reliability.json")])
    return markdown(rows)


def _beside_peers() -> list[str]:
    """Time of one photo's features; the peers' as multiples of it, measured in turn."""
    found = read("peers_speed.json")["metrics"]
    ours = found["surefeat resnet50, 320 px"]
    times = {name: f"{row['times the first']:.1f}" for name, row in found.items()}
    small, base = (
        f"{times[f'DINOv2 ViT-{size}/14, 224 px']} and {times[f'DINOv2 ViT-{size}/14, 518 px']}"
        for size in "SB"
    )
    return [
        "features of a photo, ResNet-50 at 320 px", f"{ours['ms']:.0f} ms",
        f"times as long, at 224 and at 518 px: DINOv2's ViT-S/14 {small}, ViT-B/14 {base}",
        link("peers_speed.json"),
    ]  # fmt: skip


MATCH_ROWS = {
    "regions 1000 x 1000": "match 1000 x 1000 regions, features given",
    "points 200, both ways, voting": "match 200 points both ways, features given",
    "dense 60 x 80, voting": "match every pixel, features given",
}

"""Every figure by its structure, its files, and whether its text can be read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.graphs.selection import wiring
from headspan.models.arrays import ArrayWeights
from headspan.plotting import FIGURES, Context, draw, parse_names, style
from headspan.plotting.canvas import save, theme, thinned
from headspan.plotting.ellipse import ellipse_figure
from headspan.plotting.grid import grid_figure
from headspan.plotting.layout import crossings, ellipse_layout
from headspan.plotting.scatter import groups
from headspan.plotting.twolayer import random_level, strengths
from headspan.plotting.weights import circuit_norms, token_numbers
from headspan.results.head_scores import BehaviourScores
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.running.behaviour import KINDS, AttentionPatterns
from headspan.subspaces.random_subspaces import moments
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import PAIRINGS, ROLES, Head, Pairing, Role, pair_mask
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

REFERENCES = Path(__file__).parent / "data" / "figure_structures.json"


def arrays(layers: int, heads: int, seed: int = 0, d: int = 32, m: int = 4, vocabulary: int = 60) -> ArrayWeights:
    random = np.random.default_rng(seed)
    weights = {role.value: random.standard_normal((layers, heads, d, m)) for role in ROLES}
    return ArrayWeights(
        weights
        | {
            "gain": 1 + 0.3 * random.standard_normal((layers, d)),
            "final_bias": random.standard_normal(d),
            "unembedding": random.standard_normal((vocabulary, d)),
            "norm": "layer",
        }
    )


def complete_context(layers: int, heads: int = 4) -> Context:
    """A context in which every figure finds what it needs; only a two-layer model has the two-layer one."""
    weights = arrays(layers, heads)
    scores = hs.score(weights)
    random = np.random.default_rng(1)
    query = weights.ports.query
    behaviour = BehaviourScores(query, {kind: random.uniform(size=len(query)) for kind in KINDS})
    scores.annotations["behaviour"] = behaviour.to_dict()
    names = [("L0H0", "first"), ("L0H0", "second"), ("L0H1", "first"), (f"L{layers - 1}H2", "a$b^{"), ("L1H3", "_x")]
    context = Context(scores, weights, Labels.from_pairs(names), k=6)
    attention = np.tril(random.uniform(size=(9, 9)))
    tokens = ["_When", "_M$ary", "<b>", "\\n", "_store", ",", "_John", "_gave", "_drink"]
    context.__dict__["patterns"] = AttentionPatterns(tokens, dict.fromkeys(query, attention))
    return context


@pytest.fixture(scope="module")
def context() -> Context:
    return complete_context(5)


APART = ("two-layer", "effects")  # a model of its own; effects, which tests/test_effects_cli.py draws


@pytest.fixture(scope="module")
def figures(context: Context) -> dict[str, Figure]:
    """All figures of the two contexts, by the name of their file."""
    with theme():
        made = {name: figure for kind in FIGURES if kind not in APART for name, figure in FIGURES[kind].make(context)}
        made |= dict(FIGURES["two-layer"].make(complete_context(2)))
    return made


def parts(figure: Figure) -> list[str]:
    return [artist.get_gid() for artist in figure.findobj() if artist.get_gid()]


def structure(figure: Figure) -> dict[str, int]:
    """How many of every kind of part a figure has: edges by pairing, nodes, names, tokens, bars, …"""
    kinds = (":".join(gid.split(":")[:2]) if gid.startswith("edge:") else gid.split(":")[0] for gid in parts(figure))
    return dict(sorted(Counter(kinds).items()))


def test_the_old_name_of_a_figure_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="use is now effects"):
        assert parse_names("scatter,use") == ("scatter", "effects")


# ------------------------------------------------------------------ structure


def test_figures_have_the_stored_structure(figures: dict[str, Figure]) -> None:
    found = {name: structure(figure) for name, figure in sorted(figures.items())}
    assert found == json.loads(REFERENCES.read_text())


@pytest.mark.parametrize("metric", ["pk", "cs"])
def test_both_wiring_diagrams_show_exactly_the_chosen_edges(context: Context, metric: str) -> None:
    chosen = context.wiring(metric)
    edges = {f"edge:{e.pairing}:{e.source}:{e.target}" for e in chosen.edges}
    nodes = {f"node:{n.head}" for n in chosen.nodes} | {f"name:{n.head}" for n in chosen.nodes}
    with theme():
        for figure in (ellipse_figure([chosen]), grid_figure(chosen)):
            drawn = [gid for gid in parts(figure) if gid.split(":")[0] in ("edge", "node", "name")]
            assert sorted(drawn) == sorted(edges | nodes)


def test_edges_look_as_on_the_page(context: Context) -> None:
    chosen = context.wiring("pk")
    looks = zip(chosen.edges, chosen.strengths(), chosen.evidence(), strict=True)
    expected = {
        f"edge:{edge.pairing}:{edge.source}:{edge.target}": (
            (style.pairing_colour(edge.pairing), 0.6 * (1.4 + 5.6 * strength)) if bits else (style.EDGE_REST, 0.6)
        )
        for edge, strength, bits in looks
    }
    with theme():
        for figure in (grid_figure(chosen), ellipse_figure([chosen])):
            edges = [a for a in figure.findobj() if (a.get_gid() or "").startswith("edge:")]
            drawn = {a.get_gid(): (to_hex(a.get_edgecolor()).upper(), a.get_linewidth()) for a in edges}
            assert drawn == {gid: (colour.upper(), pytest.approx(wide)) for gid, (colour, wide) in expected.items()}


def test_titles_count_heads_inside_and_outside(context: Context) -> None:
    chosen = context.wiring("pk")
    with theme():
        title = ellipse_figure([chosen]).axes[0].get_title()
    counts = chosen.head_counts()
    assert title.endswith(f"{counts.in_class} labelled heads, {counts.out_of_class} others")


def test_scatter_groups_partition_the_pairs(context: Context) -> None:
    x, y = (context.scores[metric, "OK"].forward().pairs()[2] for metric in ("pk", "cs"))
    masks = groups(x, y, 0.1)
    assert np.array_equal(sum(mask.astype(int) for mask in masks.values()), np.ones(len(x)))
    assert (masks["both"] | masks["first only"]).sum() == np.count_nonzero(x >= np.quantile(x, 0.9))


def test_circuit_norms_are_those_of_the_full_matrices() -> None:
    random = np.random.default_rng(3)
    weights = ArrayWeights(
        {role: random.standard_normal((1, n, 12, 3)) for role, n in (("Q", 4), ("K", 2), ("V", 2), ("O", 4))}
    )
    norms = circuit_norms(weights, 0)
    q, k, v, o = (weights.read(role, 0).astype(float) for role in (Role.Q, Role.K, Role.V, Role.O))
    for head in range(4):
        assert norms["QK"][head] == pytest.approx(np.linalg.norm(q[head] @ k[head // 2].T))
        assert norms["OV"][head] == pytest.approx(np.linalg.norm(o[head] @ v[head // 2].T))


def test_token_numbers_are_those_of_the_definition(context: Context) -> None:
    weights = context.need_weights()
    rows, beta = weights.unembedding().astype(float), weights.final_norm().bias.astype(float)  # type: ignore[union-attr]
    for title, vectors in (("not centred", rows), ("centred", rows - rows.mean(axis=0))):
        found = token_numbers(weights)[title]
        np.testing.assert_allclose(found.norm, np.linalg.norm(vectors, axis=1), rtol=1e-5)
        np.testing.assert_allclose(found.product, vectors @ beta, atol=1e-4)
        np.testing.assert_allclose(found.unit_product, vectors @ beta / np.linalg.norm(vectors, axis=1), atol=1e-4)


def test_two_layer_strengths_are_what_lies_above_the_random_level() -> None:
    scores = complete_context(2).scores
    pairing = Pairing.parse("OQ")
    level = random_level(scores, "pk", pairing)
    assert level == pytest.approx(4 * 4 / 32, abs=0.05)  # mm'/d
    values = scores["pk", pairing].values[:4, 4:].astype(float)
    above = np.maximum(values - level, 0)
    found, least, most = strengths(scores, "pk", pairing)
    np.testing.assert_allclose(found, above / above.max(), rtol=1e-6)
    assert (least, most) == pytest.approx((level, np.nanmax(values)), rel=1e-6), "the ends of the scale in the title"


# --------------------------------------------------------------------- layout


def test_layout_puts_labelled_heads_inside_and_uncrosses_edges(context: Context) -> None:
    chosen = context.wiring("pk", 12)
    layout = ellipse_layout(chosen)
    a, b = layout.half_axes
    for node in chosen.nodes:
        x, y = layout.places[node.head]
        assert ((x / a) ** 2 + (y / b) ** 2 < 1) == bool(node.labels)
    heads = [n.head for n in chosen.nodes]
    index = {head: i for i, head in enumerate(heads)}
    ends = np.array([(index[e.source], index[e.target]) for e in chosen.edges])
    points = np.array([layout.places[head] for head in heads])
    random = np.random.default_rng(0)
    inside = np.array([bool(n.labels) for n in chosen.nodes])
    by_chance = []
    for _ in range(30):
        order = np.arange(len(heads))
        for group in (inside, ~inside):
            order[group] = random.permutation(np.flatnonzero(group))
        by_chance.append(crossings(points[order], ends))
    assert crossings(points, ends) < min(by_chance)
    assert ellipse_layout(chosen) == layout  # the same every time


def test_boxes_of_many_heads_do_not_touch() -> None:
    chosen = wiring(large_scores(), k=30, labels=large_labels())
    places = np.array(list(ellipse_layout(chosen).places.values()))
    for first, second in combinations(places, 2):
        gap = np.abs(first - second)
        assert gap[0] > 0.94 or gap[1] > 0.52


def test_crossings_of_a_known_drawing() -> None:
    points = np.array([(0, 0), (1, 1), (0, 1), (1, 0), (2, 0)])
    assert crossings(points, np.array([(0, 1), (2, 3)])) == 1
    assert crossings(points, np.array([(0, 1), (0, 3), (3, 4)])) == 0


# ----------------------------------------------------------------- readability


def texts(figure: Figure) -> Iterator[tuple[Text, Bbox]]:
    """Every text that is drawn, with the box it takes in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    undrawn = set(undrawn_tick_labels(figure))
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text() and text not in undrawn:
            yield text, text.get_window_extent(canvas.get_renderer())


def undrawn_tick_labels(figure: Figure) -> Iterator[Text]:
    """Tick labels outside the limits or of hidden axes, which matplotlib keeps but does not draw."""
    for axes in figure.axes:
        for place, axis in enumerate((axes.xaxis, axes.yaxis)):
            low, high = sorted(axis.get_view_interval())
            for label in axis.get_ticklabels(which="both"):
                if not (axes.axison and low <= label.get_position()[place] <= high):
                    yield label


def test_no_text_is_cut_off(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        with theme():
            page = figure.bbox.padded(1)
            for text, box in texts(figure):
                whole = page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1)
                assert whole, f"{text.get_text()!r} leaves the figure {name}"


def test_names_of_heads_fit_their_boxes_and_titles_do_not_meet(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        with theme():
            found = [(t, b) for t, b in texts(figure) if not t.get_rotation()]
        for (first, a), (second, b) in combinations(found, 2):
            overlap = a.width and b.width and a.padded(-1.5).overlaps(b.padded(-1.5))
            assert not overlap, f"{first.get_text()!r} meets {second.get_text()!r} in {name}"


def large_scores() -> Scores:
    """32 layers of 32 heads, with random numbers for scores."""
    random = np.random.default_rng(0)
    table = PortTable.regular(range(32), 32, 32)
    shown = [Pairing.parse(p) for p in ("OQ", "OK", "OV")]
    masks = {p: pair_mask(p, table.query, table.query, "default") for p in shown}
    values = {
        ("pk", p): np.where(masks[p], random.gamma(2, 1, masks[p].shape), np.nan).astype(np.float32) for p in shown
    }
    return Scores(values, table, 4096, {role: np.full(1024, 128) for role in ROLES})


def large_labels() -> Labels:
    places = np.random.default_rng(1).integers(0, 32, (150, 2))
    return Labels.from_pairs([(Head(int(a), int(b)), f"class {a % 10}") for a, b in places])


def test_a_model_of_1024_heads_stays_readable() -> None:
    chosen = wiring(large_scores(), k=20, labels=large_labels())
    for figure in (grid_figure, lambda w: ellipse_figure([w])):
        with theme():
            drawn = figure(chosen)
            names = [(t, b) for t, b in texts(drawn) if (t.get_gid() or "").startswith("name:")]
        assert len(names) == len(chosen.nodes)
        assert min(t.get_fontsize() for t, _ in names) >= 5
        assert max(drawn.get_size_inches()) <= 24
        for (first, a), (second, b) in combinations(names, 2):
            assert not a.overlaps(b), f"{first.get_text()} meets {second.get_text()}"


def test_ticks_are_thinned() -> None:
    assert thinned(12) == list(range(12))
    assert all(len(thinned(n)) <= 16 for n in range(1, 200))


# Machado, Oliveira & Fernandes 2009, severity 1, for linear RGB.
DEFICIENCIES = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def seen(colour: str, deficiency: str) -> np.ndarray:
    """A colour as CIE Lab, as a person with that deficiency sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / (0.9505, 1.0, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_pairings_and_labels_are_distinct_for_colour_blind_readers(deficiency: str) -> None:
    flow = [style.pairing_colour(Pairing.parse(p)) for p in ("OQ", "OK", "OV")]
    for group, least in ((flow, 15.0), ([*style.LABEL_COLOURS, style.UNLABELLED], 12.0)):
        for first, second in combinations(group, 2):
            distance = np.linalg.norm(seen(first, deficiency) - seen(second, deficiency))
            assert distance > least, f"{first} and {second} look alike with {deficiency}"


def test_classes_have_their_colours_by_name_and_never_that_of_an_edge() -> None:
    names = ["zebra", "induction", "name_mover", "my own", "previous_token"]
    colours = style.label_colours(names)
    assert colours == style.label_colours(names[::-1]) and len(set(colours.values())) == len(names)
    assert list(colours) == names
    for name in names:  # alone it has the same colour, unless another had it first
        assert style.label_colours([name])[name] == colours[name] or name in ("zebra", "my own")
    assert style.label_colours(["Previous-token"])["Previous-token"] == colours["previous_token"]
    many = style.label_colours([f"class {i}" for i in range(25)])
    assert max(list(many.values()).count(colour) for colour in many.values()) == 3
    for fill in (*style.LABEL_COLOURS, style.UNLABELLED):
        for line in style.ROLE_COLOURS.values():
            assert np.linalg.norm(seen(fill, "none") - seen(line, "none")) > 33


# ----------------------------------------------------------------------- files


def test_files_of_all_formats_are_whole_and_the_same_every_time(context: Context, tmp_path: Path) -> None:
    from PIL import Image

    for folder in ("a", "b"):
        drawn = draw("norms,wiring", context, tmp_path / folder, "png,pdf,svg")
    names = {f"{name}.{ending}" for name in ("norms", "wiring") for ending in ("png", "pdf", "svg")}
    assert {path.name for path in drawn.files} == names == {p.name for p in (tmp_path / "b").iterdir()}
    for name in names:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes(), f"{name} differs from run to run"
        if name.endswith("png"):
            with Image.open(tmp_path / "a" / name) as image:
                image.load()
        elif name.endswith("pdf"):
            assert content.startswith(b"%PDF-")
            assert content.rstrip().endswith(b"%%EOF")
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg")


def test_the_ids_of_an_svg_are_those_of_the_figure(context: Context, tmp_path: Path) -> None:
    draw("wiring", context, tmp_path, "svg")
    root = ElementTree.parse(tmp_path / "wiring.svg").getroot()
    drawn = Counter(e.get("id") for e in root.iter() if (e.get("id") or "").startswith("edge:"))
    both = [context.wiring(metric).edges for metric in ("pk", "cs")]
    assert drawn == Counter(f"edge:{e.pairing}:{e.source}:{e.target}" for edges in both for e in edges)


def test_the_callers_matplotlib_settings_neither_matter_nor_change(context: Context, tmp_path: Path) -> None:
    import matplotlib

    chosen = context.wiring("pk")
    with theme():
        save(grid_figure(chosen), tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        with theme():
            save(grid_figure(chosen), tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_place_that_cannot_be_written_is_refused(context: Context, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HeadspanError, match="cannot write"):
        draw("norms", context, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_is_missing_is_reported_and_the_rest_is_drawn(tmp_path: Path) -> None:
    weights = ArrayWeights({role.value: np.random.default_rng(0).standard_normal((3, 2, 8, 2)) for role in ROLES})
    scores = hs.score(weights, "pk", "flow")
    drawn = draw("all", Context(scores, weights, k=2), tmp_path)
    assert set(drawn.skipped) == {
        "two-layer", "scatter", "identity", "head-scores", "kl", "unembedding", "folded-wiring", "mse", "effects",
    }  # fmt: skip
    assert "two attention layers" in drawn.skipped["two-layer"]
    assert "cs scores" in drawn.skipped["scatter"]
    assert "hs.behaviour" in drawn.skipped["identity"]
    assert "all 16 pairings" in drawn.skipped["kl"]
    assert "norm" in drawn.skipped["folded-wiring"]
    assert {path.stem for path in drawn.files} == {
        "wiring", "grid-pk-top1", "grid-pk-top2", "grid-pk-top3", "norms", "random",
    }  # fmt: skip
    assert any("without tokens" in note for note in drawn.notes)
    without_weights = draw("norms,folded-wiring", Context(scores), tmp_path)
    assert not without_weights.files
    assert all("`model`" in reason for reason in without_weights.skipped.values())


def test_names_and_formats_are_checked(context: Context, tmp_path: Path) -> None:
    assert parse_names("scatter, wiring") == ("wiring", "scatter")
    assert parse_names("all") == tuple(FIGURES)
    with pytest.raises(HeadspanError, match="unknown figure 'pie'"):
        draw("pie", context, tmp_path)
    with pytest.raises(HeadspanError, match="unknown format 'gif'"):
        draw("norms", context, tmp_path, "gif")
    with pytest.raises(HeadspanError, match="no figure was named"):
        draw("", context, tmp_path)


def test_the_command_draws_and_reports(context: Context, tmp_path: Path) -> None:
    result, out = tmp_path / "r.safetensors", tmp_path / "figures"
    context.scores.save(result)
    command = ["figures", str(result), "--out", str(out), "--only", "wiring,kl,norms", "--format", "svg,pdf"]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 0, run.output
    assert {p.name for p in out.iterdir()} == {"wiring.svg", "wiring.pdf", "kl.svg", "kl.pdf"}
    assert "norms was not drawn" in run.stderr and "weights" in run.stderr
    run = CliRunner().invoke(app, [*command[:5], "norms"])
    assert isinstance(run.exception, HeadspanError)
    run = CliRunner().invoke(app, [*command[:4], "--labels", "behaviour", "--only", "wiring"])
    assert run.exit_code == 0, run.output


def test_all_pairings_have_a_look_of_their_own() -> None:
    looks = {(style.pairing_colour(p), style.SOURCE_DASHES[p.source]) for p in PAIRINGS}
    assert len(looks) == 16


def test_pictures_of_a_wiring_say_which_score_a_width_has() -> None:
    """The legend has the widths of the page's steps with their scores, and the grey of edges without evidence."""
    scores = hs.score("demo", "pk,cs")
    context = Context(scores, k=6)
    with theme():
        figure = next(FIGURES["grid"].make(context))[1]
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    mean, variance = moments(256, 32, 32)
    start = float(mean + 3 * variance**0.5)
    expected = [f"PK {start + step * (32 - start):.0f}" for step in (0, 0.25, 0.5, 1)]
    assert [text for text in texts if text.startswith("PK")] == expected
    pairs = [pair for legend in figure.legends for pair in zip(legend.get_texts(), legend.legend_handles, strict=True)]
    lines = {text.get_text(): handle.get_linewidth() for text, handle in pairs if isinstance(handle, Line2D)}
    widths = [lines[text] for text in expected]
    assert widths == sorted(widths) and np.allclose(
        widths, [0.6 * style.edge_width(s, True) for s in (0, 0.25, 0.5, 1)]
    )


def test_every_point_of_the_scatter_is_inside_its_axes(figures: dict[str, Figure]) -> None:
    for axes in figures["scatter"].axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        for points in axes.collections:
            x, y = np.asarray(points.get_offsets()).reshape(-1, 2).T
            assert ((x > left) & (x < right) & (y > bottom) & (y < top)).all()


def test_one_layer_has_no_empty_pictures(tmp_path: Path) -> None:
    drawn = hs.figures(hs.score(arrays(1, 4)), out=tmp_path)
    assert {path.stem for path in drawn.files} == {"random"}
    for name in ("wiring", "grid", "scatter", "kl", "folded-wiring"):
        assert "one attention layer" in drawn.skipped[name], name

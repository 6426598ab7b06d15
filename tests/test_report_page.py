"""The page on paper, on a phone and for everyone; what it finds and saves; what its tokens cost."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.explorer import details
from headspan.explorer.report import report
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from report_browser import Open, violations
from report_models import array_model

LABELS = Labels.from_pairs([("L0H1", "writer"), ("L0H1", "induction"), ("L2H0", "reader"), ("L3H3", "reader")])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    weights = array_model(kv_heads=2)
    scores = hs.score(weights)
    scores.annotations["behaviour"] = {"induction": {str(h): h.index / 10 for h in scores.heads("Q")}}
    scores.annotations["drift"] = {"L0H1": 0.25, "L2H0": 0.5, "L9H9": 1.0}
    path = tmp_path_factory.mktemp("report") / "small.html"
    report(scores, weights, path, labels=LABELS)
    return path, scores


# ------------------------------------------------------------------- for everyone


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (1024, "light"), (420, "dark")])
def test_axe_finds_nothing(
    width: int, scheme: str, open_page: Open, axe: str, demo: tuple[Path, Scores], small: tuple[Path, Scores]
) -> None:
    for which, fragment in ((demo, "#pair=L0H3.O-L1H0.K&tour=2"), (demo, ""), (small, "#head=L2H0&idle=1")):
        options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "bypass_csp": True}
        assert violations(open_page(*which, fragment, **options).page, axe) == []


def test_axe_finds_nothing_on_paper(open_page: Open, axe: str, demo: tuple[Path, Scores]) -> None:
    view = open_page(*demo, "#pair=L0H3.O-L1H0.K", color_scheme="dark", bypass_csp=True)
    view.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    view.page.emulate_media(media="print")
    assert violations(view.page, axe) == []


def test_the_way_past_the_menu_keeps_the_view(open_page: Open, small: tuple[Path, Scores]) -> None:
    view = open_page(*small, "#head=L2H0&k=7")
    view.page.keyboard.press("Tab")
    assert view.page.evaluate("document.activeElement.id") == "skip"
    view.page.keyboard.press("Enter")
    assert view.page.evaluate("document.activeElement.id") == "wiring"
    assert view.state("head") == "L2H0" and view.state("k") == "7"
    assert view.page.locator("h1").count() == 1


# ------------------------------------------------------------------ phone and paper


@pytest.mark.parametrize("width", [1440, 1024, 420])
def test_nothing_is_wider_than_the_window(width: int, open_page: Open, demo: tuple[Path, Scores]) -> None:
    for fragment in ("", "#head=L0H3", "#pair=L0H3.O-L1H0.K"):
        view = open_page(*demo, fragment, viewport={"width": width, "height": 800})
        view.page.evaluate("for (const draw of HS.lazyParts) draw()")
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width


def test_on_a_phone_the_card_comes_to_the_tap(open_page: Open, demo: tuple[Path, Scores]) -> None:
    view = open_page(*demo, viewport={"width": 420, "height": 800}, has_touch=True)
    node = view.page.locator('#diagram .node[data-head="L0H3"]')
    node.scroll_into_view_if_needed()
    node.tap()
    assert view.state("head") == "L0H3"
    view.page.wait_for_timeout(200)
    card = view.page.locator("#inspector").bounding_box()
    assert card["y"] >= 250 and card["y"] + card["height"] <= 801 and card["width"] <= 420
    assert node.bounding_box()["y"] < card["y"], "what was tapped stays visible"
    view.page.click('#inspector [aria-label="Close the card"]')
    assert view.state("head") == ""


def test_heat_map_scatter_and_diagram_are_printed(open_page: Open, demo: tuple[Path, Scores]) -> None:
    view = open_page(*demo, "#pair=L0H3.O-L1H0.K")
    page = view.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    for box in ("#heat-main", "#scatter-main"):
        shown = page.eval_on_selector_all(f"{box} canvas", "all => all.map(c => getComputedStyle(c).display)")
        assert shown == ["block", "none"], "the layer of marks would cover the picture"
    assert page.evaluate(
        """() => { const c = document.querySelector("#heat-canvas");
        return new Set(c.getContext("2d").getImageData(0, 0, c.width, c.height).data).size; }"""
    ) > 20  # fmt: skip
    for hidden in ("#zoom", "#save", ".bar nav", ".bar .tools", "#controls"):
        assert page.is_hidden(hidden)
    assert page.is_visible("h1"), "paper says which model it is about"
    picture = page.locator("#wiring-svg").bounding_box()
    assert picture["width"] <= page.evaluate("document.documentElement.clientWidth")
    assert page.pdf().startswith(b"%PDF")


# ------------------------------------------------------------------- find and save


def test_the_search_box_finds_heads_labels_and_tokens(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores)
    page = view.page

    def found(text: str) -> list[str]:
        page.fill("#find-input", text)
        return page.eval_on_selector_all("#find-list [data-head]", "all => all.map(o => o.dataset.head)")

    assert found("L2H1")[0] == "L2H1" and found("2.1")[0] == "L2H1" and found("l2 kv0")[0] == "L2KV0"
    assert {"L2H0", "L3H3"} <= set(found("reader"))
    payload = report(scores, array_model(kv_heads=2)).payload
    head, tokens = next(iter(payload["tokens"]["O"].items()))
    assert head in found(tokens[0])
    assert found("<nothing>") == [] and "No matching head" in view.text("#find-list")
    found("3.3")
    page.keyboard.press("Enter")
    assert view.state("head") == "L3H3" and "L3H3" in view.text("#card-title")
    assert page.locator('.node[data-head="L3H3"]').count() == 1, "a head without a line is drawn while it is chosen"


def test_heads_over_free_axes(open_page: Open, small: tuple[Path, Scores], demo: tuple[Path, Scores]) -> None:
    view = open_page(*small, "#at=heads&hx=layer&hy=behaviour:induction")
    view.page.wait_for_selector("#heads-main .point")
    assert view.page.locator("#heads-main .point").count() == 16
    view.page.select_option("#control-hy", "value:drift")
    view.page.locator("#heads-caption", has_text="2 heads").wait_for()
    view.page.click('#heads-main .point[data-head="L2H0"] circle')
    assert view.state("head") == "L2H0"
    options = open_page(*demo).page.eval_on_selector_all("#control-hx option", "all => all.map(o => o.value)")
    assert {"layer", "outlet:OK", "inlet:OK", "behaviour:induction", "value:effect-out-OK"} <= set(options)


def test_two_classes_make_a_striped_box(open_page: Open, small: tuple[Path, Scores]) -> None:
    view = open_page(*small)
    script = "all => all.map(s => s.getAttribute('fill'))"
    fills = view.page.eval_on_selector_all('.node[data-head="L0H1"] .stripe', script)
    assert len(fills) == 1 and fills[0] == report(small[1], labels=LABELS).payload["labels"]["colours"]["induction"]


def test_a_view_is_saved_as_svg_and_png(open_page: Open, small: tuple[Path, Scores]) -> None:
    view = open_page(*small, "#k=9")
    files = {}
    for kind in ("svg", "png"):
        with view.page.expect_download() as download:
            view.page.click(f"#save-{kind}")
        assert download.value.suggested_filename.endswith(f"wiring.{kind}")
        files[kind] = Path(download.value.path()).read_bytes()
    text = files["svg"].decode()
    picture = ElementTree.fromstring(text)
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Projection Kernel" in text and "best 9 per pairing" in text and "headspan" in text
    assert not re.search(r'(href|src)="(?!#)', text) and "var(--" not in text
    assert len(picture.findall(".//*[@data-strength]")) == view.page.locator(".edge").count()
    assert files["png"].startswith(b"\x89PNG") and len(files["png"]) > 5000


# ------------------------------------------------------------------------- costs


def test_tokens_of_a_large_vocabulary_are_those_of_the_strongest_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = array_model()
    scores = hs.score(weights)
    everything = report(scores, weights).payload["tokens"]
    assert sum(map(len, everything.values())) == 64
    monkeypatch.setattr(details, "TOKEN_WORK", 2 * 40 * 24 * 4 * 6.5)
    some = report(scores, weights).payload["tokens"]
    assert sum(map(len, some.values())) == 6
    assert some["O"]["L0H1"] == everything["O"]["L0H1"] and some["K"]["L2H0"] == everything["K"]["L2H0"]


def test_a_page_with_tokens_reads_the_unembedding_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary. What tokens cost is measured by benchmarks/bench_tokens.py."""
    d, vocabulary, layers = 576, 49_152, 2
    shapes = {"wte.weight": (vocabulary, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    for layer in range(layers):
        shapes |= {f"h.{layer}.attn.c_attn.weight": (d, 3 * d), f"h.{layer}.attn.c_attn.bias": (3 * d,),
                   f"h.{layer}.attn.c_proj.weight": (d, d), f"h.{layer}.attn.c_proj.bias": (d,),
                   f"h.{layer}.ln_1.weight": (d,), f"h.{layer}.ln_1.bias": (d,)}  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = {"n_embd": d, "n_head": 9, "n_layer": layers, "vocab_size": vocabulary, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    weights = hs.open(tmp_path)
    reads: Counter[str] = Counter()
    source = weights.source  # type: ignore[attr-defined]
    real = source.read
    monkeypatch.setattr(source, "read", lambda name, *rest: (reads.update([name]), real(name, *rest))[1])
    page = report(hs.score(weights, "pk", "flow"), weights)
    assert page.payload["tokens"]["O"]
    (name,) = [name for name in reads if "wte" in name]
    assert reads[name] <= vocabulary // 1000 + 2


def test_the_angles_of_the_page_are_those_of_a_pair() -> None:
    weights = array_model()
    stored = report(hs.score(weights, "pk", "flow"), weights).payload["details"]["OK"]
    key, entry = next(iter(stored.items()))
    row, column = map(int, key.split(">"))
    exact = hs.pair(weights, f"L{row // 4}H{row % 4}.O", f"L{column // 4}H{column % 4}.K")
    angles = np.frombuffer(b64decode(entry["angles"]), dtype="<u2") * (90 / 65535)
    np.testing.assert_allclose(angles, np.degrees(exact.principal_angles), atol=0.05)
    texts = [[t.token for t in side] for side in exact.directions[0].source_tokens]  # type: ignore[union-attr]
    assert entry["directions"][0]["writes"] == texts

"""The gallery: an index and one page per result, no other files touched, no requests, hostile names harmless."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import headspan as hs
from headspan.cli import _run
from report_browser import violations

HOSTILE = "</title><script>alert(1)</script>\"'\u202e../../x"


class Links(HTMLParser):
    """Every address in a page, by attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action", "data")]


def small(layers: int = 3, seed: int = 0) -> hs.Scores:
    rng = np.random.default_rng(seed)
    return hs.score(hs.open({role: rng.normal(size=(layers, 2, 16, 4)) for role in "QKVO"}))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery") / "site"
    hs.site(folder, {"demo": "demo", HOSTILE: small(), "Demo": small(2, 1)}, title=HOSTILE, tokens=2)
    return folder


def test_an_index_and_a_page_for_each(gallery: Path) -> None:
    assert sorted(path.name for path in gallery.iterdir()) == [
        "demo-2.html", "demo.html", "index.html", "title-script-alert-1-script-..-..-x.html",
    ]  # fmt: skip
    index = (gallery / "index.html").read_text(encoding="utf-8")
    assert "2 layers, 16 heads, d_model 256" in index
    assert (gallery / "demo.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_links_are_relative_and_lead_to_files(gallery: Path) -> None:
    found = Links((gallery / "index.html").read_text(encoding="utf-8"))
    assert found.scripts == 0
    links = [address for address in found.addresses if not address.startswith("data:image/svg+xml;base64,")]
    assert links and {urlsplit(link).scheme + urlsplit(link).netloc for link in links} == {""}
    assert all((gallery / link).is_file() for link in links)


def test_the_policy_allows_only_its_own_style(gallery: Path) -> None:
    text = (gallery / "index.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(rule.split(None, 1) for rule in policy[1].replace("&#39;", "'").split("; "))
    assert rules.pop("style-src").startswith("'sha256-")
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    assert "<script" not in text and HOSTILE not in text and " style=" not in text


def test_made_again_and_into_folders_of_others(tmp_path: Path) -> None:
    scores = small()
    scores.save(tmp_path / "r.safetensors")
    place = tmp_path / "site"
    for _ in range(2):
        assert hs.site(place, [tmp_path / "r.safetensors"]).pages[0].file == "arrays.html"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(hs.HeadspanError, match="it has other files"):
        hs.site(theirs, [scores])
    (place / "arrays.html").write_text("mine")
    with pytest.raises(hs.HeadspanError, match="not a headspan"):
        hs.site(place, [scores])
    assert (place / "arrays.html").read_text() == "mine"
    with pytest.raises(hs.HeadspanError, match="not a directory"):
        hs.site(tmp_path / "r.safetensors", [scores])
    hs.site(theirs, [scores], force=True)
    assert (theirs / "notes.txt").read_text() == "mine" and (theirs / "index.html").is_file()


def test_weights_find_their_result(tmp_path: Path) -> None:
    result = hs.score("demo", ["pk"], "flow")
    made = hs.site(tmp_path / "site", [small(), result], model=["demo"], tokens=2)
    pages = [(made.folder / page.file).read_text(encoding="utf-8") for page in made.pages]
    assert '"details":{}' not in pages[1].replace(" ", "") and len(pages[1]) > len(pages[0])
    other = hs.open({role: np.random.default_rng(9).normal(size=(2, 2, 16, 4)) for role in "QKVO"})
    with pytest.raises(hs.HeadspanError, match="not the model of any"):
        hs.site(tmp_path / "other", [result], model=[other])
    with pytest.raises(hs.HeadspanError, match="at least one result"):
        hs.site(tmp_path / "other", [])
    assert not (tmp_path / "other").exists()


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small().save(tmp_path / "r.safetensors")
    assert _run(["site", str(tmp_path / "g"), str(tmp_path / "r.safetensors"), "--title", "Mine"]) == 0
    assert ": 1 model. " in capfd.readouterr().err
    assert "<h1>Mine</h1>" in (tmp_path / "g" / "index.html").read_text(encoding="utf-8")


def test_in_a_browser(browser: Any, gallery: Path) -> None:
    """Images show under the policy, no script in a name runs, no requests are made, nothing overflows."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("dialog", lambda dialog: said.append("dialog"))
    address = (gallery / "index.html").as_uri()
    page.goto(address)
    assert [url for url in asked if not url.startswith("data:")] == [address] and said == []
    widths = page.eval_on_selector_all("img", "all => all.map(image => image.naturalWidth)")
    assert len(widths) == 3 and min(widths) > 100
    for width in (1440, 1024, 420):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.eval_on_selector("html", "root => root.scrollWidth") <= width
    page.get_by_role("link", name="demo", exact=True).first.click()
    page.wait_for_selector("#diagram svg")
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (420, "dark")])
def test_axe_finds_nothing(width: int, scheme: str, browser: Any, axe: str, gallery: Path) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto((gallery / "index.html").as_uri())
    for media in ("screen", "print"):
        page.emulate_media(media=media)
        assert violations(page, axe) == [], media
    context.close()

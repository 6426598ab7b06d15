"""Screening: the distribution of a sketch by simulation, certificates by trials, and models against exact runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
import screening_trials
from headspan.cli import app
from headspan.scoring import screening
from headspan.scoring.screening import screen
from headspan.subspaces import sketches
from headspan.system import threads
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role, parse_pairings
from notices import noticed

GB = 10**9


def subspaces(rng: np.random.Generator, d: int, cosines: list[float], m: int, m2: int) -> tuple[np.ndarray, np.ndarray]:
    """Bases of two subspaces with these cosines of their first principal angles, the others at right angles."""
    frame = np.linalg.qr(rng.normal(size=(d, m + m2)))[0]
    first, second = frame[:, :m], frame[:, m:].copy()
    for j, c in enumerate(cosines):
        second[:, j] = c * first[:, j] + np.sqrt(1 - c**2) * frame[:, m + j]
    return first, second


def sketched(rng: np.random.Generator, first: np.ndarray, second: np.ndarray, s: int, draws: int) -> np.ndarray:
    """T of so many sketches, by its definition."""
    sketch = rng.normal(size=(draws, s, len(first))) / np.sqrt(s)
    left = np.linalg.qr(sketch @ first)[0]
    return np.square(left.transpose(0, 2, 1) @ (sketch @ second)).sum(axis=(1, 2))


CASES = [(4, 4, [0.9, 0.5, 0.2, 0.0]), (4, 6, [0.7, 0.7, 0.7, 0.7]), (6, 3, [0.99, 0.3, 0.0]), (3, 3, [0.0, 0.0, 0.0])]


@pytest.mark.parametrize(("m", "m2", "cosines"), CASES)
def test_the_law_of_a_sketch(m: int, m2: int, cosines: list[float]) -> None:
    """Mean and Laplace transform of T, against 20,000 sketches."""
    rng, d, s = np.random.default_rng(m + 10 * m2), 24, 15
    t = sketched(rng, *subspaces(rng, d, cosines, m, m2), s, 20_000)
    pk = float(np.square(cosines).sum())
    estimate = sketches.estimates(t, m, m2, s)
    assert estimate.mean() == pytest.approx(pk, abs=4 * estimate.std() / np.sqrt(len(t)))
    c2 = np.pad(np.square(cosines), (0, max(0, m2 - len(cosines))))
    for rate in (0.02, 0.1, 0.5):
        values = np.exp(-rate * s * t)
        exact = (1 + 2 * rate) ** (-s * m2 / 2) * np.prod((1 + 2 * rate * (1 - c2)) ** ((s - m) / 2))
        assert values.mean() == pytest.approx(exact, abs=4 * values.std() / np.sqrt(len(t)))
        # At this PK no cosines make it larger than equal ones do, and where they are equal it is the law itself.
        bound = np.exp(sketches.log_laplace(rate, pk, m, m2, s))
        assert exact <= bound * (1 + 1e-12)
        if len(set(cosines)) == 1:
            assert exact == pytest.approx(float(bound), rel=1e-9)


@pytest.mark.parametrize(("m", "m2", "cosines"), CASES[:3])
def test_a_pair_stays_below_its_threshold_as_seldom_as_promised(m: int, m2: int, cosines: list[float]) -> None:
    rng, d, s = np.random.default_rng(3), 24, 15
    pk = float(np.square(cosines).sum())
    t = sketched(rng, *subspaces(rng, d, cosines, m, m2), s, 20_000)
    for probability in (0.1, 0.01):
        below = np.mean(t <= sketches.threshold(pk, probability, m, m2, s))
        assert below <= probability
        bounds = sketches.upper_bounds(t, probability, m, m2, s)
        assert np.mean(bounds < pk) <= probability
    # Equal cosines are the worst case: there the bound may not be idle.
    if len(set(cosines)) == 1:
        assert np.mean(t <= sketches.threshold(pk, 0.1, m, m2, s)) > 0.005


def test_bounds_rise_with_what_was_seen() -> None:
    pk = np.linspace(0, 8, 50)
    assert (np.diff(sketches.threshold(pk, 0.01, 8, 8, 24)) >= 0).all()
    assert sketches.upper_bounds(np.array([0.0, 100.0]), 0.01, 8, 8, 24)[1] == 8.0
    assert sketches.upper_bounds(np.array([100.0]), 0.01, 8, 3, 24) == 3.0
    assert sketches.upper_bounds(np.array([100.0]), 0.01, 3, 8, 24) == 3.0


def test_a_sketch_keeps_squared_lengths_on_average() -> None:
    sketch = sketches.gaussian_sketch(3000, 20, seed=1)
    assert sketch.shape == (20, 3000)
    assert np.square(sketch).sum(axis=0).mean() == pytest.approx(1, abs=0.03)


def planted(
    seed: int, edges: int = 3, d: int = 64, m: int = 4, layers: int = 5, heads: int = 4
) -> dict[str, np.ndarray]:
    """Random weights in which some heads write much of what later ones read."""
    rng = np.random.default_rng(seed)
    arrays = {role: rng.normal(size=(layers, heads, d, m)) for role in "QKVO"}
    for _ in range(edges):
        a, b = sorted(rng.choice(layers, 2, replace=False))
        share = rng.uniform(0.5, 1.0)
        mixed = share * arrays["O"][a, rng.integers(heads)] + (1 - share) * rng.normal(size=(d, m))
        arrays["K"][b, rng.integers(heads)] = mixed
    return arrays


@pytest.fixture
def bounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``screening_trials.resting_on_bounds``, for one test."""
    monkeypatch.setattr(threads, "cores", lambda: 1)
    monkeypatch.setattr(screening, "_MORE", 1)


@pytest.mark.usefixtures("bounds_alone")
@pytest.mark.parametrize("kind", screening_trials.KINDS)
def test_certificates_hold(kind: str) -> None:
    """A few of the trials counted in docs/statistics.md: no certified pair may have a wrong rank."""
    found = screening_trials.count(screening_trials.KINDS[kind], 12)
    assert found.wrong == 0
    assert found.compared <= 12 * 16  # a tenth of the pairs: for all others a bound has to hold
    assert found.certified >= (3 if "weak" in kind else 8)  # an empty certificate would be no proof


@pytest.mark.usefixtures("bounds_alone")
def test_an_edge_can_be_hidden_from_a_seed_that_is_known() -> None:
    """Why the seed comes from the content: against a known one nearly every certificate is wrong."""
    assert screening_trials.count(screening_trials.KINDS["edge hidden from seed 0"], 6, seed=0).wrong >= 5


def seed_of(weights: Any, **options: Any) -> int:
    scores = hs.score(weights, "pk", "OK", screen=2, **options)
    assert (
        scores.provenance["screen"]["seed"]
        == hs.score(weights, "pk", "OK", screen=2, **options).provenance["screen"]["seed"]
    )  # a run can be repeated
    return scores.provenance["screen"]["seed"]


def test_the_seed_comes_from_everything_that_is_compared() -> None:
    """The last bit of one weight, of one gain that is folded in, or of one number of the config changes it."""
    arrays = planted(0, d=16, m=2, layers=2, heads=2) | {"norm": "layer", "gain": np.ones((2, 16))}
    seeds = [seed_of(hs.fold(hs.open(arrays)))]
    for name, place in (("O", (1, 1, 15, 1)), ("K", (0, 0, 0, 0)), ("gain", (1, 3))):
        changed = arrays | {name: arrays[name].copy()}
        changed[name][place] = np.nextafter(changed[name][place], 9)
        seeds.append(seed_of(hs.fold(hs.open(changed))))
    assert len(set(seeds)) == 4 and 0 not in seeds
    assert seed_of(arrays, seed=7) == 7
    assert seed_of("demo") == screening.sketch_seed(hs.open("demo").fingerprint())


def test_a_seed_on_the_command_line(tmp_path: Path) -> None:
    runner, out = CliRunner(), str(tmp_path / "r.safetensors")
    asked = ["score", "demo", "--out", out, "--pairing", "OK"]
    result = runner.invoke(app, [*asked, "--screen", "3", "--seed", "11"])
    assert result.exit_code == 0 and hs.load(out).provenance["screen"]["seed"] == 11
    for wrong in (["--seed", "11"], ["--screen", "3", "--seed", str(2**64)]):
        refused = runner.invoke(app, [*asked, *wrong])
        assert isinstance(refused.exception, HeadspanError) and "seed" in str(refused.exception)
    assert runner.invoke(app, [*asked, "--screen", "3", "--seed", "-1"]).exit_code == 2


def test_planted_edges_are_found_and_certified() -> None:
    arrays = planted(5, edges=0, d=256, m=8, layers=6, heads=4)
    arrays["Q"][4, 2] = arrays["O"][1, 3]
    scores = hs.score(arrays, "pk", ["OQ", "OK"], screen=5)
    (best,) = scores["pk", "OQ"].top(1)
    assert (str(best.source), str(best.target), round(best.score, 4)) == ("L1H3", "L4H2", 8.0)
    assert scores.provenance["screen"]["OQ"]["certified"] >= 1


@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("model", ["gpt2_dir", "smollm2_gguf", "demo"])
def test_the_same_pairs_and_values_as_the_exact_run(model: str, k: int, request: pytest.FixtureRequest) -> None:
    """Recall on real models, MHA and GQA: what is certified is right, and here everything that was asked for is."""
    reference = model if model == "demo" else str(request.getfixturevalue(model))
    pairings = ["OQ", "OK", "OV"] if k > 1 else ["OK", "KO", "OO", "QV"]
    exact, found = (hs.score(reference, "pk", pairings, screen=count) for count in (None, k))
    for pairing in pairings:
        mine, true = found["pk", pairing].top(k + 1), exact["pk", pairing].top(k)
        assert [e[3:5] for e in mine] == [e[3:5] for e in true]
        np.testing.assert_allclose([e.score for e in mine], [e.score for e in true], rtol=2e-6)
        assert found.provenance["screen"][pairing]["certified"] == k
    for role in "OQKV":
        if role in found.role_ranks and role in exact.role_ranks:
            np.testing.assert_array_equal(found.ranks(role), exact.ranks(role))


def test_heads_of_lower_rank_and_of_none() -> None:
    arrays = planted(1, d=48, m=4)
    arrays["O"][0, 1] = 0.0
    arrays["O"][1, 2, :, 3] = arrays["O"][1, 2, :, 0]
    arrays["K"][3, 0] = arrays["O"][1, 2]
    exact, found = (hs.score(arrays, "pk", "flow", screen=count) for count in (None, 6))
    assert found.ranks("O").tolist() == exact.ranks("O").tolist()
    for pairing in ("OQ", "OK", "OV"):
        assert [e[3:5] for e in found["pk", pairing].top(6)] == [e[3:5] for e in exact["pk", pairing].top(6)]


def test_few_comparisons_make_a_certificate_in_part() -> None:
    """Noise has no outstanding edges: the found pairs are exact, and the certificate does not claim more."""
    weights = hs.open(planted(2, edges=0, d=64, m=4, layers=8, heads=8))
    found = screen(weights, parse_pairings("OK"), "default", 5, memory=GB, size=12, exact=5)
    about = found.provenance["screen"]["OK"]
    assert about["certified"] < 5 and about["found"] == about["compared"] == 5 < about["pairs"]
    exact = hs.score(weights, "pk", "OK")["pk", "OK"]
    for edge in found["pk", "OK"].top(5):
        assert edge.score == pytest.approx(exact.at(edge.source, edge.target), rel=2e-6)


def test_more_pairs_are_compared_where_that_makes_the_certificate_whole() -> None:
    """Where four comparisons leave doubt, the pairs in doubt are few enough to be compared too."""
    whole = 0
    for seed in range(12):
        found = screen(hs.open(planted(seed)), parse_pairings("OK"), "default", 2, memory=GB, seed=0, size=32, exact=4)
        about = found.provenance["screen"]["OK"]
        whole += about["certified"] == 2 and 4 < about["compared"] < about["pairs"]
    assert whole >= 3


def test_memory_of_screening_is_counted_before_it_is_used() -> None:
    """By hand: sketches of all heads, orthonormal ones of the sources, six copies of a layer, 12 numbers per pair."""
    rng = np.random.default_rng(0)
    counts = {"Q": 6, "K": 3, "V": 3, "O": 6}
    weights = hs.open({role: rng.normal(size=(4, n, 64, 4 if role in "QK" else 2)) for role, n in counts.items()})
    sketched = 4 * 32 * (24 * 2 + 12 * 4)
    needed = 300 * 10**6 + sketched + 2 * 4 * 32 * 24 * 2 + 6 * 8 * 64 * max(6 * 2, 3 * 4) + 12 * 4 * 24 * 12
    asked = weights, parse_pairings("OK"), (Role.O, Role.K), 32
    screening._check_memory(*asked, needed)
    with pytest.raises(HeadspanError, match="too little memory to screen"):
        screening._check_memory(*asked, needed - 1)


def test_little_memory_compares_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = hs.open(planted(4, d=512, m=16, layers=5, heads=6))
    large = screen(weights, parse_pairings("flow"), "default", 9, memory=GB)
    blocks, whole = [], screening._blocks

    def small(weights: Any, heads: Any, memory: int) -> Iterator[Any]:
        for block in whole(weights, heads, 10 * 4 * 512 * 16):
            blocks.append(len(block))
            yield block

    monkeypatch.setattr(screening, "_blocks", small)
    assert screen(weights, parse_pairings("flow"), "default", 9, memory=GB) == large
    assert max(blocks) <= 10 < sum(blocks)
    with pytest.raises(HeadspanError, match=r"0.30 GB.*0.3"):
        screen(weights, parse_pairings("flow"), "default", 9, memory=3 * 10**8)


def test_a_screened_result_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    out = tmp_path / "r.safetensors"
    with noticed() as told:
        scores = hs.score("demo", "pk", "flow", screen=5, out=out)
    assert hs.load(out) == scores and hs.load(out).screened
    assert told[0].startswith("OQ: 5 of the 5 strongest pairs are certified")
    assert len(hs.top(scores, "OK", 3)) == 3
    assert len(hs.score("demo", "pk", "OK", screen=1)["pk", "OK"].pairs()[2]) == 1
    assert hs.wiring(scores, k=3).edges
    assert (hs.wiring(scores, k=3).rule, hs.wiring(scores, k=20).rule) == ("top 3 per pairing", "top 5 per pairing")
    for use in (hs.hubs, hs.baseline, hs.report):
        with pytest.raises(HeadspanError, match="only the strongest pairs"):
            use(scores)
    with pytest.raises(HeadspanError, match="only the strongest pairs"):
        hs.significance(scores, "OK")
    with pytest.raises(HeadspanError, match="only the strongest pairs"):
        hs.compare(scores, scores)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"metric": "cs"}, "not with cs"),
        ({"metric": ["pk", "cs"]}, "not with pk, cs"),
        ({"screen": 0}, "at least 1 pair"),
        ({"delta": 0.0}, "between 0 and 1"),
        ({"delta": 1.0}, "between 0 and 1"),
        ({"dask": "local"}, "CPU only"),
        ({"device": "torch:cpu"}, "CPU only"),
        ({"route": "gram"}, "has no route"),
        ({"seed": -1}, "whole number from 0"),
        ({"screen": None, "seed": 1}, "only screening uses a seed"),
    ],
)
def test_what_screening_cannot_do(options: dict, sentence: str) -> None:
    with pytest.raises(HeadspanError, match=sentence):
        hs.score("demo", **{"metric": "pk", "screen": 3} | options)


def test_a_long_run_suggests_screening(monkeypatch: pytest.MonkeyPatch) -> None:
    from headspan.scoring import run

    with noticed() as told:
        hs.score("demo", "pk", "OK")
    assert not told
    monkeypatch.setattr(run, "_LONG", 0.0)
    monkeypatch.setattr(run, "_SURELY_SHORT", 0.0)
    with noticed() as told:
        hs.score("demo", "pk", "OK")
    assert "`screen=100`" in told[0]

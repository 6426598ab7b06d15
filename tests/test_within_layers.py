"""Evidence about two heads: residuals of scores within their two layers, calibrated where no heads are connected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.explorer.findings import above_reversed
from headspan.statistics.baseline import remarks, summarise
from headspan.statistics.significance import significance
from headspan.statistics.within_layers import direction_of, residual_z
from headspan.vocabulary.heads import Head
from science_helpers import make_scores

D, M = 64, 5


def subspaces(rng: np.random.Generator, frame: np.ndarray, pull: np.ndarray, heads: int) -> np.ndarray:
    """Heads of one layer: random subspaces, drawn towards a frame, some heads more strongly than others."""
    free = rng.normal(size=(heads, D, M))
    towards = frame @ rng.normal(size=(heads, frame.shape[1], M))
    pull = np.broadcast_to(pull, heads)[:, None, None] * np.sqrt(D / frame.shape[1])
    return np.linalg.qr(free + pull * towards)[0]


def unwired(kind: str, seed: int, layers: int = 6, heads: int = 8, kv: int | None = None) -> np.ndarray:
    """PK of O with K where heads of a layer are exchangeable: only whole layers may be related."""
    rng = np.random.default_rng(seed)
    kv = heads if kv is None else kv
    turn = {"drift": 0.6, "drift and concentration": 0.6, "lag": 1.0, "lag of unequal heads": 1.0}.get(kind, 0.0)
    frames = [np.linalg.qr(rng.normal(size=(D, 2 * M)))[0]]
    for _ in range(layers):
        frames.append(np.linalg.qr(frames[-1] + turn * rng.normal(size=(D, 2 * M)) / np.sqrt(D))[0])
    written, read = [], []
    for layer in range(layers):
        depth = layer / (layers - 1)
        pulls = {
            "none": lambda n: (0.0, 0.0),
            "heavy tails": lambda n: tuple(0.4 * np.abs(rng.standard_t(2, size=k)) for k in n),
            "drift": lambda n: (0.8, 0.8),
            "drift and concentration": lambda n, x=depth: (0.3 + 0.9 * x, 0.3 + 0.9 * x),
            "mild trend": lambda n, x=depth: (0.7 - 0.3 * x, 0.4 + 0.3 * x),
            "strong trend": lambda n, x=depth: (1.2 - x, 0.2 + x),
            "lag": lambda n: (0.8, 0.8),
            "lag of unequal heads": lambda n: tuple(rng.lognormal(-0.5, 0.7, size=k) for k in n),
        }[kind]((heads, kv))
        written.append(subspaces(rng, frames[layer + kind.startswith("lag")], pulls[0], heads))
        read.append(subspaces(rng, frames[layer], pulls[1], kv))
    overlap = np.einsum("adi,bdj->abij", np.concatenate(written), np.concatenate(read), optimize=True)
    return np.square(overlap).sum(axis=(2, 3))


def scores_of(pk: np.ndarray, layers: int = 6, heads: int = 8, kv: int | None = None) -> hs.Scores:
    arrays = {("pk", "OK"): pk, ("pk", "KO"): pk.T}
    return make_scores(arrays, layers=layers, heads=heads, kv_heads=kv, d_model=D, rank=M)


KINDS = (
    "none", "heavy tails", "drift", "drift and concentration", "mild trend", "strong trend", "lag",
    "lag of unequal heads",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_exchangeable_heads_make_no_discoveries_and_a_direction_of_layers_is_noticed(kind: str) -> None:
    times, false, noticed, above = 24, 0, 0, []
    for seed in range(times):
        found = significance(scores_of(unwired(kind, seed)), "OK", null="reversed")
        assert found.q_within is not None and found.direction is not None
        false += bool((found.q_within <= 0.05).any())
        noticed += found.direction.favours_forward
        above.append(found.count())
    assert false <= 3  # at a rate of 0.05 four or more of 24 have a chance of 0.03; 0 to 2 % were measured
    directed = kind.startswith(("mild", "strong", "lag"))
    assert noticed >= 20 if directed else noticed <= 6
    if kind == "strong trend":  # what the reversed null alone makes of it
        assert min(above) > 100


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (8, 2), (9, 3), (16, 4)])
def test_few_heads_and_shared_keys_make_no_discoveries_either(heads: int, kv: int) -> None:
    false = 0
    for seed in range(10):
        for kind in ("strong trend", "lag"):
            pk = unwired(kind, seed, heads=heads, kv=kv)
            false += significance(scores_of(pk, heads=heads, kv=kv), "OK", null="within").count() > 0
    assert false <= 3


def test_levels_and_spreads_of_whole_layers_make_no_discoveries() -> None:
    """Scores five times as large, and as widely spread, in forward pairs of distant layers."""
    layers, heads = 8, 6
    layer = np.repeat(np.arange(layers), heads)
    scale = 1 + 4 * np.maximum(layer[None, :] - layer[:, None], 0) / layers
    false = 0
    for seed in range(20):
        pk = scale * (1 + 0.2 * np.random.default_rng(seed).normal(size=scale.shape))
        scores = make_scores({("pk", "OK"): pk, ("pk", "KO"): pk.T}, layers=layers, heads=heads)
        assert significance(scores, "OK", null="reversed").count() > 300
        false += significance(scores, "OK", null="within").count() > 0
    assert false <= 3


@pytest.mark.parametrize(("heads", "kv"), [(8, 8), (9, 3)])
@pytest.mark.parametrize("kind", ["none", "strong trend", "lag"])
def test_planted_wiring_is_found_even_where_one_head_writes_for_two_of_a_layer(kind: str, heads: int, kv: int) -> None:
    hits, planted, others = 0, 0, 0
    for seed in range(6):
        pk = unwired(kind, seed, heads=heads, kv=kv)
        wired = np.zeros(pk.shape, dtype=bool)
        wired[2, 3 * kv + 1] = wired[heads + 1, 5 * kv] = wired[2 * heads + 3, 4 * kv + 2] = True
        if kv > 3:
            wired[2, 3 * kv + 2] = True
        found = significance(scores_of(pk + 3.0 * wired, heads=heads, kv=kv), "OK", null="within")
        hits += np.count_nonzero(found.q[wired] <= 0.05)
        planted += wired.sum()
        others += found.count() - np.count_nonzero(found.q[wired] <= 0.05)
    assert hits >= 0.7 * planted
    assert others <= 0.1 * planted


def test_layers_of_one_head_have_no_evidence(tmp_path: Path) -> None:
    scores = scores_of(unwired("strong trend", 0, kv=1), kv=1)
    found = significance(scores, "OK", null="within")
    for values in (found.z, found.p, found.q):
        assert np.isnan(values).all()
    assert found.count() == 0
    assert "a layer has too few heads" in found.note
    assert "a layer has too few heads" in found.nothing(0.05)
    against = significance(scores, "OK", null="reversed")
    assert against.shared() is None
    assert "there is no head-specific evidence" in against.agreement()
    line = next(line for line in summarise(scores) if str(line.pairing) == "OK")
    assert line.reversed_significant and line.within_significant is None and line.both_significant is None
    assert "no evidence about single heads" in above_reversed([line])[0].text
    path = tmp_path / "r.safetensors"
    scores.save(path)
    run = CliRunner().invoke(app, ["baseline", str(path), "--pairing", "OK", "--null", "within", "--json"])
    assert run.exit_code == 0, run.output
    assert {row["q"] for row in json.loads(run.stdout)} == {None}


def heads_of(*sizes: int, kind: str = "H") -> tuple[Head, ...]:
    return tuple(Head(layer, i, kind) for layer, size in enumerate(sizes) for i in range(size))


def test_residuals_are_those_of_median_polish() -> None:
    """Rows, columns and levels drop out exactly; a single pair stands out; blocks that are too small have no result."""
    rng = np.random.default_rng(0)
    sources, targets = heads_of(5, 6, 2), heads_of(5, 6, 2)
    noise = rng.normal(size=(13, 13))
    rows, columns = rng.normal(size=(13, 1)), rng.normal(size=(1, 13))
    z = residual_z(noise, sources, targets)
    block = noise[:5, 5:11].copy()
    for _ in range(4):
        block -= np.median(block, axis=1, keepdims=True)
        block -= np.median(block, axis=0, keepdims=True)
    assert np.array_equal(np.sign(z[:5, 5:11]), np.sign(block))
    # A source, a target and a level of their own change nothing once polishing has converged; an outlier stands out.
    added = noise.copy()
    added[1, 7] += 12
    shifted = residual_z(added + 20 * rows + 20 * columns, sources, targets)
    assert np.unravel_index(np.nanargmax(shifted), shifted.shape) == (1, 7)
    assert np.isnan(z[11:, 11:]).all()  # 2×2
    assert not np.isnan(z[:5, 11:]).any()  # 5×2
    # Unequal layers in any order: the numbers belong to the pairs.
    order = rng.permutation(13)
    mixed = residual_z(noise[order][:, order], [sources[i] for i in order], [targets[i] for i in order])
    np.testing.assert_allclose(mixed, z[order][:, order])


def test_equal_scores_and_rounding_are_not_evidence() -> None:
    flat = np.full((24, 24), 3.0)
    for values in (flat, np.zeros((24, 24)), flat * (1 + 1e-8 * np.random.default_rng(1).normal(size=(24, 24)))):
        found = significance(
            make_scores({("pk", "OK"): values, ("pk", "KO"): values.T}, layers=4, heads=6), "OK", null="within"
        )
        present = found.z[~np.isnan(found.z)]
        assert len(present) == 6 * 36 and np.abs(present).max() < 0.1
        assert found.count() == 0


def test_a_shared_rotary_key_is_not_compared_with_the_keys_of_its_layer() -> None:
    targets = tuple(head for layer in range(3) for head in (*heads_of(*[0] * layer, 5)[-5:], Head(layer, 0, "KR")))
    z = residual_z(np.random.default_rng(2).normal(size=(15, 18)), heads_of(5, 5, 5), targets)
    rotary = np.array([head.kind == "KR" for head in targets])
    assert np.isnan(z[:, rotary]).all() and not np.isnan(z[:, ~rotary]).any()


def test_direction_of_layers_is_a_permutation_test() -> None:
    heads = heads_of(*[3] * 5)
    layer = np.repeat(np.arange(5), 3)
    ahead = (layer[None, :] > layer[:, None]).astype(float)
    found = direction_of(ahead, heads, heads)
    assert (found.difference, found.forward) == (1.0, pytest.approx(1 / 120))  # the one order of 120 that is largest
    assert "more forwards" in found.sentence
    back = direction_of(ahead.T, heads, heads)
    assert (back.difference, back.backward, back.forward) == (-1.0, pytest.approx(1 / 120), 1.0)
    assert "conservative" in back.sentence
    near = 1.0 / (1 + np.abs(layer[None, :] - layer[:, None]))  # the same in both directions
    assert direction_of(near, heads, heads)[:2] == (0.0, 1.0)
    assert "too few layers" in direction_of(ahead[:9, :9], heads[:9], heads[:9]).sentence


def test_disagreement_of_the_nulls_is_noted_wherever_the_count_is_shown(tmp_path: Path) -> None:
    pk = unwired("strong trend", 3)
    pk[2, 30] += 3
    scores = scores_of(pk)
    against = significance(scores, "OK", null="reversed")
    assert against.shared() == 1 < against.count()
    said = f"{against.count():,} pairs are above the reversed pairs; 1 of them also stands out among the heads"
    assert said in against.agreement()
    assert "compare the null within layers" in against.note
    line = next(line for line in summarise(scores) if str(line.pairing) == "OK")
    assert (line.within_significant, line.both_significant, line.directed) == (1, 1, True)
    assert said in remarks([line])[0] and "forwards than reversed in OK" in remarks([line])[1]
    (finding,) = above_reversed([line])
    assert "1 of them also stands out" in finding.text and "without being connected" in finding.text
    path = tmp_path / "r.safetensors"
    scores.save(path)
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["baseline", str(path)])
    assert said in " ".join(listed.output.split()) and " within " in listed.output
    pairs = CliRunner().invoke(
        app, ["baseline", str(path), "--pairing", "OK", "--null", "reversed", "--json", "-k", "0"]
    )
    assert sum(row["q_within"] <= 0.05 for row in json.loads(pairs.stdout)) == 1
    options = ["--rule", "significance", "--pairing", "OK", "--json", "--null"]
    chosen = CliRunner().invoke(app, ["wiring", str(path), *options, "within"])
    assert [(row["source"], row["target"]) for row in json.loads(chosen.stdout)] == [("L0H2", "L3H6")]
    assert said in hs.wiring(scores, "OK", rule="significance", q=0.05, null="reversed").notes[0]


def test_same_type_pairings_and_missing_scores_say_what_to_do() -> None:
    pk = unwired("none", 0)
    with pytest.raises(hs.HeadspanError, match="QQ has no within null"):
        significance(make_scores({("pk", "QQ"): pk}, layers=6, heads=8), "QQ", null="within")
    with pytest.raises(hs.HeadspanError, match=r"OK.*pk.*KO"):
        significance(make_scores({("pk", "OK"): pk}, layers=6, heads=8), "OK", null="within")


def test_reversed_pairs_that_are_all_alike_have_no_z() -> None:
    """Without a spread there is nothing to count in: z is 0, not infinite."""
    forward = np.random.default_rng(0).uniform(1, 2, size=(12, 12))
    scores = make_scores({("pk", "OK"): forward, ("pk", "KO"): np.ones((12, 12))}, layers=3, heads=4)
    found = significance(scores, "OK", null="reversed")
    pairs = ~np.isnan(found.matrix.values)
    assert pairs.sum() == 48 and (found.z[pairs] == 0).all() and np.isnan(found.z[~pairs]).all()

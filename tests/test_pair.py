"""What two heads share, against scipy, planted directions and random subspaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import headspan
from headspan.cli import app
from headspan.models.arrays import ArrayWeights
from headspan.reading.overlap import SHARED_LEVEL, degenerate_blocks, largest_random_square, participation_ratio
from headspan.reading.pair import DEGENERATE_NOTE
from headspan.reading.pair import pair as compare_pair
from headspan.subspaces.random_subspaces import random_bases
from headspan.vocabulary.errors import HeadspanError

Array = NDArray[Any]


def two_heads(source: Array, target: Array, **more: Any) -> ArrayWeights:
    """A model of one layer whose O is one given basis and whose K is another."""
    o, k = source[None, None], target[None, None]
    return ArrayWeights({"Q": k, "K": k, "V": o, "O": o, **more})


@pytest.mark.parametrize(("source", "target"), [("L4H11.O", "L5H1.K"), ("L0H3.Q", "L11H7.V"), ("L3H0.O", "L9H9.Q")])
def test_real_gpt2_equals_scipy(gpt2_dir: Path, source: str, target: str) -> None:
    from scipy.linalg import subspace_angles

    weights = headspan.open(str(gpt2_dir))
    report = compare_pair(weights, source, target)
    angles = subspace_angles(*(weights.read_head(name).astype(np.float64) for name in (source, target)))[::-1]
    np.testing.assert_allclose(report.principal_angles, angles, atol=1e-6)
    assert report.pk == pytest.approx(np.sum(np.cos(angles) ** 2), abs=1e-5)
    assert report.pk_normalised == pytest.approx(report.pk / 64)
    assert report.random_mean == pytest.approx(64 * 64 / 768)
    assert report.z == pytest.approx((report.pk - report.random_mean) / report.random_sd)
    assert len(report.directions) == 10


def test_a_complete_real_model_shows_tokens(smollm2_gguf: Path) -> None:
    pytest.importorskip("gguf")
    weights = headspan.open(str(smollm2_gguf))
    report = compare_pair(weights, "L14H0.O", "L20KV1.K", k=2, tokens=3)
    for direction in report.directions:
        assert direction.source_tokens is not None
        assert direction.target_tokens is not None
        for tokens in (*direction.source_tokens, *direction.target_tokens):
            assert len(tokens) == 3
            assert all(0 < abs(token.score) < 1 for token in tokens)
    assert not any(sentence.startswith("no tokens") for sentence in report.notes)


def test_planted_directions_are_counted() -> None:
    d, m, planted = 128, 16, 5
    q = random_bases(1, d, 2 * m, seed=3)[0]
    target = np.concatenate([q[:, :planted], q[:, m : 2 * m - planted]], axis=1)
    mix = np.random.default_rng(0).normal(size=(m, m))
    report = compare_pair(two_heads(q[:, :m] @ mix, target @ mix.T), "L0H0.O", "L0H0.K")
    assert report.shared_directions == planted
    assert report.pk == pytest.approx(planted)
    assert report.participation_ratio == pytest.approx(planted)
    assert report.directions[0].block == (1, 2, 3, 4, 5)
    assert DEGENERATE_NOTE in report.notes


def test_random_subspaces_rarely_share_a_direction() -> None:
    d, m = 96, 12
    bases = random_bases(800, d, m, seed=1)
    shared = [compare_pair(two_heads(a, b), "L0H0.O", "L0H0.K", k=1).shared_directions for a, b in
              zip(bases[::2], bases[1::2], strict=True)]  # fmt: skip
    # 1 % of 400 pairs is 4; 13 or more would happen once in 3,000 runs.
    assert 0 <= np.count_nonzero(shared) < 13


@pytest.mark.parametrize(
    ("d", "m", "m2"), [(64, 16, 16), (64, 16, 4), (192, 64, 16), (12, 1, 3), (64, 32, 32), (20, 12, 11), (64, 63, 40)]
)
def test_threshold_is_the_99_percent_quantile(d: int, m: int, m2: int) -> None:
    n = 3000
    overlap = random_bases(n, d, m2, seed=7)[:, :m]  # against a coordinate subspace
    squares = np.sort(np.linalg.svd(overlap, compute_uv=False) ** 2, axis=1)[:, ::-1]
    forced = max(0, m + m2 - d)
    assert np.allclose(squares[:, :forced], 1)
    exceed = float(np.mean(squares[:, forced] > largest_random_square(d, m, m2)))
    assert 0.004 <= exceed <= 0.018


def test_subspaces_that_must_intersect() -> None:
    bases = random_bases(2, 10, 8, seed=0)
    report = compare_pair(two_heads(bases[0], bases[1]), "L0H0.O", "L0H0.K")
    assert report.forced_directions == 6
    assert report.shared_directions == 0
    np.testing.assert_allclose(report.principal_angles[:6], 0, atol=1e-7)
    whole = compare_pair(two_heads(np.eye(4), random_bases(1, 4, 2)[0]), "L0H0.O", "L0H0.O")
    assert whole.z is None
    assert whole.shared_directions == 0


def test_unequal_dimensions() -> None:
    bases = random_bases(2, 20, 6, seed=0)
    given = {"Q": bases[0][:, :4], "K": bases[0][:, :4], "V": bases[1], "O": bases[1]}
    report = compare_pair(ArrayWeights({k: v[None, None] for k, v in given.items()}), "L0H0.O", "L0H0.K")
    assert report.dimensions == (6, 4)
    assert report.random_mean == pytest.approx(24 / 20)
    assert len(report.principal_angles) == len(report.directions) == 4
    assert report.pk_normalised == pytest.approx(report.pk / 4)


def test_tokens_along_a_planted_direction() -> None:
    rng = np.random.default_rng(0)
    d, vocab = 32, 100
    unembedding, embedding = (rng.normal(size=(vocab, d)) for _ in range(2))
    gain = rng.uniform(0.5, 2, size=d)
    # The direction that the final norm turns into unembedding vector 17 and that is itself embedding vector 42.
    shared = unembedding[17] / gain
    embedding[42] = shared
    embedding[43] = -shared
    others = rng.normal(size=(d, 6))
    others -= np.outer(shared, shared @ others) / (shared @ shared)
    weights = two_heads(
        np.column_stack([shared, others[:, :3]]), np.column_stack([others[:, 3:], shared]),
        unembedding=unembedding, embedding=embedding, norm="rms", final_gain=gain,
    )  # fmt: skip
    direction = compare_pair(weights, "L0H0.O", "L0H0.K", tokens=1, preprocess="normalise").directions[0]
    assert direction.cosine == pytest.approx(1)
    assert direction.unique
    assert direction.source_tokens is not None
    assert direction.target_tokens is not None
    sign = 1 if direction.target_tokens.positive[0].id == 42 else -1
    assert {direction.target_tokens.positive[0].id, direction.target_tokens.negative[0].id} == {42, 43}
    written = direction.source_tokens.positive if sign > 0 else direction.source_tokens.negative
    assert written[0].id == 17
    assert written[0].score == pytest.approx(sign, abs=1e-5)


def test_the_sign_and_order_do_not_depend_on_the_basis() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.normal(size=(2, 20, 4))
    more = {"unembedding": rng.normal(size=(50, 20)), "embedding": rng.normal(size=(50, 20))}
    first = compare_pair(two_heads(source, target, **more), "L0H0.O", "L0H0.K")
    second = compare_pair(two_heads(source @ rng.normal(size=(4, 4)), -target, **more), "L0H0.O", "L0H0.K")
    for a, b in zip(first.directions, second.directions, strict=True):
        assert a.source_tokens is not None
        assert b.source_tokens is not None
        assert [t.id for t in a.source_tokens.positive] == [t.id for t in b.source_tokens.positive]


def test_blocks_and_participation_ratio() -> None:
    assert degenerate_blocks(np.array([0.9, 0.895, 0.7, 0.3, 0.299, 0.295])) == [
        (1, 2), (1, 2), (3,), (4, 5, 6), (4, 5, 6), (4, 5, 6),
    ]  # fmt: skip
    assert participation_ratio(np.zeros(3)) == 0
    assert participation_ratio(np.array([1.0, 0, 0])) == 1


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [("L0H0.", "L0H0.K", "head with a role"), ("L0H5.O", "L0H0.K", "no head L0H5"), ("L0H0.O", "L0H0.Z", "role")],
)
def test_bad_names_give_a_message(source: str, target: str, message: str) -> None:
    weights = two_heads(*random_bases(2, 10, 3))
    with pytest.raises(HeadspanError, match=message):
        compare_pair(weights, source, target)


def test_a_zero_weight_spans_nothing() -> None:
    with pytest.raises(HeadspanError, match=r"L0H0\.O is zero"):
        compare_pair(two_heads(np.zeros((10, 3)), np.eye(10)[:, :3]), "L0H0.O", "L0H0.K")


def test_command_line_on_attention_only_gpt2(gpt2_dir: Path) -> None:
    arguments = ["pair", str(gpt2_dir), "L4H11.O", "L5H1.K"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--top", "3"], catch_exceptions=False)
    found = json.loads(result.stdout)
    keys = {
        "source", "target", "pk", "pk_normalised", "principal_angles", "random_mean", "random_sd", "z",
        "shared_directions", "shared_threshold", "shared_level", "participation_ratio", "directions", "notes",
    }  # fmt: skip
    assert keys <= set(found)
    assert found["source"] == "L4H11.O"
    assert found["shared_level"] == SHARED_LEVEL
    assert len(found["principal_angles"]) == 64
    assert [direction["rank"] for direction in found["directions"]] == [1, 2, 3]
    report = compare_pair(headspan.open(str(gpt2_dir)), "L4H11.O", "L5H1.K")
    assert found["pk"] == pytest.approx(report.pk)
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert f"PK {report.pk:.4f}" in text
    table = CliRunner().invoke(app, [*arguments, "--csv", "--top", "3"], catch_exceptions=False).stdout
    assert table.splitlines()[0].startswith("rank,cosine,angle_degrees")
    assert len(table.splitlines()) == 4


def test_folding_changes_what_is_shared(gpt2_dir: Path) -> None:
    result = CliRunner().invoke(
        app, ["pair", str(gpt2_dir), "L4H11.O", "L5H1.K", "--fold", "--json"], catch_exceptions=False
    )
    folded = compare_pair(headspan.fold(headspan.open(str(gpt2_dir))), "L4H11.O", "L5H1.K")
    assert json.loads(result.stdout)["pk"] == pytest.approx(folded.pk)
    assert folded.pk != pytest.approx(compare_pair(headspan.open(str(gpt2_dir)), "L4H11.O", "L5H1.K").pk)


def test_a_pair_that_cannot_vary_has_no_z() -> None:
    rng = np.random.default_rng(0)
    model = {role: rng.normal(size=(2, 1, 5, 5)) for role in "QKVO"}
    report = headspan.pair(model, "L0H0.O", "L1H0.K")
    assert report.z is None and report.random_sd == 0 and report.pk == pytest.approx(report.random_mean)
    model["K"][1, 0, :, 4] = 0
    assert headspan.pair(model, "L0H0.O", "L1H0.K").z is None
    model["O"][0, 0, :, 4] = 0
    narrow = headspan.pair(model, "L0H0.O", "L1H0.K")
    assert narrow.z == pytest.approx((narrow.pk - narrow.random_mean) / narrow.random_sd)


# ------------------------------------------------------------------------------------------- heads without roles


def shared_heads() -> ArrayWeights:
    """Three layers of four query heads on two key/value heads."""
    rng = np.random.default_rng(0)
    return ArrayWeights({r: rng.standard_normal((3, 2 if r in "KV" else 4, 24, 4)) for r in "QKVO"})


DOES = {"Q": "reads (query)", "K": "reads (key)", "V": "reads (value)", "O": "writes"}


@pytest.mark.parametrize(
    ("source", "target", "rows", "columns"),
    [
        ("L0H1", "L2H3", "QKVO", "QKVO"), ("L0H1.O", "L2H3", "O", "QKVO"), ("L2KV1", "L0H1", "KV", "QKVO"),
        ("L1H0", "L1H2.Q", "QKVO", "Q"), ("L1H1", "L1H1", "QKVO", "QKVO"),
    ],
)  # fmt: skip
def test_heads_without_roles_list_all_pairings(source: str, target: str, rows: str, columns: str) -> None:
    weights = shared_heads()
    found = compare_pair(weights, source, target).rows()
    assert {row["pairing"] for row in found} == {a + b for a in rows for b in columns} and len(found) == len(
        {row["pairing"] for row in found}
    )
    one, other = source.partition(".")[0], target.partition(".")[0]
    layers = headspan.Head.parse(one).layer, headspan.Head.parse(other).layer
    for row in found:
        a, b = row["pairing"]
        exact = compare_pair(weights, f"{one}.{a}", f"{other}.{b}")
        assert (row["source_does"], row["target_does"]) == (DOES[a], DOES[b])
        assert row["pk"] == pytest.approx(exact.pk) and row["z"] == pytest.approx(exact.z)
        assert row["smallest_angle"] == pytest.approx(np.degrees(exact.principal_angles[0]))
        forward, backward = a == "O" != b and layers[0] < layers[1], b == "O" != a and layers[0] > layers[1]
        assert row["edge"] == ("forward" if forward else "backward" if backward else None)
    edges = [row["edge"] is not None for row in found]
    assert edges == sorted(edges, reverse=True)


def test_the_command_without_roles_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, ["pair", "demo", "L0H3", "L1H0"], catch_exceptions=False).stdout
    assert max(map(len, text.splitlines())) <= 80
    listed = {line.split()[0]: line for line in text.splitlines()[3:19]}
    assert len(listed) == 16
    for pairing, line in listed.items():  # a query never writes
        assert line.count("writes") == pairing.count("O") and ("(query)" in line) == ("Q" in pairing)
    rows = json.loads(
        CliRunner().invoke(app, ["pair", "demo", "L0H3", "L1H0", "--json"], catch_exceptions=False).stdout
    )
    assert rows == headspan.pair("demo", "L0H3", "L1H0").rows()
    with pytest.raises(HeadspanError, match="`k` has no effect on heads without roles"):
        headspan.pair("demo", "L0H3", "L1H0", k=3)


def test_tokens_are_those_that_each_role_reads_or_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query reads, so its tokens are of the embedding on whichever side it is."""
    monkeypatch.setenv("COLUMNS", "80")
    found = headspan.pair("demo", "L0H3.Q", "L1H0.O", k=3)
    turned = headspan.pair("demo", "L1H0.O", "L0H3.Q", k=3)
    for one, other in zip(found.directions, turned.directions, strict=True):
        signs = [{t.token for t in side} for side in (one.source_tokens or ())]
        assert signs in ([{t.token for t in side} for side in (other.target_tokens or ())][::s] for s in (1, -1))
    row = found.rows()[0]
    assert (row["source_does"], row["target_does"]) == ("reads (query)", "writes")
    text = CliRunner().invoke(app, ["pair", "demo", "L0H3.Q", "L1H0.K", "-k", "2"], catch_exceptions=False).stdout
    assert "writes" not in text and max(map(len, text.splitlines())) <= 80
    with pytest.warns(DeprecationWarning, match="is now SharedDirection.source_tokens"):
        assert found.directions[0].writes == found.directions[0].source_tokens

"""All pairs against the definitions, routes against each other, tile plans against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import definitions
import headspan as hs
from headspan.scoring.arrangement import Job
from headspan.scoring.contraction import contract, route_cost
from headspan.scoring.run import score
from headspan.subspaces.metrics import WEIGHT_METRICS, parse_metrics
from headspan.vocabulary.heads import PAIRINGS, ROLES, Pairing, Role, pair_mask

RNG = np.random.default_rng(7)


def random_model(layers: int = 3, heads: int = 4, kv: int = 4, d: int = 24, m: int = 5, m_v: int | None = None):
    m_v = m_v or m
    shapes = {"Q": (heads, m), "K": (kv, m), "V": (kv, m_v), "O": (heads, m_v)}
    rng = np.random.default_rng(layers + heads + kv + d + m + m_v)
    return hs.open({r: rng.normal(size=(layers, n, d, k)).astype(np.float32) for r, (n, k) in shapes.items()})


def head_weights(weights, role: str, head: hs.Head) -> dict[str, np.ndarray]:
    """All four weights a head takes part in; under GQA a shared head has its group's queries and outputs stacked."""
    group = weights.n_heads // weights.n_kv_heads
    own = {r: weights.read(r, head.layer).astype(np.float64) for r in "QKVO"}
    if Role(role).shared and group > 1:
        members = range(head.index * group, (head.index + 1) * group)
        return {
            "K": own["K"][head.index],
            "V": own["V"][head.index],
            "Q": [own["Q"][i] for i in members],
            "O": [own["O"][i] for i in members],
        }
    kv = head.index if Role(role).shared else head.index // group
    query = head.index
    return {"Q": own["Q"][query], "K": own["K"][kv], "V": own["V"][kv], "O": own["O"][query]}


@pytest.mark.parametrize("metric", WEIGHT_METRICS)
@pytest.mark.parametrize("pairing", [str(p) for p in PAIRINGS])
def test_every_pair_equals_the_definition(metric: str, pairing: str) -> None:
    weights = random_model()
    matrix = score(weights, metric, pairing)[metric, pairing]
    mask = pair_mask(Pairing.parse(pairing), matrix.sources, matrix.targets, "default")
    assert np.array_equal(~np.isnan(matrix.values), mask)
    for i, j, value in zip(*matrix.pairs(), strict=True):
        source = head_weights(weights, pairing[0], matrix.sources[i])
        target = head_weights(weights, pairing[1], matrix.targets[j])
        assert value == pytest.approx(definitions.similarity(metric, source, target, pairing), rel=1e-5)


@pytest.mark.parametrize("metric", ["pk", "simple_cs", "linear_cka", "procrustes"])
def test_grouped_heads_count_once(metric: str) -> None:
    weights = random_model(heads=4, kv=2)
    scores = score(weights, metric, "all")
    matrix = scores[metric, "OK"]
    assert [str(h) for h in matrix.targets[:3]] == ["L0KV0", "L0KV1", "L1KV0"]
    assert matrix.values.shape == (12, 6)
    for i, j, value in zip(*matrix.pairs(), strict=True):
        a = weights.read_head(f"{matrix.sources[i]}.O")
        b = weights.read_head(f"{matrix.targets[j]}.K")
        assert value == pytest.approx(getattr(definitions, metric)(a, b), rel=1e-5)


@pytest.mark.parametrize("pairing", ["OQ", "OK", "OV", "KK", "QK", "VO"])
def test_composition_score_stacks_the_partners_of_a_shared_head(pairing: str) -> None:
    weights = random_model(heads=4, kv=2)
    matrix = score(weights, "cs", pairing)["cs", pairing]

    def circuit(role: str, head: hs.Head) -> np.ndarray:
        parts = head_weights(weights, role, head)
        own, partner = parts[role], parts[str(Role(role).partner)]
        return own @ np.vstack(partner).T if isinstance(partner, list) else own @ partner.T

    for i, j, value in zip(*matrix.pairs(), strict=True):
        x, y = circuit(pairing[0], matrix.sources[i]), circuit(pairing[1], matrix.targets[j])
        expected = np.linalg.norm(y.T @ x) / (np.linalg.norm(x) * np.linalg.norm(y))
        assert value == pytest.approx(expected, rel=1e-5)


def test_unequal_dimensions() -> None:
    weights = random_model(m=5, m_v=3)
    matrix = score(weights, "pk", "OQ")["pk", "OQ"]
    for i, j, value in zip(*matrix.pairs(), strict=True):
        a, b = weights.read_head(f"{matrix.sources[i]}.O"), weights.read_head(f"{matrix.targets[j]}.Q")
        assert value == pytest.approx(definitions.pk(a, b), rel=1e-5)
    assert np.nanmax(matrix.values) <= 3
    cka = score(weights, "linear_cka", ["QQ", "VV"])  # each has its own size of factor
    assert np.isfinite(cka["linear_cka", "VV"].pairs()[2]).all()
    with pytest.raises(hs.HeadspanError, match="O has 3 columns and Q has 5"):
        score(weights, "procrustes", "OQ")


@pytest.mark.parametrize("pairs", ["default", "forward", "same-type", "all"])
@pytest.mark.parametrize("metric", WEIGHT_METRICS)
def test_pair_sets_hold_the_same_values(metric: str, pairs: str) -> None:
    weights = random_model()
    full = score(weights, metric, "all", "all")
    part = score(weights, metric, "all", pairs)  # type: ignore[arg-type]
    for pairing in part.pairings:
        values = part[metric, pairing].values
        mask = pair_mask(pairing, weights.heads(pairing.source), weights.heads(pairing.target), pairs)  # type: ignore[arg-type]
        assert np.array_equal(~np.isnan(values), mask)
        np.testing.assert_allclose(values[mask], full[metric, pairing].values[mask], rtol=1e-5)
    if pairs == "all":
        np.testing.assert_allclose(full[metric, "OQ"].values, full[metric, "QO"].values.T, rtol=1e-6)


def test_routes_agree_and_torch_agrees() -> None:
    weights = random_model(layers=4, heads=6, kv=6, d=40, m=8)
    base = score(weights, ["pk", "cs", "simple_cs", "linear_cka"], "all", route="gram")
    others = [
        score(weights, list(base.metrics), "all", route="direct"),
        score(weights, list(base.metrics), "all", route="gram", device="torch:cpu"),
        score(weights, list(base.metrics), "all", route="direct", device="torch:cpu"),
    ]
    assert set(base.provenance["routes"].values()) == {"gram"}
    for other in others:
        for key in base.arrays:
            np.testing.assert_allclose(other[key].values, base[key].values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_products_in_bfloat16_stay_within_their_bound(route: str) -> None:
    weights = random_model(layers=4, heads=6, kv=6, d=40, m=8)
    exact = score(weights, "pk", "flow", route=route)["pk", "OQ"].values
    rounded = score(weights, "pk", "flow", route=route, device="torch:cpu+bf16")
    error = np.abs(rounded["pk", "OQ"].values - exact)
    bound = 3 * 2.0**-9 * 8 if route == "gram" else 6.1 * 2.0**-9 * np.sqrt(exact) * 8
    assert (error <= bound)[~np.isnan(exact)].all()
    assert np.nanmax(error) > 1e-5  # else nothing was rounded
    assert rounded.provenance["products"] == "bfloat16"


@pytest.mark.parametrize("device", ["cpu+bf16", "torch:cpu+fp8", "torch:cpu+bf16+bf16", "torch:cpu+"])
def test_unknown_precisions_are_refused(device: str) -> None:
    with pytest.raises(hs.HeadspanError, match="unknown device"):
        score(random_model(), "pk", "OQ", device=device)


@pytest.mark.parametrize("device", ["meta", "torch:meta"])
def test_a_device_without_numbers_is_refused(device: str) -> None:
    with pytest.raises(hs.HeadspanError, match=r"'(torch:)?meta' cannot be used here \(.{10,120}\). Choose cpu"):
        score(random_model(), "pk", "OQ", device=device)


@pytest.mark.parametrize("grouping", ["blocks", "before", "roles"])
@pytest.mark.parametrize("layers_per_block", [1, 2, 3, 5])
def test_any_tile_plan_gives_the_same_result(
    layers_per_block: int, grouping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headspan.scoring import plan

    weights = random_model(layers=5, heads=3, kv=3)
    base = score(weights, list(WEIGHT_METRICS), "all", "all")
    monkeypatch.setattr(plan, "_even_blocks", lambda layers, largest: _cut(layers, layers_per_block))
    keys = {"blocks": plan._GROUPINGS["blocks"]} | {grouping: plan._GROUPINGS[grouping]}
    monkeypatch.setattr(plan, "_GROUPINGS", keys)
    monkeypatch.setattr(plan, "_making_cost", lambda weights, plan, metric, blocks, name: name != grouping)
    other = score(weights, list(WEIGHT_METRICS), "all", "all")
    assert other.provenance["blocks"]["pk"] == -(-5 // layers_per_block)
    assert other.provenance["groupings"]["pk"] == grouping
    for key in base.arrays:
        np.testing.assert_allclose(other[key].values, base[key].values, rtol=2e-6)
    for role in ROLES:
        assert np.array_equal(base.ranks(role), other.ranks(role))


def _cut(layers, size):
    return [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]


def test_small_memory_gives_more_tiles_and_the_same_numbers() -> None:
    weights = random_model(layers=6, heads=8, kv=8, d=512, m=64)
    base = score(weights, "pk", "flow")
    # 200 MB is the allowance for the interpreter; what is above it must do for the work.
    small = score(weights, "pk", "flow", memory=200_000_000 + 45_000_000)
    assert base.provenance["blocks"]["pk"] == 1
    assert small.provenance["blocks"]["pk"] > 1
    for pairing in ("OQ", "OK", "OV"):
        np.testing.assert_allclose(small["pk", pairing].values, base["pk", pairing].values, rtol=2e-6)
    with pytest.raises(hs.HeadspanError, match="too little memory"):
        score(weights, "pk", "flow", memory="100MB")


def test_progress_goes_up_and_reaches_all_at_the_end() -> None:
    steps: list[tuple[int, int]] = []
    score(random_model(), ["pk", "procrustes"], "all", progress=lambda done, total: steps.append((done, total)))
    shares = [done / total for done, total in steps]
    assert shares == sorted(shares) and shares[0] < 0.5
    assert shares.count(1.0) == 1 and shares[-1] == 1.0


def test_cost_model_chooses_by_the_stated_rule() -> None:
    square = np.ones((500, 500), dtype=bool)
    wide = {"a": (500, 768, 64), "b": (500, 768, 64)}  # m² > d/2: Gram
    thin = {"a": (500, 4096, 8), "b": (500, 4096, 8)}  # m² < d/2: direct
    for shapes, winner in ((wide, "gram"), (thin, "direct")):
        cost = route_cost(shapes, [Job("a", "b", square)])
        assert min(cost, key=lambda r: cost[r]) == winner
    assert cost["direct"] == 500 * 500 * 2 * 4096 * 8 * 8


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_contraction_in_little_memory(route: str) -> None:
    factors = {"a": RNG.normal(size=(5, 33, 4)), "b": RNG.normal(size=(7, 33, 6))}
    job = Job("a", "b", np.ones((5, 7), dtype=bool))
    expected = np.array([[np.linalg.norm(x.T @ y) ** 2 for y in factors["b"]] for x in factors["a"]])
    for work_bytes in (1, 1000, 10**6):
        (values,) = contract(factors, [job], route=route, work_bytes=work_bytes)  # type: ignore[arg-type]
        np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_bad_requests_are_named() -> None:
    weights = random_model()
    for arguments, words in [
        (("nonsense",), "unknown similarity"),
        (("pk", "OX"), "unknown pairing"),
        (("pk", "OK", "sideways"), "pairs.*forward.*sideways"),
        (("pk", "OK", "same-type"), "nothing to score"),
    ]:
        with pytest.raises(hs.HeadspanError, match=words):
            score(weights, *arguments)
    with pytest.raises(hs.HeadspanError, match="not an amount of memory"):
        score(weights, "pk", memory="lots")
    with pytest.raises(hs.HeadspanError, match="cannot be used here"):
        score(weights, "pk", device="cuda:99")
    assert parse_metrics("all") == WEIGHT_METRICS


# ----------------------------------------------------------------------------------------- real GPT-2 small


@pytest.fixture(scope="module")
def gpt2(gpt2_dir: Path):
    return hs.open(gpt2_dir)


@pytest.fixture(scope="module")
def gpt2_scores(gpt2):
    return score(gpt2, ["pk", "cs", "simple_cs", "linear_cka"])


def test_gpt2_known_outcomes(gpt2_scores) -> None:
    def forward(pairing: str) -> np.ndarray:
        return gpt2_scores["pk", pairing].forward().pairs()[2].astype(np.float64)

    assert len(forward("OK")) == 9504
    assert len(gpt2_scores["pk", "QQ"].pairs()[2]) == 10296
    assert round(forward("QQ").mean(), 3) == 8.467
    assert round(forward("VO").mean(), 3) == 5.664
    for pairing, quantile in {"OQ": 12.257, "OK": 10.791, "OV": 10.441}.items():
        assert round(float(np.quantile(forward(pairing), 0.97)), 3) == quantile
    assert all((gpt2_scores.ranks(role) == 64).all() for role in ROLES)
    assert gpt2_scores.provenance["routes"]["pk"] == "gram"


@pytest.mark.parametrize("metric", WEIGHT_METRICS)
def test_gpt2_sample_equals_the_definitions(gpt2, gpt2_scores, metric: str) -> None:
    """Six pairs of every pairing against d×d matrices and explicit SVDs."""
    rng = np.random.default_rng(1)
    for pairing in map(str, PAIRINGS):
        if metric == "procrustes":  # a sample of layers, because all pairs take a minute
            continue
        rows, columns, values = gpt2_scores[metric, pairing].pairs()
        for index in rng.choice(len(values), 6, replace=False):
            source = head_weights(gpt2, pairing[0], gpt2.heads(pairing[0])[rows[index]])
            target = head_weights(gpt2, pairing[1], gpt2.heads(pairing[1])[columns[index]])
            expected = definitions.similarity(metric, source, target, pairing)
            assert values[index] == pytest.approx(expected, rel=1e-5), (metric, pairing)
    if metric == "procrustes":
        two = hs.open({r: np.stack([gpt2.read(r, layer)[:4] for layer in (3, 9)]) for r in "QKVO"})
        scores = score(two, metric)
        for pairing in map(str, PAIRINGS):
            for i, j, value in zip(*scores[metric, pairing].pairs(), strict=True):
                a = two.read_head(f"{two.heads('Q')[i]}.{pairing[0]}")
                b = two.read_head(f"{two.heads('Q')[j]}.{pairing[1]}")
                if (i + j) % 5 == 0:
                    assert value == pytest.approx(definitions.procrustes(a, b), rel=1e-5)


def test_gpt2_folding_keeps_the_published_edges(gpt2, gpt2_scores) -> None:
    from headspan.change.compare import compare

    folded = score(hs.fold(gpt2), ["pk", "cs"], "flow")
    assert folded.provenance["folding"] == "folded"
    shared = {(c.metric, str(c.pairing)): c.shared_top for c in compare(gpt2_scores, folded, 20)}
    assert [shared["pk", p] for p in ("OQ", "OK", "OV")] == [19, 20, 18]
    assert [shared["cs", p] for p in ("OQ", "OK", "OV")] == [1, 4, 11]

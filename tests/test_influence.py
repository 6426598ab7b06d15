"""Influence: what it means, by brute force on the real model, and what `score` does with statistics."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, build
from headspan.models.folding import FoldedWeights
from headspan.results.observations import Statistics
from headspan.running.observe import observe
from headspan.scoring import run as scoring
from headspan.vocabulary.errors import HeadspanError, HeadspanWarning
from headspan.vocabulary.heads import Role
from notices import noticed
from observation_oracle import Oracle, exact_statistics, in_float64
from test_effects_families import CASES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = [[5, 10, 15, 20], [7, 3, 44, 3], [9, 21, 33, 8]]
EPSILON = 1e-3  # of a write: the third order of KL is below a millionth of the second


@pytest.fixture
def float64_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most models round attention to float32, in which a KL divergence of 1e-9 is lost."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None, **_: softmax(x, dim=dim))


class Exchange:
    """Runs of the model in which a port reads small changes of what a head writes, one token at a time."""

    def __init__(self, model: Any) -> None:
        self.oracle = Oracle(model, TOKENS)
        self.weights = self.oracle.weights
        self.folded = FoldedWeights(self.weights)

    def resampled(self, layer: int, head: int) -> np.ndarray:
        """z̃ − z of all pairs of sequences, in both orders, at all positions."""
        z = np.stack([self.oracle.writes(run, layer)[:, head] for run in self.oracle.runs])
        return np.concatenate([b - a for a, b in permutations(z, 2)])

    def centred(self, layer: int, head: int) -> np.ndarray:
        """mean − z over the sequences, at all positions; and its opposite, so that the third order cancels."""
        z = np.stack([self.oracle.writes(run, layer)[:, head] for run in self.oracle.runs])
        return np.concatenate([*(z.mean(0) - z), *(z - z.mean(0))])

    def divergence(self, source: tuple[int, int], role: Role, layer: int, changes: np.ndarray) -> np.ndarray:
        """KL of attention rows before and after, in nats, per port head: the mean over changes and queries.

        Every change is made at every token, so that the mean over changes and that over tokens are independent, as
        influence assumes.
        """
        (port,) = self.oracle.ports[role, layer]
        weight = self.folded.read(role, layer)
        written = EPSILON * changes @ self.folded.read(Role.O, source[0])[source[1]].T
        read = np.einsum("cd,hdm->chm", written, weight)
        heads, total = len(weight), np.zeros(())
        for ids, run in zip(TOKENS, self.oracle.runs, strict=True):
            scale = self.oracle.scale(run, role, layer, port)
            moved = np.zeros((len(ids), len(changes), len(ids), run[port.module].shape[-1]))
            for token in range(len(ids)):
                moved[token, :, token][:, port.rows] = read * scale[token]
            moved = moved.reshape(-1, *moved.shape[2:])
            before, after = (self.attention(ids, layer, port.module, m) for m in (0 * moved[:1], moved))
            total = total + (np.where(before > 0, before * np.log(before / after), 0.0)).sum((0, 2, 3))
        queries = sum(map(len, TOKENS)) * len(changes)
        return total.reshape(heads, -1).mean(1) / queries

    def attention(self, ids: list[int], layer: int, module: Any, moved: np.ndarray) -> np.ndarray:
        """Attention (changes, heads, T, T), with what a sink takes as one more key."""
        seen: list[Any] = []
        handles = [
            module.register_forward_hook(lambda m, args, out: out + torch.from_numpy(moved)),
            self.oracle.attention(layer).register_forward_hook(lambda m, args, out: seen.append(out[-1])),
        ]
        with torch.no_grad():
            self.oracle.model(torch.tensor([ids] * len(moved)), output_attentions=True, use_cache=False)
        for handle in handles:
            handle.remove()
        pattern = seen[0].numpy()
        rest = 1 - pattern.sum(-1, keepdims=True)
        return np.concatenate([pattern, np.where(rest > 1e-3, rest, 0.0)], -1) + 1e-300


@pytest.mark.filterwarnings("ignore::headspan.HeadspanWarning")  # what the families are like
@pytest.mark.usefixtures("float64_softmax")
@pytest.mark.parametrize("name", ["gpt2", "stablelm-qk-norm", "gemma2-capped", "gpt_oss"])
def test_influence_squared_is_the_kl_of_resampling(name: str) -> None:
    """To second order: influence² when a write is resampled, ½·influence² when it is replaced by its mean."""
    model = in_float64(CASES[name])
    scores = hs.score(model, "influence", "OQ,OK", stats=exact_statistics(model, TOKENS))
    runs, n = Exchange(model), len(TOKENS)
    for role in (Role.Q, Role.K):
        span = runs.weights.ports.span(role, 1)
        for head in range(runs.weights.n_heads):
            influence = scores["influence", f"O{role}"].values[head, span].astype(float)
            kl = runs.divergence((0, head), role, 1, runs.resampled(0, head)) / EPSILON**2
            np.testing.assert_allclose(kl, influence**2, rtol=1e-5)
            kl = runs.divergence((0, head), role, 1, runs.centred(0, head)) / EPSILON**2
            # The mean of the same n sequences is nearer to each of them than their true mean by (n − 1)/n.
            np.testing.assert_allclose(kl, influence**2 / 2 * (n - 1) / n, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::headspan.HeadspanWarning")  # what the families are like
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2-capped"])
def test_influence_on_values_is_a_share_of_their_variance(name: str) -> None:
    model = in_float64(CASES[name])
    scores = hs.score(model, "influence", "OV", stats=exact_statistics(model, TOKENS))
    runs = Exchange(model)
    values = runs.oracle.values(1)
    variance = np.square(values - values.mean(0)).sum(-1).mean(0)
    (port,) = runs.oracle.ports[Role.V, 1]
    scale = np.concatenate([runs.oracle.scale(run, Role.V, 1, port) for run in runs.oracle.runs])
    for head in range(runs.weights.n_heads):
        written = runs.resampled(0, head) @ runs.folded.read(Role.O, 0)[head].T
        change = np.einsum("cd,hdm,t->cthm", written, runs.folded.read(Role.V, 1), scale)
        share = np.square(change).sum(-1).mean((0, 1)) / 2 / variance  # a difference has twice the variance
        ours = scores["influence", "OV"].values[head, runs.weights.ports.span(Role.V, 1)]
        np.testing.assert_allclose(ours.astype(float) ** 2, share, rtol=1e-5)


# -- score ---------------------------------------------------------------------------------------------------


def times(stats: Statistics, name: str, factor: float) -> Statistics:
    """The same with one array multiplied."""
    arrays = stats.arrays | {name: (stats.arrays[name] * np.float32(factor))}
    return Statistics(stats.ports, arrays, stats.counts, stats.inputs, stats.model, stats.protocol)


def test_other_pairings_are_left_out_with_the_reason(llama_folder: Path, llama_stats: Statistics) -> None:
    with noticed() as said:
        scores = hs.score(llama_folder, "pk,influence", "all", stats=llama_stats)
    assert {str(p) for m, p in scores.arrays if m == "influence"} == {"OQ", "OK", "OV"}
    assert len([p for m, p in scores.arrays if m == "pk"]) == 16
    (sentence,) = [s for s in said if s.startswith("influence is left out for ")]
    assert "QQ" in sentence and "OO" in sentence and "OQ" not in sentence and ": " in sentence
    with pytest.raises(HeadspanError, match=r"not defined for QK: .* OQ, OK, OV"):
        hs.score(llama_folder, "influence", "QK", stats=llama_stats)
    with pytest.raises(HeadspanError, match="influence is not defined for QK"):
        hs.score(llama_folder, "pk,influence", "QK", stats=llama_stats)


def test_statistics_and_influence_need_each_other(llama_folder: Path, llama_stats: Statistics) -> None:
    with pytest.raises(HeadspanError, match=r"influence needs statistics of a run.*hs\.observe"):
        hs.score(llama_folder, "pk,influence", "OK")
    with pytest.raises(HeadspanError, match="pk, cs use no statistics"):
        hs.score(llama_folder, "pk,cs", "OK", stats=llama_stats)
    assert "influence" not in hs.score(llama_folder, "all", "OK").metrics
    assert "influence" in hs.score(llama_folder, "all", "OK", stats=llama_stats).metrics


def test_statistics_of_another_model_are_refused(llama_folder: Path, llama_stats: Statistics) -> None:
    with pytest.raises(HeadspanError, match="the statistics are not those of"):
        hs.score(build(FAMILIES["gpt2"]), "influence", "OK", stats=llama_stats)
    with pytest.raises(HeadspanError, match="different models"):
        hs.score(build(FAMILIES["llama"], seed=1), "influence", "OK", stats=llama_stats)


def test_a_model_with_other_norms_is_reported(llama_stats: Statistics) -> None:
    other = build(FAMILIES["llama"])
    with torch.no_grad():
        other.model.layers[1].input_layernorm.weight.mul_(2)
    with pytest.warns(HeadspanWarning, match="norms differ"):
        hs.score(other, "influence", "OK", stats=llama_stats)
    with pytest.warns(HeadspanWarning, match="norms differ"):
        Statistics.merge(llama_stats, observe(other, tokens=[[1, 2, 3], [3, 2, 1]]))


def test_pk_is_the_same_beside_influence(llama_folder: Path, llama_stats: Statistics) -> None:
    alone, beside = (
        hs.score(llama_folder, "pk,cs", "flow"),
        hs.score(llama_folder, "pk,cs,influence", "flow", stats=llama_stats),
    )
    for key in alone.arrays:
        np.testing.assert_array_equal(alone[key].values, beside[key].values)


def test_influence_is_of_folded_weights_in_either_case(llama_folder: Path, llama_stats: Statistics) -> None:
    model = hs.open(llama_folder)
    first, second = (hs.score(w, "influence", "flow", stats=llama_stats) for w in (model, hs.fold(model)))
    for key in first.arrays:
        np.testing.assert_array_equal(first[key].values, second[key].values)


@pytest.mark.parametrize("options", [{"route": "gram"}, {"route": "direct"}, {"device": "torch:cpu"}])
def test_every_way_of_computing_gives_the_same(
    llama_folder: Path, llama_stats: Statistics, options: dict[str, Any]
) -> None:
    first, second = (hs.score(llama_folder, "influence", "flow", stats=llama_stats, **o) for o in ({}, options))
    for key in first.arrays:
        np.testing.assert_allclose(first[key].values, second[key].values, rtol=1e-5)


def test_influence_grows_with_both_ends(llama_folder: Path, llama_stats: Statistics, tmp_path: Path) -> None:
    llama_stats.save(place := tmp_path / "s.safetensors")
    plain = hs.score(llama_folder, "influence", "flow", stats=str(place))
    for name, factor, pairings in (
        ("spread/O", 2.0, ("OQ", "OK", "OV")),
        ("fisher/Q", 2.0, ("OQ",)),
        ("fisher/K", 2.0, ("OK",)),
        ("variance/V", 0.5, ("OV",)),
        ("scale/V", 2.0, ("OV",)),
        ("scale/Q", 2.0, ()),  # the Fisher information includes it
        ("length/O", 2.0, ()),
    ):
        changed = hs.score(
            llama_folder, "influence", "flow", stats=times(llama_stats, name, 4.0 if factor == 2.0 else 0.25)
        )
        for pairing in ("OQ", "OK", "OV"):
            by = (4.0 if name == "scale/V" else 2.0) if pairing in pairings else 1.0
            np.testing.assert_allclose(
                changed["influence", pairing].values, by * plain["influence", pairing].values, rtol=1e-5
            )


def test_ports_without_any_spread_have_no_influence(llama_folder: Path, llama_stats: Statistics) -> None:
    for name, pairings in (("spread/O", "OQ OK OV"), ("fisher/Q", "OQ"), ("variance/V", "OV")):
        scores = hs.score(llama_folder, "influence", "flow", stats=times(llama_stats, name, 0.0))
        for pairing in pairings.split():
            values = scores["influence", pairing].values
            assert np.nanmax(values) == 0 and np.isfinite(values).any()


def test_tiles_of_other_statistics_are_not_mixed(
    llama_folder: Path, llama_stats: Statistics, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops when its tiles are done, and another one to the same file."""
    out, computed = tmp_path / "r.safetensors", []
    compute = scoring.compute_tile

    def watched(*args: Any, **kwargs: Any) -> Any:
        computed.append(args[2].name)
        return compute(*args, **kwargs)

    def scored(given: Statistics, **options: Any) -> Any:
        computed.clear()
        return hs.score(llama_folder, ["pk", "influence"], "flow", stats=given, force=True, **options)

    def stop(assembly: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "compute_tile", watched)
    with monkeypatch.context() as patch:
        patch.setattr(scoring.Assembly, "scores", stop)
        with pytest.raises(KeyboardInterrupt):
            scored(llama_stats, out=out)
    done = list(computed)
    assert len(list(cache.rglob("*.safetensors"))) == len(done) == 2
    for given, left in ((times(llama_stats, "spread/O", 4.0), done), (llama_stats, [])):
        found = scored(given, out=out)
        assert computed == left
        fresh = scored(given)
        for key in fresh.arrays:
            np.testing.assert_array_equal(found[key].values, fresh[key].values)
    assert not list(cache.rglob("*.safetensors"))


def test_a_result_tells_its_statistics(llama_folder: Path, llama_stats: Statistics, tmp_path: Path) -> None:
    hs.score(llama_folder, "pk,influence", "flow", stats=llama_stats, out=tmp_path / "r.safetensors")
    found = hs.load(tmp_path / "r.safetensors").provenance["statistics"]
    assert found["inputs"] == llama_stats.inputs and found["hash"] == llama_stats.about["hash"]
    assert times(llama_stats, "scale/V", 2).about["hash"] != llama_stats.about["hash"]


def test_a_cluster_gives_the_same_numbers(llama_folder: Path, llama_stats: Statistics) -> None:
    pytest.importorskip("distributed")
    first, second = (
        hs.score(llama_folder, "pk,influence", "flow", stats=llama_stats, dask=dask) for dask in (None, "local")
    )
    for key in first.arrays:
        np.testing.assert_array_equal(first[key].values, second[key].values)

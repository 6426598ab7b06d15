"""Effects on the page: its numbers are those of the result, and the demo model comes with its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.demo_measurements import with_shipped
from headspan.explorer.encode import Limits
from headspan.explorer.report import report
from headspan.results.effects import Effects, attach, effects_in, effects_of
from headspan.results.large_effects import FLOORS
from headspan.results.scores import Scores
from headspan.vocabulary.heads import FLOW_PAIRINGS, Role, forward_mask
from report_models import array_model, payload_edges, synthetic_scores, unpack

SHIPPED = Path(hs.__file__).parent / "data" / "demo-effects.safetensors"


def with_random_effects(scores: Scores, seed: int = 3) -> Scores:
    """A result with effects drawn at random, some of them not measured."""
    rng = np.random.default_rng(seed)
    arrays: dict[Any, np.ndarray] = {}
    for pairing in FLOW_PAIRINGS:
        sources, targets = scores.heads(Role.O), scores.heads(pairing.target)
        values = np.where(forward_mask(sources, targets), rng.random((len(sources), len(targets))), np.nan)
        values[0, -1] = np.nan
        arrays["random", pairing] = values.astype(np.float32)
        turned = np.where(values >= FLOORS[pairing.target], rng.random(values.shape), np.nan)
        arrays["random_turned", pairing] = turned.astype(np.float32)
    heads = len(scores.heads(Role.O))
    attach(scores, Effects(scores.ports, arrays, {}, np.ones(heads), {"ablate": "zero", "floors": {}}))
    return scores


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_effects_of_kept_edges_are_those_of_the_result(kv_heads: int) -> None:
    weights = array_model(kv_heads=kv_heads)
    scores = with_random_effects(hs.score(weights))
    payload, measured = report(scores, weights).payload, effects_of(scores)
    assert payload["effects"]["materials"] == ["random"]
    for metric, pairing in scores.arrays:
        raw = payload["edges"][f"{metric}/{pairing}"]
        assert ("effect" in raw) == (pairing in FLOW_PAIRINGS)
        if pairing not in FLOW_PAIRINGS:
            continue
        pairs = list(payload_edges(payload, metric, str(pairing)))
        matrix, percentiles, large = measured.matrix(pairing), measured.percentiles(pairing), measured.large(pairing)
        places = tuple(np.array([(matrix.sources.index(hs.Head.parse(a)), matrix.targets.index(hs.Head.parse(b)))
                                 for a, b in pairs]).T)  # fmt: skip
        np.testing.assert_array_equal(unpack(raw["effect"], "f4"), matrix.values[places])
        np.testing.assert_array_equal(unpack(raw["percentile"], "f4"), percentiles[places].astype(np.float32))
        np.testing.assert_array_equal(unpack(raw["large"], "f4") > 0, large[places])
        np.testing.assert_array_equal(np.isnan(unpack(raw["large"], "f4")), ~measured.judged(pairing)[places])
        np.testing.assert_array_equal(unpack(raw["ratio"], "f4"), measured.ratio(pairing)[places].astype(np.float32))
        kept = payload["matrices"][f"effect/{pairing}"]
        present = ~np.isnan(matrix.values)
        assert kept["encoding"] == "f4"
        np.testing.assert_array_equal(unpack(kept["data"], "f4"), matrix.values[present])


def test_edges_of_large_effect_are_kept_however_weak_their_overlap() -> None:
    scores = with_random_effects(synthetic_scores(8, 12))
    payload, measured = report(scores).payload, effects_of(scores)
    assert Limits.of(scores).overall < payload["edges"]["pk/OK"]["forward"]
    for pairing in FLOW_PAIRINGS:
        matrix = measured.matrix(pairing)
        large = {(str(matrix.sources[i]), str(matrix.targets[j])) for i, j in np.argwhere(measured.large(pairing))}
        assert large and large <= set(payload_edges(payload, "pk", str(pairing)))


def test_a_result_without_effects_has_none_on_its_page() -> None:
    payload = report(hs.score(array_model())).payload
    assert payload["effects"] is None
    assert not any("effect" in raw for raw in payload["edges"].values())
    assert not any(key.startswith("effect/") for key in payload["matrices"])


# ---------------------------------------------------------------- the demo model


def test_the_demo_comes_confirmed() -> None:
    payload = report(hs.score("demo", "pk", "flow")).payload
    assert payload["default_pairings"] == ["OK"] and payload["default_k"] == 20
    assert payload["effects"]["materials"] == ["random", "text"]
    labels = payload["labels"]["heads"]
    assert labels["L0H3"] == ["previous_token"] and labels["L1H0"] == ["induction"]
    raw = payload["edges"]["pk/OK"]
    large = dict(zip(payload_edges(payload, "pk", "OK"), unpack(raw["large"], "f4") > 0, strict=True))
    assert all(large["L0H3", f"L1H{i}"] for i in range(8)), "the induction circuit"
    assert all(list(large.values())[:20]), "the strongest edges, as README says"
    assert payload["effects"]["large"] == {"OQ": 19, "OK": 28, "OV": 23}
    assert payload["effects"]["tokens"] == {"random": 336, "text": 1095}
    assert payload["effects"]["floors"] == {"OQ": 0.05, "OK": 0.05, "OV": 0.1}
    assert payload["effects"]["units"]["OV"] == "relative norm"


def test_shipped_effects_are_those_of_the_model() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    measured, shipped = hs.effects("demo"), effects_of(Scores.load(SHIPPED))
    assert set(measured.arrays) == set(shipped.arrays) and measured.protocol == shipped.protocol
    for key, values in measured.arrays.items():
        np.testing.assert_allclose(shipped.arrays[key], values, atol=1e-4)
    for kind, values in measured.clean.items():
        np.testing.assert_allclose(shipped.clean[kind], values, atol=1e-4)
    np.testing.assert_allclose(shipped.write_norms, measured.write_norms, rtol=1e-4)
    assert shipped.examples is not None and measured.examples is not None
    first, best = shipped.examples.edges[0], [edge[:3] for edge in measured.examples.edges]
    assert shipped.examples.tokens == measured.examples.tokens and first[:3] in best
    for kept, again in zip(*(e.rows(*first[:3]) for e in (shipped.examples, measured.examples)), strict=True):
        np.testing.assert_allclose(kept, again, atol=2e-3)


def test_shipped_effects_are_of_the_shipped_weights() -> None:
    assert Scores.load(SHIPPED).provenance["fingerprint"] == hs.open("demo").fingerprint()


def test_only_the_demo_model_gets_them() -> None:
    scores = hs.score("demo", "pk", "flow")
    other = replace(scores, provenance={**scores.provenance, "fingerprint": "2:other"})
    renamed = replace(scores, provenance={**scores.provenance, "reference": "else"})
    for result in (other, renamed):
        assert with_shipped(result) is result
        assert report(result).payload["effects"] is None and report(result).payload["labels"] is None
    assert effects_in(scores) is None, "the result itself is left as it was"
    own = with_random_effects(hs.score("demo", "pk", "flow"))
    own.annotations["behaviour"] = {"induction": {"L1H2": 0.75}}
    kept = with_shipped(own)
    assert effects_of(kept).materials == ("random",) and kept.annotations["behaviour"] == own.annotations["behaviour"]
    assert json.loads(json.dumps(report(own, labels=None).payload["behaviour"])) == {"induction": {"L1H2": 0.75}}

"""Effects of real models: SmolLM2 with all its edges, Gemma-3 and its beginning-of-sequence token, encoders refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from conftest import unavailable
from families import FAMILIES, build
from headspan.running.effects import effects
from headspan.running.opening import running
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_all_edges_of_smollm2(smollm2_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(smollm2_gguf) as model:
        assert capfd.readouterr().err == ""  # no bar of transformers
        found = effects(model, random=True, sequences=2, length=10, memory="300MB")
        behaviour = hs.behaviour(model, sequences=4, length=20)
    edges = {str(p): int((~np.isnan(found.of(p))).sum()) for p in found.pairings}
    assert edges == {"OQ": 35235, "OK": 11745, "OV": 11745}
    counts = {str(p): int(found.large(p).sum()) for p in found.pairings}
    assert all(10 < counts[name] < edges[name] / 50 for name in edges), counts
    # Who feeds the keys of the strongest induction head? A previous-token head, among others.
    head = hs.Head.parse(behaviour.top("induction", 1)[0][0])
    into = found.of("OK")[:, found.ports.find(head, "K")]
    best = [str(found.ports.query[i]) for i in np.argsort(-np.nan_to_num(into))[:5]]
    previous = [name for name, _ in behaviour.top("previous_token", 10)]
    assert set(best) & set(previous)


@pytest.fixture
def gemma3_gguf() -> str:
    path = os.environ.get("HEADSPAN_GEMMA3_GGUF")
    if not path or not Path(path).exists():
        unavailable("HEADSPAN_GEMMA3_GGUF does not name the Gemma-3-270m GGUF file")
    return str(path)


def test_gemma_folds_both_of_its_gains_and_no_strong_edge_stays(gemma3_gguf: str) -> None:
    weights = hs.open(gemma3_gguf)
    folded = hs.fold(weights)
    assert "on the attention output" in folded.folded_norms and "before attention" in folded.folded_norms
    raw, both = (hs.score(w, ["pk"], "flow") for w in (weights, folded))
    for pairing in ("OQ", "OK", "OV"):
        before, after = ({(e.source, e.target) for e in scores["pk", pairing].top(20)} for scores in (raw, both))
        assert not before & after
    assert both.provenance["folded_norms"] == folded.folded_norms


def test_gemma_begins_with_its_token(gemma3_gguf: str) -> None:
    """Without it seven heads seem to attend to the previous token, with it two."""
    counts = {}
    with running(gemma3_gguf) as model:
        assert model.start_token("auto") == 2 and model.start_token("no") is None
        for bos in ("no", "auto"):
            scores = hs.behaviour(model, sequences=4, length=50, bos=bos)
            counts[bos] = sum(value > 0.4 for value in scores["previous_token"].values())
    assert counts == {"no": 7, "auto": 2}


def test_a_real_encoder_is_refused_by_name(minilm_dir: Path) -> None:
    with pytest.raises(HeadspanError, match=r"\(bert\): its blocks normalise the stream itself"):
        effects(minilm_dir)


def test_half_precision_is_run_in_float32() -> None:
    model = build(FAMILIES["llama"]).bfloat16()
    tokens = [[5, 10, 15, 20, 25], [7, 3, 44, 3, 12]]
    found, exact = effects(model, tokens=tokens), effects(build(FAMILIES["llama"]).bfloat16().float(), tokens=tokens)
    for pairing in found.pairings:
        np.testing.assert_allclose(found.of(pairing), exact.of(pairing), atol=1e-6)
    assert model.dtype == torch.bfloat16

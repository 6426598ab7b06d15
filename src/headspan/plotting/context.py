"""The inputs of figures: scores, and weights, labels and head scores if available."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headspan.graphs.graph import Wiring
from headspan.graphs.selection import wiring
from headspan.results.scores import Scores
from headspan.statistics.dimension import usual_dimension
from headspan.subspaces.metrics import DEFAULT_METRICS, metric_of
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, NODE_PAIRINGS, PAIRINGS, Head, Pairing, Role

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights
    from headspan.results.head_scores import BehaviourScores
    from headspan.results.labels import Labels
    from headspan.running.behaviour import AttentionPatterns

SENTENCE = "When Mary and John went to the store, John gave a drink to Mary. Then Mary and John went home."


@dataclass
class Context:
    """Inputs of the figures. Slow parts are computed once, when a figure first needs them.

    ``weights`` are those that ``scores`` came from. ``text`` is the sentence for attention patterns, and ``model`` is
    the model to run on it (by default the weights' own reference). ``run`` also allows running it for head scores,
    which takes longer. ``notes`` collects what was left out of the figures and why.
    """

    scores: Scores
    weights: AttentionWeights | None = None
    labels: Labels | None = None
    k: int = 20
    text: str = SENTENCE
    model: Any = None
    run: bool = False
    progress: Update = lambda done, total: None
    notes: list[str] = field(default_factory=list)

    @property
    def flow(self) -> tuple[Pairing, ...]:
        """The scored pairings among OQ, OK and OV."""
        present = tuple(pairing for pairing in FLOW_PAIRINGS if pairing in self.scores.pairings)
        if not present:
            raise HeadspanError("it needs OQ, OK or OV, and this result has none of them")
        return present

    @property
    def metrics(self) -> tuple[str, ...]:
        """The similarities that figures compare: PK and CS, or whatever was scored."""
        if not self.scores.metrics:
            raise HeadspanError("this result has no scores. Make one with `hs.score(model)`")
        return tuple(m for m in DEFAULT_METRICS if m in self.scores.metrics) or self.scores.metrics[:2]

    def metrics_of_weights(self, figure: str, why: str) -> tuple[str, ...]:
        """Those of ``metrics`` that need weights alone; ``why`` says why the figure cannot show influence."""
        found = tuple(metric for metric in self.metrics if not metric_of(metric).observed)
        others = " and ".join(metric for metric in self.metrics if metric not in found)
        if not found:
            raise HeadspanError(f"{why}. Score pk or cs as well")
        if others:
            self.notes.append(f"{figure} is drawn without {others}: {why}")
        return found

    def need_forward_pairs(self) -> None:
        alone = self.scores.ports.one_layer
        if alone and not self.scores.ports.nodes:
            raise HeadspanError(alone)

    def need_metrics(self, *metrics: str) -> None:
        missing = [metric for metric in metrics if metric not in self.scores.metrics]
        if missing:
            raise HeadspanError(f"it needs {' and '.join(missing)} scores, which this result lacks")

    def need_all_pairings(self) -> None:
        missing = [str(pairing) for pairing in PAIRINGS if pairing not in self.scores.pairings]
        if missing:
            raise HeadspanError(f"it needs all 16 pairings, and this result lacks {', '.join(missing)}")

    def need_weights(self) -> AttentionWeights:
        if self.weights is None:
            raise HeadspanError("the weights are needed. Give the model itself, or the result and `model`")
        return self.weights

    def wiring(self, metric: str, k: int | None = None, scores: Scores | None = None) -> Wiring:
        """The paper's wiring: the k best edges of OQ, OK and OV, and of the pairings of nodes if there are any."""
        scores = self.scores if scores is None else scores
        nodes = [pairing for pairing in NODE_PAIRINGS if (metric, pairing) in scores]
        return wiring(scores, [*self.flow, *nodes], metric, self.k if k is None else k, labels=self.labels)

    @property
    def compared_with_folded(self) -> tuple[str, ...]:
        """The similarities that folding may change."""
        why = "it compares original with folded weights, and influence always uses folded ones"
        return self.metrics_of_weights("the effect of folding", why)

    @cached_property
    def folded_scores(self) -> Scores:
        """PK and CS of the folded weights, for all sixteen pairings."""
        from headspan.models.folding import fold
        from headspan.scoring.run import score

        metrics = self.compared_with_folded
        weights = self.need_weights()
        if weights.folding != "none":
            raise HeadspanError("it compares original with folded weights, and these are folded already")
        if not weights.foldable:
            raise HeadspanError(f"the norms of this model cannot be folded in: {weights.not_foldable_reason}")
        return score(fold(weights), metrics, "all", progress=self.progress)

    @cached_property
    def behaviour(self) -> BehaviourScores:
        """Head scores stored in the result, or measured now if allowed."""
        from headspan.results.head_scores import BehaviourScores
        from headspan.running.behaviour import behaviour

        kept = self.scores.annotations.get("behaviour")
        if kept:
            return BehaviourScores.from_dict(kept)
        if self.run:
            return behaviour(self._running, progress=self.progress)
        raise HeadspanError(
            "this result has no head scores. Measure them with `hs.behaviour(model)`, or add `run=True`"
        )

    @cached_property
    def patterns(self) -> AttentionPatterns:
        """Attention of every head on the sentence; an error if the model cannot be run."""
        from headspan.running.behaviour import attention_patterns

        return attention_patterns(self._running, self.text)

    @property
    def _running(self) -> Any:
        return self.model if self.model is not None else self.need_weights().reference

    @cached_property
    def tokens(self) -> dict[Head, list[str]]:
        """The ten tokens nearest to what each head writes; empty if the model has no unembedding."""
        from headspan.reading.tokens import all_tokens

        try:
            found = all_tokens(self.need_weights(), [Role.O], k=10, progress=self.progress)
        except HeadspanError as reason:
            self.notes.append(f"grids are drawn without tokens: {reason}")
            return {}
        return {entry.head: [token.token for token in entry.tokens] for entry in found}

    def dimensions(self) -> tuple[int, int]:
        """The ambient dimension of the heads' outputs, and their most common subspace dimension."""
        ranks = self.scores.ranks(Role.O).tolist()
        return usual_dimension(self.scores, Pairing(Role.O, Role.O)), max(set(ranks), key=ranks.count)

"""Which heads could carry the links of an attribution graph from one transcoder feature to another.

A feature writes its decoder vector w into the stream, and a later one reads the stream with its encoder vector e. A
head between them turns w into W_O W_V w where it attends from one token to the other, so it contributes e·W_O W_V·w
times its attention and the activation, which are both positive. ``strength`` is this number for unit vectors, over its
root mean square for random directions through the same head, ‖W_O W_V‖_F / d. Its sign is that of the contribution.

``reads`` is the fraction of w inside what the head's values read, and ``writes`` that of e inside what its output
writes. Random directions are easily exceeded, since features and heads share the directions that a model uses. So
``p_kind`` is the fraction of pairs of other features of the same two transcoders with at least this strength, whatever
its sign, in the same head.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headspan.models.opening import ModelLike
from headspan.models.weights import AttentionWeights
from headspan.node_kinds.saes import Features
from headspan.node_kinds.transcoders import INPUT_HOOK, transcoder
from headspan.reading.attribution_graph import FeatureLink, read_attribution_graph
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import given_weights
from headspan.statistics.dimension import dimension_between
from headspan.subspaces.bases import orthonormal_bases
from headspan.system.arguments import checked
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError, visible
from headspan.vocabulary.heads import Head, Role, attention_position

COLUMNS = ("link", "source", "target", "weight", "route", "direct", "rank", "head", "strength", "reads", "writes",
           "p_kind")  # fmt: skip
_SAMPLE = 64  # other features of each transcoder for p_kind
ATTENTION, EITHER = "attention", "either"


class Carrier(NamedTuple):
    """A head that could carry a link; strength is signed."""

    head: str
    strength: float
    reads: float
    writes: float
    p_kind: float


class Carried(NamedTuple):
    """A link, its direct part (the cosine of both vectors; None between tokens), and its heads, strongest first."""

    source: str
    target: str
    weight: float
    route: str
    direct: float | None
    heads: int
    carriers: list[Carrier]


@dataclass(frozen=True, repr=False, eq=False)
class Links(Tabular):
    """The links of a graph with the heads that could carry them."""

    graph: str
    model: str
    between: int  # links between features in the graph
    left_out: int  # links with another end
    links: list[Carried]

    def rows(self) -> list[dict[str, Any]]:
        """One record per link and head, strongest link and head first."""
        return [
            {"link": i, "source": link.source, "target": link.target, "weight": link.weight, "route": link.route,
             "direct": link.direct, "rank": rank, **carrier._asdict()}
            for i, link in enumerate(self.links, start=1)
            for rank, carrier in enumerate(link.carriers, start=1)
        ]  # fmt: skip

    def remarks(self) -> list[str]:
        """What the numbers leave open."""
        found = ["A head carries a link only where it attends from the later token to the earlier one."]
        if any(link.route == EITHER for link in self.links):
            found.append(
                "Links within one token can also be direct: see the column direct, the cosine of both vectors."
            )
        if self.left_out:
            found.append(f"{self.left_out:,} links with embeddings, errors or logits were left out.")
        return found

    def _headline(self) -> str:
        return f"heads that could carry {len(self.links)} of {self.between:,} links of {visible(self.graph)[:60]}"


@checked
def links(
    model: ModelLike,
    graph: str | os.PathLike[str],
    transcoders: str,
    k: int = 3,
    *,
    strongest: int = 10,
    from_: str | None = None,
    to: str | None = None,
    hook: str = INPUT_HOOK,
    fold: bool = False,
    seed: int = 0,
    progress: Update | None = None,
) -> Links:
    """The heads that could carry the links between features of an attribution graph.

    Parameters
    ----------
    graph
        JSON of circuit-tracer or Neuronpedia.
    transcoders
        The path of the graph's transcoders with ``{}`` for the layer, such as ``relu/layer_{}.safetensors``: files with
        W_enc and W_dec, or directories of SAELens.
    k, strongest
        Heads per link, and the number of links, those with the largest weights.
    from_, to
        Only links from or to a feature: ``L3F17``, ``L3F17@5`` at the token 5, or the id of its node.
    hook
        What the encoders of files read, a hook of TransformerLens; it matters if norms are folded.
    """
    if k < 1 or strongest < 1:
        raise HeadspanError(f"k and strongest must be 1 or more, not {k} and {strongest}")
    if seed < 0:
        raise HeadspanError(f"seed must be a whole number of 0 or more, not {seed}")
    weights = given_weights(model, fold)
    content = read_attribution_graph(graph)
    wanted = [link for link in content.links if _named(link, from_, to)][:strongest]
    if not wanted:
        said = " ".join(f"{word} {name[:60]}" for word, name in (("from", from_), ("to", to)) if name)
        seen = f"none of the {len(content.links):,} links between features is {said}" if said else "it has none"
        raise HeadspanError(f"no links between features of transcoders in {content.name or 'this graph'!r}: {seen}")
    layers = {end.layer for link in wanted for end in (link.source, link.target)}
    if max(layers) >= weights.n_layers:
        raise HeadspanError(
            f"the graph has features of layer {max(layers)}, but {weights.reference} has {weights.n_layers} layers. "
            "Give the model of the graph"
        )
    features = {layer: transcoder(weights, transcoders, layer, hook) for layer in sorted(layers)}
    search = _Search(weights, features, wanted, np.random.default_rng(seed))
    for done, layer in enumerate(weights.layers):
        search.visit(layer)
        if progress is not None:
            progress(done + 1, len(weights.layers))
    return Links(content.name, content.model, len(content.links), content.left_out, search.found(k))


def _named(link: FeatureLink, source: str | None, target: str | None) -> bool:
    return (source is None or link.source.named(source)) and (target is None or link.target.named(target))


class _Search:
    """Vectors of the links and of other features, compared with one layer of heads at a time."""

    def __init__(
        self, weights: AttentionWeights, features: dict[int, Features], wanted: list[FeatureLink],
        rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self._weights, self._features, self._links = weights, features, wanted
        self._writes = [self._vectors(link.source.layer, Role.W, [link.source.feature])[0] for link in wanted]
        self._reads = [self._vectors(link.target.layer, Role.R, [link.target.feature])[0] for link in wanted]
        self._others = {
            (end.layer, role): self._sample(end.layer, role, rng)
            for role in (Role.W, Role.R)
            for end in sorted({link.source if role is Role.W else link.target for link in wanted})
        }
        self._carriers: list[list[Carrier]] = [[] for _ in wanted]
        self._stacks: dict[tuple[Role, int], tuple[np.ndarray, np.ndarray]] = {}

    def _vectors(self, layer: int, role: Role, ids: Iterable[int]) -> np.ndarray:
        """Unit vectors, (n, d); zero for a feature without a direction."""
        features, numbers = self._features[layer], np.array(list(ids), dtype=np.int64)
        if role not in features.places:
            raise HeadspanError(f"{features.label} does not {'write' if role is Role.W else 'read'} the stream")
        if numbers.max(initial=0) >= features.population:
            raise HeadspanError(
                f"the graph has the feature {numbers.max()} of layer {layer}, but {features.label} has "
                f"{features.population:,}. Give the transcoders of the graph"
            )
        found = features.members(role, numbers)[:, :, 0].astype(np.float64)
        norms = np.linalg.norm(found, axis=1, keepdims=True)
        return found / np.where(norms > 0, norms, 1)

    def _sample(self, layer: int, role: Role, rng: np.random.Generator) -> np.ndarray:
        count = self._features[layer].population
        return self._vectors(layer, role, np.sort(rng.choice(count, size=min(_SAMPLE, count), replace=False)))

    def visit(self, layer: int) -> None:
        """Compare the heads of a layer with every link that spans it."""
        here = [i for i, link in enumerate(self._links) if self._spans(link, layer)]
        if not here:
            return
        table, self._stacks = self._weights.ports, {}
        for head in self._weights.heads_in(Role.O, layer):
            own, value = (self._port(role, table.resolve(head, role)) for role in (Role.O, Role.V))
            carrier = _Head(own, value, self._weights.d_model)
            for i in here:
                self._carriers[i].append(self._carrier(str(head), carrier, i))

    def _port(self, role: Role, head: Head) -> _Port:
        """One weight, from the stack of its layer, which is read once."""
        weights = self._weights
        if (role, head.layer) not in self._stacks:
            stack = np.asarray(weights.read(role, head.layer), dtype=np.float64)
            bases, _ = orthonormal_bases(stack, weights.storage_dtype(role, head.layer))
            self._stacks[role, head.layer] = stack, bases
        place, span = weights.ports.find(head, role), weights.ports.span(role, head.layer)
        stack, bases = self._stacks[role, head.layer]
        number = place - span.start
        return _Port(stack[number], bases[number], bool(weights.centred_ports(role)[place]))

    def _carrier(self, name: str, head: _Head, i: int) -> Carrier:
        link, decoder, encoder = self._links[i], self._writes[i], self._reads[i]
        source, target = (link.source.layer, Role.W), (link.target.layer, Role.R)
        decoder_centred, encoder_centred = (role in self._features[at].centred_roles for at, role in (source, target))
        unit = head.unit(decoder_centred, encoder_centred)
        strength = float(head.through(encoder[None], decoder[None])[0, 0]) / unit
        others = np.abs(head.through(self._others[target], self._others[source])) / unit
        reads, writes = (
            float(np.square(vector @ port.basis).sum())
            for vector, port in ((decoder, head.value), (encoder, head.output))
        )
        return Carrier(name, strength, reads, writes, float((others >= abs(strength)).mean()))

    def _spans(self, link: FeatureLink, layer: int) -> bool:
        """Whether the attention of a layer comes after the source and before the target."""
        source = self._features[link.source.layer].places[Role.W].position
        target = self._features[link.target.layer].places[Role.R].position
        return source < attention_position(layer) < target

    def found(self, k: int) -> list[Carried]:
        result: list[Carried] = []
        for i, (link, carriers) in enumerate(zip(self._links, self._carriers, strict=True)):
            same = link.source.position == link.target.position
            direct = float(self._reads[i] @ self._writes[i]) if same else None
            best = sorted(carriers, key=lambda carrier: -abs(carrier.strength))[:k]
            route = EITHER if same else ATTENTION
            result.append(Carried(str(link.source), str(link.target), link.weight, route, direct, len(carriers), best))
        return result


class _Port(NamedTuple):
    """A weight (d, m), an orthonormal basis of its span, and whether its columns have mean 0."""

    weight: np.ndarray
    basis: np.ndarray
    centred: bool


class _Head:
    """The map W_O W_V of one head."""

    def __init__(self, output: _Port, value: _Port, d: int) -> None:
        self.output, self.value, self._d = output, value, d
        squares = (output.weight.T @ output.weight) * (value.weight.T @ value.weight)
        self._norm = float(np.sqrt(max(squares.sum(), 0.0)))

    def through(self, reads: np.ndarray, writes: np.ndarray) -> np.ndarray:
        """e·W_O W_V·w of every pair of rows, (n, n')."""
        return (reads @ self.output.weight) @ (writes @ self.value.weight).T

    def unit(self, decoder_centred: bool, encoder_centred: bool) -> float:
        """The root mean square of `through` for random unit vectors."""
        before = dimension_between(self._d, decoder_centred, self.value.centred)
        after = dimension_between(self._d, self.output.centred, encoder_centred)
        return self._norm / float(np.sqrt(before * after)) or 1.0

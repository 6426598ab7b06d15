"""Examples of edges: attention on one short sequence before and after the source's output is patched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.results.effects import Effects
from headspan.results.scores import Scores
from headspan.results.tasks.edge_table import EdgeTable
from headspan.results.tasks.examples import LONGEST, MOST_TOKENS, PER_PAIRING, Examples, Watched, flat
from headspan.running.edge_effects import EdgeReader
from headspan.running.effect_sums import squared_lengths
from headspan.running.opening import RunningModel
from headspan.running.port_inputs import Receiver
from headspan.running.replay import Replayer
from headspan.running.samples import Sample, random_material
from headspan.running.tasks.pairs import Prompt
from headspan.subspaces.metrics import PK
from headspan.vocabulary.errors import visible
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Pairing, Role

if TYPE_CHECKING:
    import torch

TOKENS = 32  # of the sequence, besides the start token
REPEATED = 12  # tokens of a random sequence, which is repeated twice
SEQUENCES = 8  # over which a mean is taken, where outputs are replaced by their mean

_LEAST = 1e-30  # squared length of an output: a head may write nothing

Edge = tuple[Pairing, Any, Any]  # its heads are never nodes


def best_edges(measured: Effects, scores: Scores | None = None, count: int = PER_PAIRING) -> list[Edge]:
    """The edges of each pairing to show: those with a large effect first, of these the best ``count`` PK edges of a
    result, then by effect."""
    found: list[Edge] = []
    for pairing in measured.pairings:
        matrix = measured.matrix(pairing)
        strong = np.zeros(matrix.values.shape, dtype=bool)
        if scores is not None and (PK, pairing) in scores:
            for edge in scores[PK, pairing].forward().top(count):
                strong[matrix.find(edge.source, edge.target)] = True
        rows, columns = np.nonzero(~np.isnan(matrix.values))
        at = (-matrix.values[rows, columns], ~strong[rows, columns], ~measured.large(pairing)[rows, columns])
        for place in np.lexsort(at)[:count]:
            found.append((pairing, matrix.sources[int(rows[place])], matrix.targets[int(columns[place])]))
    return found


def examples_of(
    model: RunningModel,
    reader: EdgeReader,
    materials: Mapping[str, Sequence[Sample]],
    measured: Effects,
    scores: Scores | None,
    seed: int,
) -> Examples:
    """Examples of the best measured edges on the beginning of the text, or of what else the model was run on."""
    about = next(name for name in ("text", "tokens", "random") if name in materials)
    start = measured.protocol["bos"]
    samples = list(materials[about])
    if about == "random":  # shorter ones, whose second half fits on a page
        length = min(REPEATED, (len(samples[0].ids) - (start is not None)) // 2)
        samples = random_material(model, start, len(samples), length, seed, [])
    first, others = samples[0], samples[1:]
    chosen = {
        "mean": samples[:SEQUENCES],
        "zero": [first],
        "resample": [first, *(one for one in others if len(one.ids) >= len(first.ids))][:2],
    }[reader.ablate]
    most = TOKENS + (start is not None)
    reader.record([Sample(sample.ids[:most], {}, {}) for sample in chosen])
    tokens = token_texts(model, first.ids[:most])
    return watched(reader, best_edges(measured, scores), tokens, about)


def examples_of_task(
    model: RunningModel, replayer: Replayer, table: EdgeTable, attribution: np.ndarray, prompt: Prompt, name: str
) -> Examples | None:
    """Examples of the edges between heads with the largest attributions on one prompt of a task.

    What the source wrote on the corrupted prompt replaces its output. None for a prompt that no page has room for.
    """
    if not 2 <= len(prompt.clean) <= MOST_TOKENS:
        return None
    found: dict[Pairing, list[Edge]] = {}
    for place in table.strongest(attribution, table.n_edges):
        row, column = divmod(int(place), len(table.readers))
        if not table.between_heads[row, column]:
            continue
        source, target = table.writers[row], table.readers[column]
        pairing = Pairing(source.role, target.role)
        if len(mine := found.setdefault(pairing, [])) < PER_PAIRING:
            mine.append((pairing, source.head, target.head))
    reader = EdgeReader(replayer)
    reader.record([Sample(np.array(ids), {}, {}) for ids in (prompt.clean, prompt.corrupted)])
    edges = [edge for pairing in FLOW_PAIRINGS for edge in found.get(pairing, ())]
    return watched(reader, edges, token_texts(model, prompt.clean), name[:LONGEST])


def token_texts(model: RunningModel, ids: Iterable[int]) -> list[str]:
    """The text of every token, with its spaces; control characters are escaped. The id where there is no tokenizer."""
    known = model.vocabulary
    texts = [f"<id {int(i)}>" if known is None else known.text(int(i)) for i in ids]
    return [text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…" for text in map(visible, texts)]


def watched(reader: EdgeReader, edges: Iterable[Edge], tokens: list[str], about: str) -> Examples:
    """What some edges do on the first sequence that a reader has recorded."""
    import torch

    replayer, table, record = reader.replayer, reader.weights.ports, reader.records[0]
    ordered = sorted(edges, key=lambda edge: edge[0].target is Role.V)
    shown: list[Watched] = []
    before: dict[Head, np.ndarray] = {}
    after: list[np.ndarray] = []
    change: list[np.ndarray] = []
    with torch.inference_mode():
        clean = {layer: replayer.replay(layer, record[layer]) for layer in {target.layer for _, _, target in ordered}}
        for pairing, source, target in ordered:
            pattern, z = clean[target.layer]
            other, moved = _patched(reader, pairing, source, target)
            heads = reader.weights.heads_in(Role.O, target.layer)
            group = [heads.index(head) for head in table.group_of(target)]
            if pairing.target is Role.V:
                each = _relative(reader, target.layer, z, moved)
                place = group[int(each[1][group].argmax())]
                change.append(each[0][:, place].float().cpu().numpy())
            else:
                apart = (other - pattern)[0].abs().sum((-2, -1))
                place = group[int(apart[group].argmax())]
                before[heads[place]] = pattern[0, place].float().cpu().numpy()
                after.append(other[0, place].float().cpu().numpy())
            shown.append(Watched(pairing, source, target, heads[place]))
    n = len(tokens)
    patterns = [np.array(part).reshape(-1, n, n) for part in (list(before.values()), after)]
    causal = not any(np.triu(part, 1).any() for part in patterns)
    kept = [flat(part, causal=causal).astype(np.float16) for part in patterns]
    return Examples(tokens, about, shown, kept[0], kept[1], np.array(change, np.float32).reshape(-1, n))


def _patched(reader: EdgeReader, pairing: Pairing, source: Head, target: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and z of the target's layer in the first sequence, with one edge patched."""
    replayer, layer, record = reader.replayer, target.layer, reader.records[0][target.layer]
    receiver = Receiver(pairing.target, "KR" if target.kind == "KR" else "H")
    place = reader.weights.heads_in(Role.O, source.layer).index(source)
    delta = replayer.written(source.layer, reader.exchanged(0, source.layer), np.array([place]))
    port = replayer.project(layer, receiver, record, reader.reads(layer, record, delta))
    return replayer.replay(layer, record, receiver, port)


def _relative(
    reader: EdgeReader, layer: int, z: torch.Tensor, moved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative change of every head's output: of each token (T, heads), and of all of them (heads,)."""
    scale, grams = reader.records[0][layer].scale, reader.replayer.output_grams(layer)
    apart, size = (
        squared_lengths(one[0] if scale is None else one[0] * scale[:, :, None], grams) for one in (moved - z, z)
    )
    return (apart / size.clamp_min(_LEAST)).sqrt(), (apart.sum(0) / size.sum(0).clamp_min(_LEAST)).sqrt()

// Definitions of terms: shown when a term is hovered or focused, and as a list near the end of the page.
"use strict";
HS.words = {
  "residual stream": "The vector that every token carries through the model. Each head reads from it and adds to it; "
    + "later heads read what earlier heads have added.",
  "head": "One attention head, written L4H7: layer 4, head 7. It attends from one token to others (queries and keys) "
    + "and copies information from there (values and output).",
  "layer": "All heads at the same position of the stream. Only later layers can read what a layer writes.",
  "subspace": "The directions of the residual stream that a weight can read or write: a small part of all its "
    + "dimensions.",
  "Q, K, V, O": "The four weights of a head. Q (query) and K (key) determine where it attends, V (value) what it "
    + "takes from there, O (output) what it writes into the stream.",
  "pairing": "Which weights are compared, with the source's letter first: OK compares what one head writes (O) with "
    + "what the keys (K) of a later head read.",
  "principal angle": "Two subspaces are compared direction by direction: the first principal angle is the smallest "
    + "angle between a direction of one and a direction of the other, the second is the smallest among the remaining "
    + "directions, and so on. 0° means a shared direction, 90° nothing in common.",
  "Projection Kernel": "PK: the sum of cos² over the principal angles, which counts how many dimensions two subspaces "
    + "share. It ranges from 0 to the dimension of the smaller subspace and does not depend on the size of the "
    + "weights.",
  "similarity": "A number for how closely two weights are related. Projection Kernel compares what they span; "
    + "Composition Score, Simple-CS, Linear CKA and Procrustes also weigh by size.",
  "influence": "How much of what a head writes, on some input, shows in what a later head reads. Its square is the "
    + "expected KL divergence of the attention pattern in nats (OQ, OK) or a share of the value's variance (OV). It "
    + "needs a run of the model, and is about the text of that run.",
  "chance": "What random weights would score. Two random subspaces of dimensions m and m' in a space of dimension d "
    + "have a mean Projection Kernel of m·m'/d.",
  "z": "How far a score is from chance, in standard deviations of random subspaces.",
  "q": "The expected share of false discoveries among all pairs that score at least as much: q ≤ 0.05 means about one "
    + "in twenty. Pairs are compared with random subspaces, with reversed pairs (the impossible direction, from a "
    + "later head to an earlier one), or within the same two layers, after the effects common to the layers, the "
    + "source and the target are removed.",
  "rank": "Position by score among all pairs of the pairing; 1 is the largest. Equal scores share a rank.",
  "evidence": "An edge is drawn in colour if it scores above the reversed pairs (q ≤ 0.05), has a large effect, or "
    + "has at least three times the influence expected without interaction. These are different questions and may "
    + "disagree. An edge without any of them is thin and grey: its score may be large, but pairs that cannot be "
    + "connected score as much.",
  "edge": "A pair of heads drawn as a line: what the first writes lies largely in what the second reads. It shows "
    + "that information could flow, not that it does.",
  "effect": "Measured by running the model: how much the reading head changes when the source's output is patched as "
    + "seen by one of its Q, K or V inputs. For queries and keys, the total variation (TV, 0 to 1) of its attention; "
    + "for values, the norm of the change in its output relative to the norm of that output.",
  "large effect": "An effect that reaches a fixed floor and clearly exceeds the effect of an output of the same "
    + "length in a random direction, on the same input. Marked by a filled dot whose area is proportional to the "
    + "effect. A hollow dot: the effect was measured and is not large. No dot: it was not measured.",
  "hub": "A head that many others prefer: its outlet adds up the scores of the targets whose best source it is, its "
    + "inlet those of the sources whose best target it is. The corrected z compares that sum with random choice.",
  "KV head": "Keys and values that a group of query heads shares, written L17KV1. It is drawn in one frame with the "
    + "query heads of its layer. Query heads of later layers that use it too are linked to it.",
  "head score": "How much a head attends in one way on random sequences repeated twice: to the current token "
    + "(identity), the one before it (previous token), an earlier copy of it (duplicate token), or the token after "
    + "that copy (induction).",
  "circuit": "Edges that belong together, collected by pinning them one by one.",
  "path": "A chain of edges: what the first head writes passes through the heads in between to the last. Its score is "
    + "computed from the whole composed map; it is not a product of edge scores.",
  "drift": "How far a weight's subspace has moved between two models: 0 for the same span, 1 for orthogonal spans.",
};
HS.glossary = (() => {
  const columns = {
    z: "z", "q, reversed": "q", "q, within": "q", Rank: "rank", Effect: "effect", Percentile: "effect", Unit: "effect",
    "Large effect": "large effect", Evidence: "evidence", Ratio: "large effect", Pairing: "pairing",
    PK: "Projection Kernel", CS: "similarity", "Corrected z": "hub", Sum: "hub", Similarity: "similarity",
  };
  const term = (word, text = word) => HS.el("button", { type: "button", class: "term", "data-term": word, text });
  const start = () => {
    HS.byId("glossary-list").append(...Object.entries(HS.words).flatMap(([word, meaning]) =>
      [HS.el("dt", { text: word }), HS.el("dd", { text: meaning })]));
    const wordOf = (event) => event.target.closest?.("[data-term]");
    const show = (event) => {
      const node = wordOf(event);
      if (!node) return;
      const box = node.getBoundingClientRect();
      HS.tip(HS.words[node.dataset.term] ?? "", { clientX: box.left, clientY: box.bottom - 8 });
    };
    const hide = (event) => { if (wordOf(event)) HS.tip("", event); };
    for (const name of ["mouseover", "focusin", "click"]) document.addEventListener(name, show);
    for (const name of ["mouseout", "focusout"]) document.addEventListener(name, hide);
  };
  return { start, term, columns };
})();

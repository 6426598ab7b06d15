// What the words mean: shown where a word is pointed at or focused, and as a list near the end of the page.
"use strict";
HS.words = {
  "residual stream": "The vector that every token carries through the model. Each head reads from it and adds to it; later heads read what earlier heads have added.",
  "head": "One attention head, written L4H7: layer 4, head 7. It attends from one token to others (queries and keys) and copies information from there (values and output).",
  "layer": "All heads at the same position of the stream. What a layer writes can only be read by later layers.",
  "subspace": "The directions of the residual stream that a weight can read or write: a small part of all its dimensions.",
  "Q, K, V, O": "The four weights of a head. Q (query) and K (key) determine where it attends, V (value) what it takes from there, O (output) what it writes into the stream.",
  "pairing": "Which weights are compared, the source's letter first: OK is what one head writes (O) with what the keys (K) of a later head read.",
  "principal angle": "Two subspaces are compared direction by direction: the first principal angle is the smallest between a direction of one and a direction of the other, the second the smallest that is left, and so on. 0° is a shared direction, 90° nothing in common.",
  "Projection Kernel": "PK: the sum of cos² over the principal angles, which counts how many dimensions two subspaces share. It goes from 0 to the smaller number of dimensions, and does not depend on how large the weights are.",
  "similarity": "A number for how closely two weights are related. Projection Kernel compares what they span; Composition Score, Simple-CS, Linear CKA and Procrustes also weigh by size.",
  "chance": "What random weights would score. Two random subspaces of m and m' dimensions among d have a Projection Kernel of m·m'/d on average.",
  "z": "How far a score is from chance, in standard deviations of random subspaces.",
  "q": "The share of false discoveries to expect among all pairs that score at least as much: q ≤ 0.05 means about one in twenty. Against random subspaces, or against the pairs in the impossible direction (a later head writing for an earlier one), or within: among the heads of the same two layers, once what the layers, the source and the target have in common with others is taken away.",
  "rank": "1 for the largest score among all pairs of the pairing.",
  "edge": "A pair of heads drawn as a line: what the first writes lies largely in what the second reads. It shows that information could flow, not that it does.",
  "effect": "Measured by running the model: how much the reading head changes when the source's output is patched as seen by one of its Q, K or V inputs. For queries and keys the total variation (TV, 0 to 1) of its attention, for values the length (norm) of the change of its output relative to that output.",
  "large effect": "An effect that is at least a floor in its own unit, and clearly more than that of an output of the same length in a random direction on the same input. Marked by a dot. Below the floor an effect is small on this input.",
  "hub": "A head that many others prefer: its outlet adds up the scores of the targets whose best source it is, its inlet those of the sources whose best target it is. The corrected z is the distance of that sum from random choice.",
  "KV head": "Keys and values that a group of query heads shares, written L17KV1. It is drawn with the query heads of its layer in one frame; where later layers use it too, theirs are linked to it.",
  "head score": "How much a head attends in one way on random sequences repeated twice: to the token itself (identity), the one before (previous token), the same one earlier (duplicate token), or the one after that (induction).",
  "circuit": "Edges that belong together, collected by pinning them one after the other.",
  "path": "A chain of edges: what the first head writes goes through the heads in between to the last. Its score is that of the whole composed map, not a product.",
  "drift": "How far a weight's subspace has moved between two models: 0 for the same span, 1 for orthogonal ones.",
};
HS.glossary = (() => {
  const columns = { z: "z", "q, reversed": "q", "q, within": "q", Rank: "rank", Effect: "effect", Percentile: "effect", Unit: "effect", "Large effect": "large effect", Ratio: "large effect", Pairing: "pairing", PK: "Projection Kernel", CS: "similarity", "Corrected z": "hub", Sum: "hub", Similarity: "similarity" };
  const term = (word, text = word) => HS.el("button", { type: "button", class: "term", "data-term": word, text });
  const start = () => {
    HS.byId("glossary-list").append(...Object.entries(HS.words).flatMap(([word, meaning]) => [HS.el("dt", { text: word }), HS.el("dd", { text: meaning })]));
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

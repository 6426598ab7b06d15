// Where scores lie between chance and the largest possible, for whole matrices, and the common colour scale of heat
// maps.
"use strict";
// Why a model with one layer has no edges; empty for all others.
HS.noPairs = () => (HS.data.model.layers.length > 1 || HS.data.nodes.length ? ""
  : "This model has one attention layer. No head can read what another one writes, so there are no edges, hubs or "
    + "scores of OQ, OK and OV.");

// The classes of a head in words.
HS.classWord = (label) => HS.data.labels.words[label] ?? label;
HS.classWords = (name) => HS.model.labels(name).map(HS.classWord).join(", ");

HS.chance = (() => {
  const data = HS.data;
  const known = new Map();
  const once = (key, make) => {
    if (!known.has(key)) known.set(key, make());
    return known.get(key);
  };

  // The start of the scale: three standard deviations above random weights; for influence, a multiple of the level
  // without interaction.
  const levels = (key, pairing, row, column) => {
    const { chance, start, most } = HS.model.limits(key, pairing, row, column), { least } = HS.model.metric(key);
    return { chance, start: least ? least * chance : start, most };
  };

  // Whether all pairs of a pairing have the same levels.
  const uniform = (key, pairing) => once(`uniform ${key}/${pairing}`, () => {
    const same = (values) => !Array.isArray(values) || values.every((v) => v === values[0]);
    return !HS.model.metric(key).sizes
      && [...pairing].every((role) => same(data.ranks[role]) && same(data.centred[role]));
  });
  const shared = (key, pairing) =>
    (uniform(key, pairing) ? once(`level ${key}/${pairing}`, () => levels(key, pairing, 0, 0)) : null);

  const place = (value, { start, most }) => (most > start ? (value - start) / (most - start) : 0);

  // The place of one pair on the scale from chance (0) to the largest possible score (1); negative below chance.
  const above = (edge) => {
    const row = HS.model.place(edge.pairing[0], edge.source), column = HS.model.place(edge.pairing[1], edge.target);
    return place(edge.score, shared(edge.metric, edge.pairing) ?? levels(edge.metric, edge.pairing, row, column));
  };

  // The places of all pairs of a matrix, how many lie above the start, and how far the scale has to reach.
  const matrix = (key, pairing) => once(`matrix ${key}/${pairing}`, () => {
    const m = HS.model.matrix(key, pairing);
    if (!m) return null;
    const level = shared(key, pairing) ?? (m.layers ? widest(key, pairing) : null);
    const of = (i) => level ?? levels(key, pairing, Math.floor(i / m.columns), i % m.columns);
    const values = m.values.map((v, i) => (Number.isNaN(v) ? v : place(v, of(i))));
    const sorted = values.filter((v) => !Number.isNaN(v)).sort();
    const first = level ?? levels(key, pairing, 0, m.columns - 1);
    return {
      values, level, count: sorted.length, over: sorted.filter((v) => v > 0).length,
      high: sorted.length ? sorted[Math.floor(0.997 * (sorted.length - 1))] : 0,
      least: first.chance === null ? 0 : place(first.start + FAR * (first.start - first.chance), first),
    };
  });
  // A scale of noise alone would show noise as structure, so it reaches at least ten standard deviations above chance.
  const FAR = 7 / 3;
  const widest = (key, pairing) => {
    const [row, column] = [...pairing].map((role) => data.ranks[role].indexOf(Math.max(...data.ranks[role])));
    return levels(key, pairing, row, column);
  };

  // The end of the common scale: a few very large scores would darken all others, so it is a 99.7 % point.
  const end = (key) => once(`end ${key}`, () => {
    const found = data.pairings.map((pairing) => matrix(key, pairing)).filter((m) => m?.count);
    return Math.max(0, ...found.map((m) => Math.max(m.high, m.least)));
  });
  // A place on the scale as a score, where all pairs of the pairing have the same levels.
  const score = (position, { start, most }) => start + position * (most - start);
  const name = (key) => { const { least } = HS.model.metric(key);
    return least ? `${least} × expected` : "chance + 3 sd"; };

  return { above, matrix, end, score, shared, name };
})();

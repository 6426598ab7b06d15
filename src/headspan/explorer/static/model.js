// The data of the page, decoded when first asked for.
"use strict";
HS.data = JSON.parse(HS.byId("payload").textContent);

HS.model = (() => {
  const data = HS.data;
  const SUPPORTED = 1;
  if (data.schema > SUPPORTED) throw new Error(`this page cannot read data of schema ${data.schema}`);
  const shared = data.model.shared;
  const listOf = { Q: data.heads.query, O: data.heads.query, K: data.heads.kv, V: data.heads.kv };
  const places = new Map([[data.heads.query, index(data.heads.query)], [data.heads.kv, index(data.heads.kv)]]);
  const decoded = new Map();

  function index(names) { return new Map(names.map((name, i) => [name, i])); }
  const once = (key, make) => {
    if (!decoded.has(key)) decoded.set(key, make());
    return decoded.get(key);
  };

  const heads = (role) => listOf[role];
  const place = (role, name) => places.get(listOf[role]).get(name) ?? -1;
  const parts = (name) => { const m = /^L(\d+)(H|KV)(\d+)$/.exec(name); return { layer: +m[1], kv: m[2] === "KV", index: +m[3] }; };
  const layer = (name) => parts(name).layer;
  const metric = (key) => data.metrics.find((m) => m.key === key) ?? { key, title: key, max: 1 };
  const labels = (name) => (data.labels && data.labels.heads[name]) || [];

  // Roles that a node of the diagram has: under GQA a query head has Q and O, a shared head K and V.
  const rolesOf = (name) => (!shared ? ["Q", "K", "V", "O"] : parts(name).kv ? ["K", "V"] : ["Q", "O"]);
  const exists = (name) => places.get(data.heads.query).has(name) || places.get(data.heads.kv).has(name);
  const allHeads = shared ? [...data.heads.query, ...data.heads.kv] : data.heads.query;

  // ------------------------------------------------------------- edges
  const optional = (text) => (text ? HS.decode(text, Float32Array) : null);
  const whole = (text, count) => HS.decode(text, [Uint8Array, Uint16Array, Uint32Array].find((type) => count <= 256 ** type.BYTES_PER_ELEMENT));
  const arrays = (metricKey, pairing) => once(`edges ${metricKey}/${pairing}`, () => {
    const raw = data.edges[`${metricKey}/${pairing}`];
    if (!raw) return null;
    return {
      count: raw.count, forward: raw.forward,
      source: whole(raw.source, listOf[pairing[0]].length), target: whole(raw.target, listOf[pairing[1]].length),
      rank: whole(raw.rank, raw.count + 1), score: HS.decode(raw.score, Float32Array),
      z: optional(raw.z), random: optional(raw.q_random), reversed: optional(raw.q_reversed),
      effect: optional(raw.effect), percentile: optional(raw.percentile), used: optional(raw.used),
    };
  });

  const edgeAt = (metricKey, pairing, a, i) => ({
    metric: metricKey, pairing, score: a.score[i], rank: a.rank[i], z: a.z ? a.z[i] : null,
    q: { random: a.random ? a.random[i] : null, reversed: a.reversed ? a.reversed[i] : null },
    source: listOf[pairing[0]][a.source[i]], target: listOf[pairing[1]][a.target[i]], ...measuredAt(a, i),
  });

  // Effects stand beside an edge where they were measured: null for an edge that was not.
  const measuredAt = (a, i) => (a.effect && !Number.isNaN(a.effect[i])
    ? { effect: a.effect[i], percentile: a.percentile[i], used: a.used[i] > 0 } : { effect: null, percentile: null, used: null });

  const findEdge = (metricKey, pairing, row, column) => {
    const a = arrays(metricKey, pairing);
    if (!a) return null;
    for (let i = 0; i < a.rank.length; i++) if (a.source[i] === row && a.target[i] === column) return edgeAt(metricKey, pairing, a, i);
    return null;
  };

  // A head's best partners: kept edges in which it is the source ("out") or the target ("in"), best first.
  const partners = (name, metricKey, pairing, direction, limit) => {
    const a = arrays(metricKey, pairing);
    const wanted = place(direction === "out" ? pairing[0] : pairing[1], name);
    if (!a || wanted < 0) return [];
    const ends = direction === "out" ? a.source : a.target;
    const found = [];
    for (let i = 0; i < ends.length && found.length < limit; i++) if (ends[i] === wanted) found.push(edgeAt(metricKey, pairing, a, i));
    return found;
  };

  // ------------------------------------------------------------- edge rules (forward pairs only)
  const chooseIn = (metricKey, pairing, view) => {
    const a = arrays(metricKey, pairing);
    if (!a) return { edges: [], complete: true };
    const perTarget = new Map();
    const layersOut = once(`layers ${pairing[0]}`, () => Int32Array.from(listOf[pairing[0]], layer));
    const layersIn = once(`layers ${pairing[1]}`, () => Int32Array.from(listOf[pairing[1]], layer));
    const edges = [];
    let passed = 0, seen = 0;
    for (let i = 0; i < a.rank.length; i++) {
      if (layersOut[a.source[i]] >= layersIn[a.target[i]] || a.score[i] < view.min) continue;
      if (view.rule === "significance" && !(a[view.null] && a[view.null][i] <= view.q)) continue;
      if (view.rule === "top" && seen >= view.k) break;
      seen += 1;
      if (view.rule === "top-per-target") {
        const taken = perTarget.get(a.target[i]) ?? 0;
        if (taken >= view.k) continue;
        perTarget.set(a.target[i], taken + 1);
      }
      if (view.used && !(a.used && a.used[i])) continue; // of the chosen edges, those that are used
      passed += 1;
      if (view.rule === "significance" || view.rule === "threshold") if (passed > data.limits.overall) continue;
      edges.push(edgeAt(metricKey, pairing, a, i));
    }
    return { edges, complete: passed <= data.limits.overall || view.rule.startsWith("top") };
  };

  const choose = (view) => {
    const chosen = view.pairings.map((pairing) => ({ pairing, ...chooseIn(view.metric, pairing, view) }));
    return { edges: chosen.flatMap((c) => c.edges), cut: chosen.filter((c) => !c.complete).map((c) => c.pairing) };
  };

  // ------------------------------------------------------------- matrices
  const matrix = (metricKey, pairing) => once(`matrix ${metricKey}/${pairing}`, () => {
    const raw = data.matrices[`${metricKey}/${pairing}`];
    if (!raw) return null;
    if (raw.pairs === "layers") {
      const n = data.model.layers.length;
      return { layers: true, rows: n, columns: n, step: 0, values: HS.decode(raw.data, Float32Array) };
    }
    const rows = listOf[pairing[0]].length, columns = listOf[pairing[1]].length;
    const type = { f4: Float32Array, u2: Uint16Array, u1: Uint8Array }[raw.encoding];
    const stored = HS.decode(raw.data, type);
    const step = raw.encoding === "f4" ? 0 : (raw.high - raw.low) / (raw.encoding === "u2" ? 65535 : 255);
    const values = new Float32Array(rows * columns).fill(NaN);
    const present = presence(raw, pairing, rows, columns);
    let next = 0;
    for (let i = 0; i < values.length; i++) {
      if (present(i)) { values[i] = step ? raw.low + step * stored[next] : stored[next]; next += 1; }
    }
    return { layers: false, rows, columns, step, values };
  });

  const presence = (raw, pairing, rows, columns) => {
    if (raw.pairs === "bits") {
      const bits = HS.decode(raw.bits, Uint8Array);
      return (i) => (bits[i >> 3] >> (i & 7)) & 1;
    }
    if (raw.pairs === "same-type") return (i) => Math.floor(i / columns) < i % columns;
    const out = listOf[pairing[0]].map(layer), into = listOf[pairing[1]].map(layer);
    return (i) => out[Math.floor(i / columns)] < into[i % columns];
  };

  // The best number the page has for a pair: exact for a kept edge or a small model, else to within `step` / 2.
  const value = (metricKey, pairing, row, column) => {
    const edge = findEdge(metricKey, pairing, row, column);
    if (edge) return { score: edge.score, rank: edge.rank, z: edge.z, q: edge.q, exact: true };
    const m = matrix(metricKey, pairing);
    if (!m || m.layers) return { score: NaN, exact: false };
    return { score: m.values[row * m.columns + column], exact: m.step === 0 };
  };

  const hub = (metricKey, pairing, kind) => once(`hub ${metricKey}/${pairing}/${kind}`, () => {
    const raw = data.hubs[`${metricKey}/${pairing}`];
    if (!raw || !raw[kind]) return null;
    const values = HS.decode(raw[kind], Float32Array);
    const names = listOf[kind.startsWith("outlet") ? pairing[0] : pairing[1]];
    // Heads that nobody could choose have no value: they come last.
    const height = (i) => (Number.isNaN(values[i]) ? -Infinity : values[i]);
    const order = [...values.keys()].sort((x, y) => (height(y) > height(x)) - (height(y) < height(x)) || x - y);
    const ranks = new Uint32Array(values.length);
    order.forEach((i, position) => { ranks[i] = position + 1; });
    return { names, values, ranks, order };
  });

  return { shared, heads, place, parts, layer, metric, labels, rolesOf, exists, allHeads, arrays, findEdge, partners, choose, matrix, value, hub };
})();

// The data of the page, decoded on first use.
"use strict";
HS.data = JSON.parse(HS.byId("payload").textContent);

HS.model = (() => {
  const data = HS.data;
  const SUPPORTED = 1;
  if (data.schema > SUPPORTED) throw new Error(`this page cannot read data of schema ${data.schema}`);
  const shared = data.model.shared;
  // A direction that is written at the start of the stream and read at its end appears twice in the diagram.
  const READ = " (read)";
  const written = new Map(), twice = new Set();
  for (const node of data.nodes) {
    if (written.has(node.name) && written.get(node.name) !== node.position) twice.add(node.name);
    written.set(node.name, Math.min(node.position, written.get(node.name) ?? Infinity));
  }
  const own = (name) => name.replace(READ, "");
  const listOf = { ...data.ports, ...(data.ports.R
    ? { R: data.ports.R.map((name) => (twice.has(name) ? name + READ : name)) } : {}) };
  const places = new Map(Object.entries(listOf).map(([role, names]) => [role, index(names)]));
  const known = new Set(Object.values(listOf).flat());
  const others = new Map(data.nodes.map((node) => [twice.has(node.name) && node.position !== written.get(node.name)
    ? node.name + READ : node.name, node]));
  const decoded = new Map();

  function once_(make) { let made; return () => (made ??= make()); }
  function index(names) { return new Map(names.map((name, i) => [name, i])); }
  const once = (key, make) => {
    if (!decoded.has(key)) decoded.set(key, make());
    return decoded.get(key);
  };

  const heads = (role) => listOf[role] ?? [];
  const place = (role, name) => places.get(role)?.get(name) ?? -1;
  // Resolve a name: heads by its form, other nodes from the list.
  const about = (name) => {
    const node = others.get(name), m = node ? null : /^L(\d+)(H|KV|KR)(\d*)$/.exec(name);
    return node ? { ...node, index: null } : { name, kind: m[2], layer: +m[1], position: 2 * m[1], index: +m[3] };
  };
  const parts = (name) => {
    const { layer, kind, index: i } = about(name);
    return { layer, kv: kind === "KV" || kind === "KR", index: i };
  };
  const layer = (name) => about(name).layer;
  const position = (name) => about(name).position;
  const columnName = (at, room = 99) =>
    (at < 0 ? "Embed" : at > 2 ** 30 ? "Unembed" : at % 2 ? (room < 70 ? `M${(at - 1) / 2}` : `MLP ${(at - 1) / 2}`)
    : `L${at / 2}`);
  const boxLabel = (name, room) => {
    const { index: i, kind } = about(name);
    if (i === null) {
      const letters = Math.max(1, Math.floor((room - 14) / 6.6));
      return own(name).length * 6.6 > room - 8 ? `${name.slice(0, letters)}…` : own(name);
    }
    return room >= 50 ? name : kind === "H" ? `${i}` : `${kind.toLowerCase()}${i}`;
  };
  const metric = (key) => data.metrics.find((m) => m.key === key) ?? { key, title: key, max: 1 };
  const labels = (name) => (data.labels && data.labels.heads[name]) || [];

  // The roles of a node in the diagram: under GQA a query head has Q and O, a shared head K and V.
  const rolesOf = (name) => Object.keys(listOf).filter((role) => place(role, name) >= 0);
  const exists = (name) => known.has(name);
  const allHeads = [...new Set(["O", "Q", "V", "K"].flatMap((role) => heads(role)))];
  const nodeNames = [...others.keys()];

  // A query head and its key/value head belong together.
  const kvOf = (name) => data.served_by[name] ?? name;
  const group = once_(() => {
    const found = new Map();
    for (const [q, kv] of Object.entries(data.served_by)) {
      if (!found.has(kv)) found.set(kv, []);
      found.get(kv).push(q);
    }
    return found;
  });
  const kin = (name) => (group().has(name) ? [name, ...group().get(name)] : kvOf(name) !== name ? [name, kvOf(name)]
    : [name]);

  // The chance level of two weights with these dimensions, the start of the line scale, and the largest possible score.
  // Where folding has centred both, the ambient space has one dimension less.
  const centred = (role, i) => (Array.isArray(data.centred[role]) ? data.centred[role][i] : data.centred[role]);
  const dimension = (pairing, row, column) =>
    data.model.d_model - (centred(pairing[0], row) && centred(pairing[1], column) ? 1 : 0);
  const limits = (key, pairing, row, column) => {
    const { sizes, centred: folded } = metric(key);
    if (sizes) { // influence: the same two sizes in random directions
      const most = sizes[pairing[0]][row] * sizes[pairing[1]][column];
      const chance = most / Math.sqrt(data.model.d_model - (folded ? 1 : 0));
      return { chance, start: chance, most };
    }
    const a = data.ranks[pairing[0]][row], b = data.ranks[pairing[1]][column];
    const d = dimension(pairing, row, column), [mean, sd] = metric(key).grows
      ? [(a * b) / d, Math.sqrt((2 * a * b * (d - a) * (d - b)) / (d * d * Math.max(1, d - 1) * (d + 2)))]
      : data.chance[`${key}/${pairing}`] ?? [null, 0];
    return { chance: mean, start: mean + 3 * sd, most: metric(key).grows ? Math.min(a, b) : metric(key).max };
  };

  // ------------------------------------------------------------- edges
  const optional = (text) => (text ? HS.decode(text, Float32Array) : null);
  const whole = (text, count) => HS.decode(text,
    [Uint8Array, Uint16Array, Uint32Array].find((type) => count <= 256 ** type.BYTES_PER_ELEMENT));
  const arrays = (metricKey, pairing) => once(`edges ${metricKey}/${pairing}`, () => {
    const raw = data.edges[`${metricKey}/${pairing}`];
    if (!raw) return null;
    return {
      count: raw.count, forward: raw.forward,
      source: whole(raw.source, listOf[pairing[0]].length), target: whole(raw.target, listOf[pairing[1]].length),
      rank: whole(raw.rank, raw.count + 1), score: HS.decode(raw.score, Float32Array),
      evidence: raw.evidence ? HS.decode(raw.evidence, Uint8Array) : null,
      strength: raw.strength ? HS.decode(raw.strength, Uint8Array) : null, z: optional(raw.z),
      random: optional(raw.q_random), reversed: optional(raw.q_reversed), within: optional(raw.q_within),
      effect: optional(raw.effect), percentile: optional(raw.percentile), large: optional(raw.large),
      ratio: optional(raw.ratio),
    };
  });

  const edgeAt = (metricKey, pairing, a, i) => ({
    metric: metricKey, pairing, score: a.score[i], rank: a.rank[i], strength: a.strength ? a.strength[i] / 255 : 0,
    evidence: a.evidence ? a.evidence[i] : null, z: a.z ? a.z[i] : null,
    q: { random: a.random?.[i] ?? null, reversed: a.reversed?.[i] ?? null, within: a.within?.[i] ?? null },
    source: listOf[pairing[0]][a.source[i]], target: listOf[pairing[1]][a.target[i]], ...measuredAt(a, i),
  });

  // Measured effects of an edge: null if not measured; large is null if not compared with random outputs.
  const measuredAt = (a, i) => (a.effect && !Number.isNaN(a.effect[i])
    ? { effect: a.effect[i], percentile: a.percentile[i], large: Number.isNaN(a.large[i]) ? null : a.large[i] > 0,
      ratio: Number.isNaN(a.ratio[i]) ? null : a.ratio[i] }
    : { effect: null, percentile: null, large: null, ratio: null });

  const findEdge = (metricKey, pairing, row, column) => {
    const a = arrays(metricKey, pairing);
    if (!a) return null;
    for (let i = 0; i < a.rank.length; i++)
      if (a.source[i] === row && a.target[i] === column) return edgeAt(metricKey, pairing, a, i);
    return null;
  };

  // A head's best partners: kept edges in which it is the source ("out") or the target ("in"), best first.
  const partners = (name, metricKey, pairing, direction, limit) => {
    const a = arrays(metricKey, pairing);
    const wanted = place(direction === "out" ? pairing[0] : pairing[1], name);
    if (!a || wanted < 0) return [];
    const ends = direction === "out" ? a.source : a.target;
    const found = [];
    for (let i = 0; i < ends.length && found.length < limit; i++)
      if (ends[i] === wanted) found.push(edgeAt(metricKey, pairing, a, i));
    return found;
  };

  // ------------------------------------------------------------- edge rules (forward pairs only)
  // The largest k that the page can draw: it keeps so many pairs of each pairing, and of each head.
  const mostK = (rule) => (rule === "top-per-target" ? data.limits.per_head : data.limits.overall);

  const chooseIn = (metricKey, pairing, view) => {
    const a = arrays(metricKey, pairing);
    if (!a) return { edges: [], complete: true };
    const perTarget = new Map(), k = Math.min(view.k, mostK(view.rule));
    const layersOut = once(`position ${pairing[0]}`, () => Float64Array.from(listOf[pairing[0]], position));
    const layersIn = once(`position ${pairing[1]}`, () => Float64Array.from(listOf[pairing[1]], position));
    const edges = [];
    let passed = 0, seen = 0;
    for (let i = 0; i < a.rank.length; i++) {
      if (layersOut[a.source[i]] >= layersIn[a.target[i]] || a.score[i] < view.min) continue;
      if (view.rule === "significance" && !(a[view.null] && a[view.null][i] <= view.q)) continue;
      if (view.rule === "top" && seen >= k) break;
      seen += 1;
      if (view.rule === "top-per-target") {
        const taken = perTarget.get(a.target[i]) ?? 0;
        if (taken >= k) continue;
        perTarget.set(a.target[i], taken + 1);
      }
      if (view.large && !(a.large && a.large[i] > 0)) continue; // keep only edges with a large effect
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
    const out = listOf[pairing[0]].map(position), into = listOf[pairing[1]].map(position);
    return (i) => out[Math.floor(i / columns)] < into[i % columns];
  };

  // The most precise score available for a pair: exact for a kept edge or a small model, otherwise to within half a
  // `step`.
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
    // Heads without candidates have no value and come last.
    const height = (i) => (Number.isNaN(values[i]) ? -Infinity : values[i]);
    const order = [...values.keys()].sort((x, y) => (height(y) > height(x)) - (height(y) < height(x)) || x - y);
    const ranks = new Uint32Array(values.length);
    order.forEach((i, at) => { ranks[i] = at && values[i] === values[order[at - 1]] ? ranks[order[at - 1]] : at + 1; });
    return { names, values, ranks, order };
  });

  return { shared, heads, place, about, parts, layer, position, columnName, boxLabel, kvOf, kin, nodeNames, own,
    limits, dimension, metric, labels, rolesOf, exists, allHeads, arrays, findEdge, partners, mostK, choose, matrix,
    value, hub };
})();

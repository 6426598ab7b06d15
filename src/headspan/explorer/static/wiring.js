// The wiring diagram: layers as columns, heads as rows, shared key/value heads in a strip below.
"use strict";
HS.wiring = (() => {
  const TOP = 24, LEFT = 34, GAP = 26;
  let nodes = new Map(); // head -> {group, x, y}
  let lines = []; // {edge, path, hit}
  let geometry = null;
  let svg = null;
  let layerOfEdges = null;
  let cursor = null;

  const view = () => ({
    metric: HS.state.metric, rule: HS.state.rule, pairings: HS.state.pairings.split(",").filter((p) => HS.data.pairings.includes(p)),
    k: Math.max(0, Math.floor(Number(HS.state.k)) || 0), min: HS.state.min === "" ? -Infinity : Number(HS.state.min), q: Number(HS.state.q), null: HS.state.null,
    used: HS.state.used === "1",
  });

  const measure = () => {
    const layers = HS.data.model.layers;
    const query = 1 + Math.max(...HS.data.heads.query.map((name) => HS.model.parts(name).index));
    const kv = HS.model.shared ? 1 + Math.max(...HS.data.heads.kv.map((name) => HS.model.parts(name).index)) : 0;
    const width = HS.byId("diagram").clientWidth - 14;
    const column = Math.max(24, Math.min(layers.length < 4 ? 400 : 240, (width - LEFT) / layers.length));
    const row = Math.max(13, Math.min(38, 620 / (query + kv)));
    return { layers, query, kv, column, row, box: Math.min(column * 0.46, 42), tall: Math.min(row * 0.66, 24),
      width: LEFT + column * layers.length, height: TOP + row * (query + kv) + (kv ? GAP : 0) + 8 };
  };

  const position = (name) => {
    const { layer, kv, index } = HS.model.parts(name);
    const g = geometry;
    const below = kv ? g.query * g.row + GAP : 0;
    return { x: LEFT + g.column * (g.layers.indexOf(layer) + 0.5), y: TOP + below + g.row * (index + 0.5) };
  };

  const build = () => {
    geometry = measure();
    const g = geometry;
    svg = HS.svg("svg", { width: g.width, height: g.height, viewBox: `0 0 ${g.width} ${g.height}`, role: "group",
      "aria-label": "Wiring diagram. Arrow keys move between heads, Enter opens a head, Escape closes it." });
    const every = Math.max(1, Math.ceil(22 / g.column));
    g.layers.forEach((layer, i) => {
      const x = LEFT + g.column * i;
      if (i % 2 === 0) svg.append(HS.svg("rect", { class: "layer-band", x, y: TOP - 2, width: g.column, height: g.height - TOP }));
      if (i % every === 0) svg.append(HS.svg("text", { x: x + g.column / 2, y: 14, "text-anchor": "middle", text: `L${layer}` }));
    });
    const rowEvery = g.row < 15 ? 4 : 1;
    for (let i = 0; i < g.query; i += rowEvery) svg.append(rowLabel(TOP + g.row * (i + 0.5), `H${i}`));
    for (let i = 0; i < g.kv; i += 1) svg.append(rowLabel(TOP + g.query * g.row + GAP + g.row * (i + 0.5), `KV${i}`));
    layerOfEdges = HS.svg("g");
    svg.append(layerOfEdges);
    nodes = new Map();
    for (const name of HS.model.allHeads) svg.append(makeNode(name));
    HS.byId("diagram").replaceChildren(svg);
    cursor = nodes.has(HS.state.head) ? HS.state.head : HS.model.allHeads[0];
    nodes.get(cursor).group.setAttribute("tabindex", "0");
  };

  const rowLabel = (y, text) => HS.svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end", text });

  const makeNode = (name) => {
    const { x, y } = position(name);
    const g = geometry;
    const rect = HS.svg("rect", { x: x - g.box / 2, y: y - g.tall / 2, width: g.box, height: g.tall, rx: Math.min(5, g.tall / 3) });
    const group = HS.svg("g", { class: "node", "data-head": name, role: "button", tabindex: "-1" }, rect);
    if (g.box >= 16 && g.tall >= 11) group.append(HS.svg("text", { x, y: y + 4, text: HS.model.parts(name).index }));
    nodes.set(name, { group, rect, x, y });
    return group;
  };

  // Where a line runs: ends and bend of its curve.
  const course = (edge) => {
    const a = nodes.get(edge.source), b = nodes.get(edge.target), half = geometry.box / 2;
    const x1 = a.x + half, x2 = b.x - half;
    const bend = Math.max(12, (x2 - x1) * 0.45);
    // Neighbouring pairings of the same two heads leave at slightly different heights, so that both can be seen.
    const shift = ("QKVO".indexOf(edge.pairing[1]) - 1) * Math.min(3, geometry.tall / 7);
    return { x1, x2, bend, y1: a.y + shift, y2: b.y + shift };
  };

  const curve = ({ x1, x2, bend, y1, y2 }) => `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;

  // A dot marks an edge that the model uses. It sits before the target, where lines into one head are still apart.
  const dot = (edge, { x1, x2, bend, y1, y2 }) => {
    const mix = (t, a, b, c, d) => a * (1 - t) ** 3 + 3 * b * t * (1 - t) ** 2 + 3 * c * t * t * (1 - t) + d * t ** 3;
    const wanted = x2 - Math.min(96, 0.4 * (geometry.column - geometry.box));
    let low = 0, high = 1;
    for (let i = 0; i < 20; i++) {
      const middle = (low + high) / 2;
      if (mix(middle, x1, x1 + bend, x2 - bend, x2) < wanted) low = middle;
      else high = middle;
    }
    return HS.svg("circle", { class: `used-dot to-${edge.pairing[1]}`, "data-used": pairKey(edge), cx: wanted.toFixed(2),
      cy: mix(low, y1, y1, y2, y2).toFixed(2), r: Math.max(2, Math.min(4, geometry.tall / 5)).toFixed(2) });
  };

  const drawEdges = () => {
    const { edges, cut } = HS.model.choose(view());
    const largest = {};
    for (const edge of edges) largest[edge.pairing] = Math.max(largest[edge.pairing] ?? 0, edge.score);
    lines = edges.map((edge) => {
      const strength = largest[edge.pairing] > 0 ? Math.max(0, edge.score / largest[edge.pairing]) : 0;
      const way = course(edge), d = curve(way);
      const path = HS.svg("path", { class: `edge from-${edge.pairing[0]} to-${edge.pairing[1]}`, d,
        "stroke-width": (edge.used === false ? 0.8 : 0.8 + 2.2 * strength).toFixed(2),
        "stroke-opacity": (edge.used === false ? 0.45 : 0.18 + 0.72 * strength ** 1.5).toFixed(2) });
      const hit = HS.svg("path", { class: "edge-hit", d, "data-pair": pairKey(edge) });
      return { edge, path, hit, mark: edge.used ? dot(edge, way) : null };
    });
    layerOfEdges.replaceChildren(...lines.map((l) => l.path), ...lines.map((l) => l.mark).filter(Boolean), ...lines.map((l) => l.hit));
    const touched = new Map();
    for (const { source, target } of edges) {
      touched.set(source, [(touched.get(source)?.[0] ?? 0) + 1, touched.get(source)?.[1] ?? 0]);
      touched.set(target, [touched.get(target)?.[0] ?? 0, (touched.get(target)?.[1] ?? 0) + 1]);
    }
    for (const [name, node] of nodes) {
      const counts = touched.get(name) ?? [0, 0];
      node.group.classList.toggle("active", touched.has(name));
      node.counts = counts;
      node.group.setAttribute("aria-label", [name, ...HS.model.labels(name), `${counts[0]} edges out`, `${counts[1]} in`].join(", "));
    }
    tellNotes(edges, cut, touched);
    HS.tables.edges(edges);
    highlight();
  };

  const pairKey = (edge) => `${edge.source}.${edge.pairing[0]}-${edge.target}.${edge.pairing[1]}`;

  const tellNotes = (edges, cut, touched) => {
    let text = `${HS.count(edges.length)} edges between ${HS.count(touched.size)} heads.`;
    if (edges.some((edge) => edge.used !== null)) text += ` The model uses ${HS.count(edges.filter((edge) => edge.used).length)} of them, measured on ${HS.data.effects.materials.map((m) => HS.materials[m] ?? m).join(" and ")}.`;
    if (!view().pairings.length) text = "Choose at least one pairing.";
    else if (!edges.length) text = view().rule === "significance" ? "No pair passes, or there are no q-values of this kind for these pairings: try another q, null or similarity." : view().used ? "No used edge passes: choose other pairings, or draw the others too." : "No pair passes: lower the minimum score or raise k.";
    if (cut.length) text += ` More pairs pass in ${cut.join(", ")}; the page draws the strongest ${HS.data.limits.overall} of each pairing.`;
    if (view().rule === "top-per-target" && view().k > HS.data.limits.per_head) text += ` The page keeps at least the best ${HS.data.limits.per_head} sources of every target.`;
    HS.byId("wiring-notes").textContent = text;
    HS.byId("edge-list").firstElementChild.textContent = `Edges in this view (${HS.count(edges.length)})`;
  };

  // Keep only what belongs to the chosen head or pair.
  const highlight = () => {
    const head = HS.state.head, pair = HS.state.pair;
    const near = new Set();
    for (const { edge, path, hit, mark } of lines) {
      const lit = head ? edge.source === head || edge.target === head : pair ? pairKey(edge) === pair : false;
      path.classList.toggle("lit", lit);
      hit.classList.toggle("lit", lit);
      mark?.classList.toggle("lit", lit);
      path.classList.toggle("chosen", pair === pairKey(edge));
      if (lit) { near.add(edge.source); near.add(edge.target); }
    }
    const chosen = HS.chosenPair();
    if (chosen) { near.add(chosen.source); near.add(chosen.target); }
    HS.byId("wiring-alone").textContent = head && !near.size ? `${head} has no edge in this view; its card lists its best partners.` : "";
    svg.classList.toggle("focused", nodes.has(head));
    svg.classList.toggle("one-pair", Boolean(chosen));
    for (const [name, { group }] of nodes) {
      group.classList.toggle("near", near.has(name));
      group.classList.toggle("chosen", name === head);
      group.setAttribute("aria-pressed", String(name === head));
    }
  };

  // ---------------------------------------------------------------- shading
  const shade = () => {
    const [kind, key] = HS.state.shade.split(":");
    const values = HS.shading(kind, key);
    for (const [name, { rect, group }] of nodes) {
      const fill = values(name);
      rect.style.fill = fill ?? "";
      group.classList.toggle("filled", kind === "labels" && Boolean(fill));
    }
    HS.legend();
  };

  // ---------------------------------------------------------------- events
  const edgeTip = (edge) => {
    const about = HS.model.metric(edge.metric);
    const total = HS.model.arrays(edge.metric, edge.pairing).count;
    const rows = [`${edge.source}.${edge.pairing[0]} → ${edge.target}.${edge.pairing[1]}`,
      `${about.title} ${HS.score(edge.score, edge.metric)}, rank ${HS.count(edge.rank)} of ${HS.count(total)}`];
    if (edge.z !== null) rows.push(`z ${HS.number(edge.z, 1)} against random subspaces`);
    if (edge.q.reversed !== null) rows.push(`q ${HS.qvalue(edge.q.reversed)} against reversed pairs`);
    if (edge.effect !== null) rows.push(`effect ${HS.number(edge.effect)}: ${edge.used ? "the model uses it" : "not among those it uses"}`);
    return rows.join("\n");
  };

  const headTip = (name) => {
    const rows = [name];
    if (HS.model.labels(name).length) rows.push(HS.model.labels(name).join(", "));
    const [out, into] = nodes.get(name).counts ?? [0, 0];
    rows.push(`${out} edges out, ${into} in`);
    for (const [title, scores] of Object.entries(HS.data.behaviour ?? {}))
      if (name in scores) rows.push(`${title.replaceAll("_", " ")} ${HS.number(scores[name], 3)}`);
    return rows.join("\n");
  };

  const moveTo = (name, focus) => {
    nodes.get(cursor)?.group.setAttribute("tabindex", "-1");
    cursor = name;
    const { group } = nodes.get(name);
    group.setAttribute("tabindex", "0");
    if (focus) group.focus();
  };

  const step = (dx, dy) => {
    const here = HS.model.parts(cursor);
    const layers = geometry.layers;
    const line = (here.kv ? geometry.query : 0) + here.index + dy;
    const layer = layers[layers.indexOf(here.layer) + dx];
    const name = line < geometry.query ? `L${layer}H${line}` : `L${layer}KV${line - geometry.query}`;
    if (nodes.has(name)) moveTo(name, true);
  };

  const keys = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  const listen = () => {
    const box = HS.byId("diagram");
    const headOf = (event) => event.target.closest?.(".node")?.dataset.head;
    const lineOf = (event) => lines.find((l) => l.hit === event.target);
    box.addEventListener("click", (event) => {
      const name = headOf(event), line = lineOf(event);
      if (name) { moveTo(name, false); HS.chooseHead(name); }
      else if (line) HS.choosePair(line.edge.pairing, line.edge.source, line.edge.target);
      else HS.clear();
    });
    box.addEventListener("mousemove", (event) => {
      const name = headOf(event), line = lineOf(event);
      HS.tip(name ? headTip(name) : line ? edgeTip(line.edge) : "", event);
    });
    box.addEventListener("mouseleave", (event) => HS.tip("", event));
    box.addEventListener("keydown", (event) => {
      if (keys[event.key] && headOf(event)) step(...keys[event.key]);
      else if ((event.key === "Enter" || event.key === " ") && headOf(event)) HS.chooseHead(headOf(event));
      else return;
      event.preventDefault();
    });
  };

  const redraw = () => { build(); drawEdges(); shade(); };
  const start = () => {
    listen();
    redraw();
    HS.on(["metric", "pairings", "rule", "k", "min", "q", "null", "used"], drawEdges);
    HS.on(["head", "pair"], highlight);
    HS.on(["shade", "theme", "metric"], shade);
  };
  return { start, redraw, view };
})();

// The wiring diagram: columns are positions in the residual stream, boxes are heads, lines run from left to right.
"use strict";
HS.wiring = (() => {
  const HEADER = 26, FOLD = 22, SIDE = 14, IDLE_ROW = 19;
  let nodes = new Map(); // name -> {group, shape, x, y, column, counts}
  let lines = []; // {edge, path, hit, mark}
  let geometry = null, svg = null, world = null, header = null, cursor = null;

  const view = () => ({
    metric: HS.state.metric, rule: HS.state.rule, pairings: HS.state.pairings.split(",").filter((p) => HS.data.pairings.includes(p)),
    k: Math.max(0, Math.floor(Number(HS.state.k)) || 0), min: HS.state.min === "" ? -Infinity : Number(HS.state.min), q: Number(HS.state.q), null: HS.state.null,
    large: HS.state.large === "1",
  });
  const pairKey = (edge) => `${edge.source}.${edge.pairing[0]}-${edge.target}.${edge.pairing[1]}`;

  // ---------------------------------------------------------------- geometry
  // Groups of shown boxes: a shared key/value head with the query heads of its layer that have lines.
  const grouped = (shown) => {
    const groups = new Map();
    for (const name of [...HS.model.allHeads, ...HS.model.nodeNames].filter((n) => shown.has(n))) {
      const kv = HS.model.kvOf(name), key = kv !== name && shown.has(kv) && HS.model.layer(kv) === HS.model.layer(name) ? kv : name;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(name);
    }
    return [...groups].map(([key, members]) => {
      const rest = members.filter((name) => name !== key);
      return { position: HS.model.position(key), members: [key, ...rest], frame: rest.length > 0 };
    });
  };

  // Earlier arrangements are cached, so that going back is quick.
  const plans = new Map();
  const arranged = (what) => {
    const key = JSON.stringify(what);
    if (!plans.has(key)) {
      if (plans.size > 20) plans.clear();
      plans.set(key, HS.layout.arrange(what));
    }
    return plans.get(key);
  };

  const measure = (edges) => {
    const shown = new Set(edges.flatMap((e) => [e.source, e.target]));
    if (HS.state.head && HS.model.exists(HS.state.head)) shown.add(HS.state.head);
    const groups = grouped(shown);
    const everyone = HS.state.idle === "1" || !edges.length ? HS.model.allHeads : []; // never an empty picture
    const positions = [...new Set([...groups.map((g) => g.position), ...everyone.map(HS.model.position)])].sort((a, b) => a - b);
    const place = new Map(positions.map((p, i) => [p, i]));
    const links = [...new Map(edges.map((e) => [`${e.source}>${e.target}`, e])).values()];
    const plan = arranged({ columns: positions, groups: groups.map((g) => ({ ...g, column: place.get(g.position) })), links: links.map(({ source, target }) => ({ source, target })), numeric: HS.state.order === "number" });
    const level = (p) => Math.min(Math.floor(p / 2), 1 + HS.data.model.layers.at(-1)); // the unembedding comes after the last layer
    const folds = positions.map((p, i) => i > 0 && level(p) - level(positions[i - 1]) > 1);
    const room = Math.max(240, HS.byId("diagram").clientWidth - 2 * SIDE - FOLD * folds.filter(Boolean).length);
    const column = Math.max(52, Math.min(positions.length < 4 ? 300 : 220, room / Math.max(1, positions.length)));
    const box = column >= 96 ? 56 : 30;
    let x = SIDE;
    const xs = positions.map((_, i) => { x += folds[i] ? FOLD : 0; x += column; return x - column / 2; });
    const idle = everyone.filter((name) => !shown.has(name));
    const parked = new Map(), filled = positions.map(() => 0);
    for (const name of idle) { const c = place.get(HS.model.position(name)); parked.set(name, { column: c, row: filled[c]++ }); }
    const deep = Math.max(0, ...filled);
    return { ...plan, positions, xs, folds, column, box, tall: 20, parked, width: x + SIDE, floor: HEADER + 14 + plan.height, total: HEADER + 14 + plan.height + 14 + (deep ? deep * IDLE_ROW + 22 : 0) };
  };

  const build = (edges) => {
    geometry = measure(edges);
    const g = geometry;
    world = HS.svg("g", { class: "world" });
    header = HS.svg("g", { class: "header" });
    g.positions.forEach((position, i) => {
      world.append(HS.svg("rect", { class: `layer-band${i % 2 ? " odd" : ""}`, x: g.xs[i] - g.column / 2, y: 0, width: g.column, height: g.total }));
      header.append(HS.svg("text", { "data-x": g.xs[i], y: 17, "text-anchor": "middle", text: HS.model.columnName(position, g.column) }));
      if (!g.folds[i]) return;
      const between = `${HS.model.columnName(g.positions[i - 1] + 2)} to ${HS.model.columnName(position - 2)}: no line in this view`;
      world.append(HS.svg("g", { class: "fold" }, HS.svg("title", { text: between }), HS.svg("rect", { x: g.xs[i] - g.column / 2 - FOLD + 3, y: 0, width: FOLD - 6, height: g.total }),
        HS.svg("text", { x: g.xs[i] - g.column / 2 - FOLD / 2, y: HEADER + 24, "text-anchor": "middle", text: "⋯" })));
    });
    nodes = new Map();
    const boxes = HS.svg("g"), frames = HS.svg("g");
    g.stacks.forEach((stack, c) => {
      for (const item of stack) {
        if (item.lane) continue;
        const high = HS.layout.size(item);
        if (item.frame) frames.append(HS.svg("rect", { class: "group", x: g.xs[c] - g.box / 2 - 7, y: HEADER + 14 + item.y - high / 2, width: g.box + 14, height: high, rx: 8 }));
        for (const row of item.rows) boxes.append(makeNode(row.name, c, HEADER + 14 + HS.layout.rowY(row), g.tall));
      }
    });
    for (const [name, { column, row }] of g.parked) boxes.append(makeNode(name, column, g.floor + 26 + row * IDLE_ROW, 15, true));
    if (g.parked.size) world.append(HS.svg("line", { class: "floor", x1: 0, x2: g.width, y1: g.floor + 8, y2: g.floor + 8 }));
    world.append(frames, HS.svg("g", { class: "lines" }), boxes);
    svg = HS.svg("svg", { id: "wiring-svg", role: "group", "aria-label": "Wiring diagram. Arrow keys move between heads, Enter opens a head, Escape closes it." },
      arrowheads(), world, HS.svg("rect", { class: "header-ground", x: 0, y: 0, width: "100%", height: HEADER }), header);
    HS.byId("diagram").replaceChildren(svg);
    HS.zoom.fit(svg, world, header, { width: g.width, height: g.total });
    cursor = nodes.has(HS.state.head) ? HS.state.head : nodes.has(cursor) ? cursor : nodes.keys().next().value ?? null;
    if (cursor) nodes.get(cursor).group.setAttribute("tabindex", "0");
  };

  const arrowheads = () => HS.svg("defs", {}, ...["Q", "K", "V", "O", "R"].map((role) =>
    HS.svg("marker", { id: `arrow-${role}`, class: `arrow to-${role}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, HS.svg("path", { d: "M0 .8 L8 4 L0 7.2 Z" }))));

  // Heads are boxes; other nodes have other shapes of the same size.
  const outline = (kind, x, y, w, h) => {
    if (kind === "H") return HS.svg("rect", { class: "shape", x: x - w / 2, y: y - h / 2, width: w, height: h, rx: 5 });
    if (kind === "KV" || kind === "KR") return HS.svg("rect", { class: "shape kv", x: x - w / 2, y: y - h / 2, width: w, height: h, rx: h / 2 });
    if (kind === "neuron") return HS.svg("ellipse", { class: "shape", cx: x, cy: y, rx: w / 2, ry: h / 2 });
    const cut = kind === "direction" ? w / 2 : 7;
    return HS.svg("path", { class: "shape", d: `M${x - w / 2} ${y} l${cut} ${-h / 2} h${w - 2 * cut} l${cut} ${h / 2} l${-cut} ${h / 2} h${2 * cut - w} Z` });
  };

  const makeNode = (name, column, y, tall, idle = false) => {
    const g = geometry, x = g.xs[column], about = HS.model.about(name);
    const shape = outline(about.kind, x, y, g.box, tall);
    const group = HS.svg("g", { class: `node${idle ? " idle" : ""}`, "data-head": name, role: "button", tabindex: "-1" }, shape, HS.svg("g", { class: "stripes" }),
      HS.svg("text", { x, y: y + 4, text: HS.model.boxLabel(name, g.box) }));
    nodes.set(name, { group, shape, x, y, column, tall, counts: [0, 0] });
    return group;
  };

  // ---------------------------------------------------------------- lines
  // Every line leaves and enters its boxes at its own height, ordered by the other end.
  const routes = (edges) => {
    const g = geometry, way = new Map(g.chains.map((c) => [`${c.source}>${c.target}`, c.chain]));
    const made = edges.map((edge) => {
      const chain = way.get(`${edge.source}>${edge.target}`);
      return { edge, via: chain.slice(1, -1).map((lane) => HEADER + 14 + HS.layout.rowY(lane)), a: nodes.get(edge.source), b: nodes.get(edge.target) };
    });
    const spread = (end, next, offset) => {
      const by = new Map();
      for (const r of made) { if (!by.has(r[end])) by.set(r[end], []); by.get(r[end]).push(r); }
      for (const [node, list] of by) {
        const step = Math.min(4, (node.tall - 6) / Math.max(1, list.length - 1));
        list.sort((p, q) => next(p) - next(q) || pairKey(p.edge).localeCompare(pairKey(q.edge)));
        list.forEach((r, i) => { r[offset] = node.y + (i - (list.length - 1) / 2) * step; });
      }
    };
    spread("a", (r) => r.via[0] ?? r.b.y, "y1");
    spread("b", (r) => r.via.at(-1) ?? r.a.y, "y2");
    return made;
  };

  const curve = (r) => {
    const g = geometry, half = g.box / 2 + 9;
    const bow = (x1, y1, x2, y2) => { const bend = (x2 - x1) * 0.48; return `C${(x1 + bend).toFixed(1)} ${y1.toFixed(1)} ${(x2 - bend).toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`; };
    const beside = ("QKVOR".indexOf(r.edge.pairing[1]) - 1) * 1.6; // two pairings of the same two heads share a lane
    let x = r.a.x + half, y = r.y1, d = `M${(r.a.x + g.box / 2).toFixed(1)} ${y.toFixed(1)} H${x.toFixed(1)} `;
    r.via.forEach((lane, i) => {
      const at = g.xs[r.a.column + 1 + i];
      d += `${bow(x, y, at - half, lane + beside)} H${(at + half).toFixed(1)} `;
      [x, y] = [at + half, lane + beside];
    });
    return `${d}${bow(x, y, r.b.x - half, r.y2)} H${(r.b.x - g.box / 2 - 1).toFixed(1)}`;
  };

  const drawEdges = () => {
    const { edges, cut } = HS.model.choose(view());
    const pinned = HS.circuit.edges().filter((pin) => !edges.some((edge) => pairKey(edge) === pairKey(pin)));
    const all = [...edges, ...pinned];
    build(all);
    const isPinned = new Set(HS.circuit.keys());
    lines = routes(all).map((r) => {
      const { edge } = r, d = curve(r), s = edge.strength;
      const kind = `edge from-${edge.pairing[0]} to-${edge.pairing[1]}${isPinned.has(pairKey(edge)) ? " pinned" : ""}`;
      const path = HS.svg("path", { class: kind, d, "stroke-width": (0.9 + 3.4 * s).toFixed(2), opacity: Math.min(1, 0.14 + 1.05 * s).toFixed(2), "data-strength": s.toFixed(3), "marker-end": `url(#arrow-${edge.pairing[1]})` });
      const hit = HS.svg("path", { class: "edge-hit", d, "data-pair": pairKey(edge) });
      // A dot marks a large effect, just before the box that reads.
      const mark = edge.large ? HS.svg("circle", { class: `large-dot to-${edge.pairing[1]}`, "data-large": pairKey(edge), cx: (r.b.x - geometry.box / 2 - 12).toFixed(1), cy: r.y2.toFixed(1), r: 3 }) : null;
      return { edge, path, hit, mark };
    });
    world.querySelector(".lines").replaceChildren(...lines.map((l) => l.path), ...lines.map((l) => l.hit), ...lines.map((l) => l.mark).filter(Boolean));
    const touched = new Set();
    for (const { source, target } of all) { touched.add(source).add(target); nodes.get(source).counts[0] += 1; nodes.get(target).counts[1] += 1; }
    for (const [name, node] of nodes) {
      node.group.classList.toggle("active", touched.has(name));
      node.group.setAttribute("aria-label", [HS.model.boxLabel(name, geometry.box), name, ...HS.model.labels(name), `${node.counts[0]} edges out`, `${node.counts[1]} in`].join(", "));
    }
    HS.wiringNotes(view(), edges, cut, touched.size, geometry);
    HS.tables.edges(all);
    shade();
    highlight();
  };

  // Highlight only what belongs to the selected pair or head (with the heads that share its keys and values).
  const highlight = () => {
    const head = HS.state.head, pair = HS.state.pair, kin = new Set(head ? HS.model.kin(head) : []);
    const near = new Set(kin);
    for (const { edge, path, hit, mark } of lines) {
      const lit = head ? kin.has(edge.source) || kin.has(edge.target) : pair ? pairKey(edge) === pair : false;
      for (const part of [path, hit, mark]) part?.classList.toggle("lit", lit);
      path.classList.toggle("chosen", pair === pairKey(edge));
      if (lit) { near.add(edge.source); near.add(edge.target); }
    }
    const chosen = HS.chosenPair();
    if (chosen) { near.add(chosen.source); near.add(chosen.target); }
    HS.byId("wiring-alone").textContent = head && !lines.some((l) => l.path.classList.contains("lit")) ? `${head} has no edge in this view; its card lists its best partners.` : "";
    svg.classList.toggle("focused", nodes.has(head));
    svg.classList.toggle("one-pair", Boolean(chosen));
    for (const [name, { group }] of nodes) {
      group.classList.toggle("near", near.has(name));
      group.classList.toggle("kin", kin.has(name) && name !== head);
      group.classList.toggle("chosen", name === head);
      group.setAttribute("aria-pressed", String(name === head));
    }
  };

  // A head with several classes is striped in their colours.
  const shade = () => {
    const [kind, key] = HS.state.shade.split(":"), fills = HS.shading(kind, key);
    for (const [name, { group, shape, x, y, tall }] of nodes) {
      const colours = fills(name) ?? [], stripes = group.querySelector(".stripes"), wide = geometry.box - 2;
      shape.style.fill = colours[0] ?? "";
      stripes.replaceChildren(...colours.slice(1).map((fill, i) => HS.svg("rect", { class: "stripe", x: x - wide / 2 + ((i + 1) * wide) / colours.length, y: y - tall / 2 + 1, width: wide / colours.length, height: tall - 2, rx: 3, fill })));
      group.classList.toggle("filled", kind === "labels" && colours.length > 0);
    }
    HS.legend();
  };

  // ---------------------------------------------------------------- moving and events
  const moveTo = (name, focus) => {
    nodes.get(cursor)?.group.setAttribute("tabindex", "-1");
    cursor = name;
    const { group, x, y } = nodes.get(name);
    group.setAttribute("tabindex", "0");
    if (focus) { HS.zoom.reveal(x, y); group.focus({ preventScroll: true }); }
  };

  // The next box of the column, or the box at the nearest height in the next occupied column.
  const step = (dx, dy) => {
    const here = nodes.get(cursor), all = [...nodes].map(([name, n]) => ({ name, ...n }));
    const ahead = all.filter((n) => (dx ? (n.x - here.x) * dx > 1 : n.column === here.column && (n.y - here.y) * dy > 1));
    const cost = (n) => (dx ? Math.abs(n.x - here.x) * 1000 + Math.abs(n.y - here.y) : Math.abs(n.y - here.y));
    const next = ahead.sort((a, b) => cost(a) - cost(b))[0];
    if (next) moveTo(next.name, true);
  };
  const keys = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  const listen = () => {
    const box = HS.byId("diagram");
    const headOf = (event) => event.target.closest?.(".node")?.dataset.head;
    const lineOf = (event) => lines.find((l) => l.hit === event.target);
    box.addEventListener("click", (event) => {
      if (HS.zoom.dragged()) return;
      const name = headOf(event), line = lineOf(event);
      if (name) { moveTo(name, false); HS.chooseHead(name); }
      else if (line) HS.choosePair(line.edge.pairing, line.edge.source, line.edge.target);
      else if (HS.state.head || HS.state.pair) HS.clear();
    });
    box.addEventListener("mousemove", (event) => {
      const name = headOf(event), line = lineOf(event);
      HS.tip(name ? HS.headTip(name, nodes.get(name).counts) : line ? HS.edgeTip(line.edge) : "", event);
    });
    box.addEventListener("mouseleave", (event) => HS.tip("", event));
    box.addEventListener("keydown", (event) => {
      if (keys[event.key] && headOf(event)) step(...keys[event.key]);
      else if ((event.key === "Enter" || event.key === " ") && headOf(event)) HS.chooseHead(headOf(event));
      else if (!HS.zoom.key(event.key)) return;
      event.preventDefault();
    });
  };

  // A head without lines is drawn while it is selected.
  const choose = () => { if ((HS.state.head && !nodes.has(HS.state.head)) || extra !== "") { extra = nodes.has(HS.state.head) ? "" : HS.state.head; drawEdges(); } else highlight(); };
  let extra = "";

  // Arranging the boxes is the slow part of changing the similarity, so do it ahead while idle.
  const prepare = (keys) => {
    if (keys.length) (window.requestIdleCallback ?? setTimeout)(() => { measure(HS.model.choose({ ...view(), metric: keys[0] }).edges); prepare(keys.slice(1)); });
  };

  const start = () => {
    listen();
    drawEdges();
    prepare(HS.data.metrics.map((m) => m.key).filter((key) => key !== HS.state.metric));
    HS.on(["metric", "pairings", "rule", "k", "min", "q", "null", "large", "order", "idle", "pins"], drawEdges);
    HS.on(["head", "pair"], choose);
    HS.on(["shade", "theme"], shade);
  };
  return { start, redraw: drawEdges, view, lines: () => lines, geometry: () => geometry };
})();

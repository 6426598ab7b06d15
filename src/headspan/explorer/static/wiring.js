// The wiring diagram: columns are positions in the residual stream, boxes are heads, lines run from left to right.
"use strict";
HS.wiring = (() => {
  const HEADER = 26, FOLD = 22, SIDE = 14, IDLE_ROW = 19, TOP = HEADER + 14;
  let nodes = new Map(); // name -> {group, shape, x, y, column, counts}
  let lines = []; // {edge, path, hit, route, passes, dot, mark}
  let geometry = null, svg = null, world = null, header = null, cursor = null;

  const view = () => ({
    metric: HS.state.metric, rule: HS.state.rule,
    pairings: HS.state.pairings.split(",").filter((p) => HS.data.pairings.includes(p)),
    k: Math.max(0, Math.floor(Number(HS.state.k)) || 0), min: HS.state.min === "" ? -Infinity : Number(HS.state.min),
    q: Number(HS.state.q), null: HS.state.null, large: HS.state.large === "1", only: HS.circuit.alone(),
  });
  const pairKey = (edge) => `${edge.source}.${edge.pairing[0]}-${edge.target}.${edge.pairing[1]}`;

  // ---------------------------------------------------------------- geometry
  // Groups of shown boxes: a shared key/value head with the query heads of its layer that have lines.
  const grouped = (shown) => {
    const groups = new Map();
    for (const name of [...HS.model.allHeads, ...HS.model.nodeNames].filter((n) => shown.has(n))) {
      const kv = HS.model.kvOf(name), key = kv !== name && shown.has(kv)
        && HS.model.layer(kv) === HS.model.layer(name) ? kv : name;
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
    const seen = [...groups.map((g) => g.position), ...everyone.map(HS.model.position)];
    const positions = [...new Set(seen)].sort((a, b) => a - b);
    const place = new Map(positions.map((p, i) => [p, i]));
    const links = [...new Map(edges.map(({ source, target }) => [`${source}>${target}`, { source, target }])).values()];
    const placed = groups.map((g) => ({ ...g, column: place.get(g.position) }));
    const plan = arranged({ columns: positions, groups: placed, links, numeric: HS.state.order === "number" });
    // The unembedding comes after the last layer.
    const level = (p) => Math.min(Math.floor(p / 2), 1 + HS.data.model.layers.at(-1));
    const folds = positions.map((p, i) => i > 0 && level(p) - level(positions[i - 1]) > 1);
    const room = Math.max(240, HS.byId("diagram").clientWidth - 2 * SIDE - FOLD * folds.filter(Boolean).length);
    const column = Math.max(52, Math.min(positions.length < 4 ? 300 : 220, room / Math.max(1, positions.length)));
    const box = column >= 96 ? 56 : 30;
    let x = SIDE;
    const xs = positions.map((_, i) => { x += folds[i] ? FOLD : 0; x += column; return x - column / 2; });
    const parked = new Map(), filled = positions.map(() => 0);
    for (const name of everyone.filter((n) => !shown.has(n))) {
      const c = place.get(HS.model.position(name));
      parked.set(name, { column: c, row: filled[c]++ });
    }
    const deep = Math.max(0, ...filled), floor = TOP + plan.height;
    return { ...plan, positions, xs, folds, column, box, tall: 20, parked, width: x + SIDE, floor,
      total: floor + 14 + (deep ? deep * IDLE_ROW + 22 : 0) };
  };

  const drawColumns = (g) => g.positions.forEach((position, i) => {
    const left = g.xs[i] - g.column / 2, name = HS.model.columnName(position, g.column);
    const band = `layer-band${i % 2 ? " odd" : ""}`;
    world.append(HS.svg("rect", { class: band, x: left, y: 0, width: g.column, height: g.total }));
    header.append(HS.svg("text", { "data-x": g.xs[i], y: 17, "text-anchor": "middle", text: name }));
    if (!g.folds[i]) return;
    const first = HS.model.columnName(g.positions[i - 1] + 2), last = HS.model.columnName(position - 2);
    world.append(HS.svg("g", { class: "fold" },
      HS.svg("title", { text: `${first} to ${last}: no line in this view` }),
      HS.svg("rect", { x: left - FOLD + 3, y: 0, width: FOLD - 6, height: g.total }),
      HS.svg("text", { x: left - FOLD / 2, y: HEADER + 24, "text-anchor": "middle", text: "⋯" })));
  });

  const build = (edges) => {
    geometry = measure(edges);
    const g = geometry;
    world = HS.svg("g", { class: "world" });
    header = HS.svg("g", { class: "header" });
    drawColumns(g);
    nodes = new Map();
    const boxes = HS.svg("g"), frames = HS.svg("g");
    g.stacks.forEach((stack, c) => {
      for (const item of stack.filter((one) => !one.lane)) {
        const high = HS.layout.size(item), left = g.xs[c] - g.box / 2 - 7, y = TOP + item.y - high / 2;
        if (item.frame)
          frames.append(HS.svg("rect", { class: "group", x: left, y, width: g.box + 14, height: high, rx: 8 }));
        for (const row of item.rows) boxes.append(makeNode(row.name, c, TOP + HS.layout.rowY(row), g.tall));
      }
    });
    for (const [name, { column, row }] of g.parked)
      boxes.append(makeNode(name, column, g.floor + 26 + row * IDLE_ROW, 15, true));
    const y = g.floor + 8;
    if (g.parked.size) world.append(HS.svg("line", { class: "floor", x1: 0, x2: g.width, y1: y, y2: y }));
    world.append(frames, HS.svg("g", { class: "lines" }), boxes);
    const label = "Wiring diagram. Arrow keys move between heads, e goes to the lines of a head, Enter opens, Escape "
      + "closes.";
    svg = HS.svg("svg", { id: "wiring-svg", role: "group", "aria-label": label }, HS.routing.arrowheads("arrow"), world,
      HS.svg("rect", { class: "header-ground", x: 0, y: 0, width: "100%", height: HEADER }), header);
    HS.byId("diagram").replaceChildren(svg);
    HS.zoom.fit(svg, world, header, { width: g.width, height: g.total });
    cursor = nodes.has(HS.state.head) ? HS.state.head : nodes.has(cursor) ? cursor : nodes.keys().next().value ?? null;
    if (cursor) nodes.get(cursor).group.setAttribute("tabindex", "0");
  };

  // Heads are boxes; other nodes have other shapes of the same size.
  const outline = (kind, x, y, w, h) => {
    const box = { x: x - w / 2, y: y - h / 2, width: w, height: h };
    if (kind === "H") return HS.svg("rect", { class: "shape", ...box, rx: 5 });
    if (kind === "KV" || kind === "KR") return HS.svg("rect", { class: "shape kv", ...box, rx: h / 2 });
    if (kind === "neuron") return HS.svg("ellipse", { class: "shape", cx: x, cy: y, rx: w / 2, ry: h / 2 });
    const cut = kind === "direction" ? w / 2 : 7, level = w - 2 * cut, top = h / 2;
    const d = `M${x - w / 2} ${y} l${cut} ${-top} h${level} l${cut} ${top} l${-cut} ${top} h${-level} Z`;
    return HS.svg("path", { class: "shape", d });
  };

  const makeNode = (name, column, y, tall, idle = false) => {
    const g = geometry, x = g.xs[column], shape = outline(HS.model.about(name).kind, x, y, g.box, tall);
    const group = HS.svg("g",
      { class: `node${idle ? " idle" : ""}`, "data-head": name, role: "button", tabindex: "-1" }, shape,
      HS.svg("g", { class: "stripes" }), HS.svg("text", { x, y: y + 4, text: HS.model.boxLabel(name, g.box) }));
    nodes.set(name, { group, shape, x, y, column, tall, counts: [0, 0] });
    return group;
  };

  // ---------------------------------------------------------------- lines
  const routes = (edges) => {
    const g = geometry, way = new Map(g.chains.map((c) => [`${c.source}>${c.target}`, c.chain]));
    const made = edges.map((edge) => {
      const chain = way.get(`${edge.source}>${edge.target}`);
      return {
        edge, pairing: edge.pairing, key: pairKey(edge), a: nodes.get(edge.source), b: nodes.get(edge.target),
        via: chain.slice(1, -1).map((lane) => TOP + HS.layout.rowY(lane)),
      };
    });
    HS.routing.spread(made);
    return made;
  };

  // Lines without evidence are drawn first, so that they never cover one that has some.
  const makeLines = (edges, only) => {
    const isPinned = new Set(HS.circuit.keys()), g = geometry;
    const made = routes(edges).map((r) => {
      const { edge } = r, passes = only || HS.evidence.passes(edge), wide = HS.routing.width(edge.strength, passes);
      const route = HS.routing.route(r, g.xs, g.box / 2, g.column, wide), pinned = isPinned.has(r.key) ? "pinned" : "";
      const line = HS.routing.line("arrow", route.way, edge, wide, passes, pinned);
      line.path.dataset.strength = edge.strength.toFixed(3);
      const score = HS.score(edge.score, edge.metric);
      const name = `${r.key.replace("-", " → ")}, ${score}, evidence: ${HS.evidence.verdict(edge)}`;
      for (const [key, value] of Object.entries({ role: "button", tabindex: "-1",
        "aria-label": name })) line.hit.setAttribute(key, value);
      return { edge, ...line, route, passes, dot: HS.evidence.dot(edge), mark: null };
    }).sort((a, b) => a.passes - b.passes || a.edge.strength - b.edge.strength);
    const dotted = made.filter((line) => line.dot);
    HS.routing.placeDots(dotted.map(({ route, dot }) => ({ route, r: dot.r }))).forEach(({ x, y }, i) => {
      const { edge, dot, passes } = dotted[i], size = dot.large ? "large" : "small";
      dotted[i].mark = HS.svg("circle", {
        class: `effect-dot ${size} ${passes ? `to-${edge.pairing[1]}` : "rest"}`, [`data-${size}`]: pairKey(edge),
        cx: x.toFixed(1), cy: y.toFixed(1), r: dot.r.toFixed(2),
      });
    });
    return made;
  };

  const drawEdges = () => {
    const now = view(), chosen = now.only ? { edges: [], cut: [] } : HS.model.choose(now);
    const { edges } = chosen, there = new Set(edges.map(pairKey));
    const all = [...edges, ...HS.circuit.edges().filter((pin) => !there.has(pairKey(pin)))];
    HS.notes.show(now, all, chosen.cut); // first, since its height decides the room for the diagram
    build(all);
    lines = makeLines(all, now.only);
    const marks = lines.map((l) => l.mark).filter(Boolean);
    world.querySelector(".lines").replaceChildren(...lines.map((l) => l.path), ...lines.map((l) => l.hit), ...marks);
    const touched = new Set();
    for (const { source, target } of all) {
      touched.add(source).add(target);
      nodes.get(source).counts[0] += 1;
      nodes.get(target).counts[1] += 1;
    }
    for (const [name, node] of nodes) {
      node.group.classList.toggle("active", touched.has(name));
      const about = [HS.model.boxLabel(name, geometry.box), name, HS.classWords(name), HS.edgeCounts(node.counts)];
      node.group.setAttribute("aria-label", about.filter(Boolean).join(", "));
    }
    HS.tables.edges(all);
    shade();
    highlight();
  };

  // Highlight only what belongs to the selected pair or head (with the heads that share its keys and values).
  // The ends of pinned edges keep their strength, so that no head in the middle of a chosen path is dimmed.
  const highlight = () => {
    const head = HS.state.head, pair = HS.state.pair, kin = new Set(head ? HS.model.kin(head) : []);
    const near = new Set(kin), kept = new Set();
    for (const { edge, path, hit, mark } of lines) {
      const lit = head ? kin.has(edge.source) || kin.has(edge.target) : pair ? pairKey(edge) === pair : false;
      for (const part of [path, hit, mark]) part?.classList.toggle("lit", lit);
      mark?.classList.toggle("pinned", path.classList.contains("pinned"));
      hit.classList.toggle("pinned", path.classList.contains("pinned"));
      path.classList.toggle("chosen", pair === pairKey(edge));
      if (lit) { near.add(edge.source); near.add(edge.target); }
      if (path.classList.contains("pinned")) { kept.add(edge.source); kept.add(edge.target); }
    }
    const chosen = HS.chosenPair();
    if (chosen) { near.add(chosen.source); near.add(chosen.target); }
    const alone = head && !lines.some((l) => l.path.classList.contains("lit"));
    HS.byId("wiring-alone").textContent = alone
      ? `${head} has no edge in this view; its card lists its best partners.` : "";
    svg.classList.toggle("focused", nodes.has(head));
    svg.classList.toggle("one-pair", Boolean(chosen));
    for (const [name, { group }] of nodes) {
      group.classList.toggle("near", near.has(name));
      group.classList.toggle("kept", kept.has(name));
      group.classList.toggle("kin", kin.has(name) && name !== head);
      group.classList.toggle("chosen", name === head);
      group.setAttribute("aria-pressed", String(name === head));
    }
  };

  // A head with several classes is striped in their colours.
  const shade = () => {
    const [kind, key] = HS.state.shade.split(":"), fills = HS.shading(kind, key), wide = geometry.box - 2;
    for (const [name, { group, shape, x, y, tall }] of nodes) {
      const colours = fills(name) ?? [], stripes = group.querySelector(".stripes"), width = wide / colours.length;
      shape.style.fill = colours[0] ?? "";
      stripes.replaceChildren(...colours.slice(1).map((fill, i) => HS.svg("rect", {
        class: "stripe", x: x - wide / 2 + (i + 1) * width, y: y - tall / 2 + 1, width, height: tall - 2, rx: 3, fill,
      })));
      group.classList.toggle("filled", kind === "labels" && colours.length > 0);
    }
    HS.legend.show();
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
    const ahead = all.filter((n) => (dx ? (n.x - here.x) * dx > 1 : n.column === here.column
      && (n.y - here.y) * dy > 1));
    const cost = (n) => (dx ? Math.abs(n.x - here.x) * 1000 + Math.abs(n.y - here.y) : Math.abs(n.y - here.y));
    const next = ahead.sort((a, b) => cost(a) - cost(b))[0];
    if (next) moveTo(next.name, true);
  };
  // The lines of a head: e moves to the first, and the arrow keys to the next.
  const stepLine = (from, by) => {
    const own = lines.filter(({ edge, path }) => (edge.source === cursor || edge.target === cursor)
      && path.checkVisibility());
    own.sort((a, b) => pairKey(a.edge).localeCompare(pairKey(b.edge)));
    const at = own.findIndex((line) => line.hit === from);
    own[(at + by + own.length) % own.length]?.hit.focus({ preventScroll: true });
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
      const line = lineOf(event);
      if (line && keys[event.key]) stepLine(line.hit, keys[event.key][0] + keys[event.key][1]);
      else if (line && (event.key === "Enter" || event.key === " ")) HS.choosePair(line.edge.pairing, line.edge.source,
        line.edge.target);
      else if (event.key === "e" && headOf(event)) stepLine(null, 1);
      else if (keys[event.key] && headOf(event)) step(...keys[event.key]);
      else if ((event.key === "Enter" || event.key === " ") && headOf(event)) HS.chooseHead(headOf(event));
      else if (!HS.zoom.key(event.key)) return;
      event.preventDefault();
    });
  };

  // A head without lines is drawn while it is selected.
  let extra = "";
  const choose = () => {
    if (!(HS.state.head && !nodes.has(HS.state.head)) && extra === "") { highlight(); return; }
    extra = nodes.has(HS.state.head) ? "" : HS.state.head;
    drawEdges();
  };

  // Arranging the boxes is the slow part of changing the similarity, so do it ahead while idle.
  const prepare = (keys) => {
    if (!keys.length) return;
    (window.requestIdleCallback ?? setTimeout)(() => {
      measure(HS.model.choose({ ...view(), metric: keys[0] }).edges);
      prepare(keys.slice(1));
    });
  };

  const start = () => {
    listen();
    drawEdges();
    prepare(HS.data.metrics.map((m) => m.key).filter((key) => key !== HS.state.metric));
    const shown = ["metric", "pairings", "rule", "k", "min", "q", "null", "large", "order", "idle", "pins", "only"];
    HS.on([...shown, "head", "pair"], (changed) => (shown.some((key) => changed.has(key)) ? drawEdges() : choose()));
    HS.on(["shade", "theme"], shade);
  };
  return { start, redraw: drawEdges, view, lines: () => lines, geometry: () => geometry };
})();

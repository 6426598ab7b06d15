// The wiring diagram of the change pages: the layout of the report's diagram, for edges that come and go.
"use strict";
HS.flow = (() => {
  const HEADER = 26, SIDE = 12, FOLD = 20, TALL = 20;

  // about: {names, layer: {name: layer}, kv: {query head: its key/value head}}. One layout holds all edges that may appear.
  const plan = (edges, about) => {
    const shown = new Set(edges.flatMap((e) => [e.source, e.target])), groups = new Map();
    for (const name of about.names.filter((n) => shown.has(n))) {
      const kv = about.kv[name], key = kv && shown.has(kv) && about.layer[kv] === about.layer[name] ? kv : name;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(name);
    }
    const layers = [...new Set([...shown].map((name) => about.layer[name]))].sort((a, b) => a - b);
    const boxes = [...groups].map(([key, members]) => {
      const rest = members.filter((name) => name !== key);
      return { column: layers.indexOf(about.layer[key]), members: [key, ...rest], frame: rest.length > 0 };
    });
    const links = [...new Map(edges.map((e) => [`${e.source}>${e.target}`, { source: e.source, target: e.target }])).values()];
    return { layers, ...HS.layout.arrange({ columns: layers, groups: boxes, links, numeric: false }) };
  };

  const arrowheads = (id) => HS.svg("defs", {}, ...["Q", "K", "V"].map((role) => HS.svg("marker",
    { id: `${id}-${role}`, class: `arrow to-${role}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, HS.svg("path", { d: "M0 .8 L8 4 L0 7.2 Z" }))));

  // Draws the boxes and columns of a layout into an element; returns a function that draws edges between them.
  const draw = (box, arranged, id, label, tips) => {
    const { layers, stacks, chains, height } = arranged, nodes = new Map(), top = HEADER + 14;
    const folds = layers.map((layer, i) => i > 0 && layer - layers[i - 1] > 1);
    const room = Math.max(220, box.clientWidth - 2 * SIDE - FOLD * folds.filter(Boolean).length);
    const column = Math.max(64, Math.min(layers.length < 4 ? 240 : 170, room / Math.max(1, layers.length))), wide = column >= 92 ? 54 : 44;
    let x = SIDE;
    const xs = layers.map((_, i) => { x += (folds[i] ? FOLD : 0) + column; return x - column / 2; });
    const width = x + SIDE, total = top + height + 14, ground = HS.svg("g"), frames = HS.svg("g"), lines = HS.svg("g", { class: "lines" }), boxes = HS.svg("g");
    layers.forEach((layer, i) => {
      ground.append(HS.svg("rect", { class: `layer-band${i % 2 ? " odd" : ""}`, x: xs[i] - column / 2, y: 0, width: column, height: total }), HS.svg("text", { x: xs[i], y: 17, "text-anchor": "middle", text: `L${layer}` }));
      if (folds[i]) ground.append(HS.svg("text", { x: xs[i] - column / 2 - FOLD / 2, y: 17, "text-anchor": "middle", text: "⋯" }));
    });
    stacks.forEach((stack, c) => stack.filter((item) => !item.lane).forEach((item) => {
      const high = HS.layout.size(item);
      if (item.frame) frames.append(HS.svg("rect", { class: "group", x: xs[c] - wide / 2 - 7, y: top + item.y - high / 2, width: wide + 14, height: high, rx: 8 }));
      for (const row of item.rows) {
        const y = top + HS.layout.rowY(row), kv = !/^L\d+H/.test(row.name);
        const group = HS.svg("g", { class: "node", "data-head": row.name }, HS.svg("rect", { class: `shape${kv ? " kv" : ""}`, x: xs[c] - wide / 2, y: y - TALL / 2, width: wide, height: TALL, rx: kv ? TALL / 2 : 5 }), HS.svg("text", { x: xs[c], y: y + 4, text: row.name }));
        nodes.set(row.name, { x: xs[c], y, column: c, group });
        boxes.append(group);
      }
    }));
    box.replaceChildren(HS.svg("svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, role: "img", "aria-label": label }, arrowheads(id), ground, frames, lines, boxes));
    const ways = new Map(chains.map((c) => [`${c.source}>${c.target}`, c.chain.slice(1, -1).map((lane) => top + HS.layout.rowY(lane))]));
    return (edges) => {
      const made = edges.filter((e) => nodes.has(e.source) && nodes.has(e.target)).map((edge) => ({ edge, a: nodes.get(edge.source), b: nodes.get(edge.target), via: ways.get(`${edge.source}>${edge.target}`) ?? [] }));
      spread(made, "a", "y1", (r) => r.via[0] ?? r.b.y);
      spread(made, "b", "y2", (r) => r.via.at(-1) ?? r.a.y);
      const touched = new Set(edges.flatMap((e) => [e.source, e.target]));
      const parts = made.map((r) => {
        const { edge } = r, d = curve(r, xs, wide / 2), s = edge.strength;
        const path = HS.svg("path", { class: `edge from-${edge.pairing[0]} to-${edge.pairing[1]} ${edge.look ?? ""}`, d, "stroke-width": (0.8 + 3.2 * s).toFixed(2), opacity: Math.min(1, 0.18 + 0.95 * s).toFixed(2), "marker-end": `url(#${id}-${edge.pairing[1]})` });
        const hit = HS.svg("path", { class: "edge-hit", d, "data-pair": `${edge.source}.${edge.pairing[0]}-${edge.target}.${edge.pairing[1]}`, "data-look": edge.look ?? "" });
        tips(hit, () => edge.text);
        return [path, hit];
      });
      lines.replaceChildren(...parts.map((p) => p[0]), ...parts.map((p) => p[1]));
      for (const [name, { group }] of nodes) { group.classList.toggle("active", touched.has(name)); group.classList.toggle("idle", !touched.has(name)); }
    };
  };

  // Every line leaves and enters a box at its own height, ordered by the other end.
  const spread = (made, end, height, next) => {
    const by = new Map();
    for (const r of made) { if (!by.has(r[end])) by.set(r[end], []); by.get(r[end]).push(r); }
    for (const [node, list] of by) {
      const step = Math.min(4, (TALL - 6) / Math.max(1, list.length - 1));
      list.sort((p, q) => next(p) - next(q)).forEach((r, i) => { r[height] = node.y + (i - (list.length - 1) / 2) * step; });
    }
  };
  const curve = (r, xs, half) => {
    const out = half + 8, beside = ("QKV".indexOf(r.edge.pairing[1]) - 1) * 1.6;
    const bow = (x1, y1, x2, y2) => { const bend = (x2 - x1) * 0.48; return `C${(x1 + bend).toFixed(1)} ${y1.toFixed(1)} ${(x2 - bend).toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`; };
    let x = r.a.x + out, y = r.y1, d = `M${(r.a.x + half).toFixed(1)} ${y.toFixed(1)} H${x.toFixed(1)} `;
    r.via.forEach((lane, i) => { const at = xs[r.a.column + 1 + i]; d += `${bow(x, y, at - out, lane + beside)} H${(at + out).toFixed(1)} `; [x, y] = [at + out, lane + beside]; });
    return `${d}${bow(x, y, r.b.x - out, r.y2)} H${(r.b.x - half - 1).toFixed(1)}`;
  };
  return { plan, draw };
})();

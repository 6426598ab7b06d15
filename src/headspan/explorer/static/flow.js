// The wiring diagram of the change pages: the layout of the report's diagram, for edges that come and go.
"use strict";
HS.flow = (() => {
  const HEADER = 26, SIDE = 12, FOLD = 20, TALL = 20;

  // about: {names, layer: {name: layer}, kv: {query head: its key/value head}}. One layout holds all edges that may
  // appear. Columns are layers, or other places in the stream, each with a title and the layer that it belongs to.
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
    const links = [...new Map(edges.map((e) =>
      [`${e.source}>${e.target}`, { source: e.source, target: e.target }])).values()];
    const { title = (layer) => `L${layer}`, level = (layer) => layer, label = (name) => name } = about;
    const arranged = HS.layout.arrange({ columns: layers, groups: boxes, links, numeric: false });
    return { titles: layers.map(title), levels: layers.map(level), named: label, ...arranged };
  };

  // Draws the boxes and columns of a layout into an element; returns a function that draws edges between them.
  const draw = (box, arranged, id, label, tips) => {
    const { titles, levels, named, stacks, chains, height } = arranged, nodes = new Map(), top = HEADER + 14;
    const folds = levels.map((level, i) => i > 0 && level - levels[i - 1] > 1);
    const room = Math.max(220, box.clientWidth - 2 * SIDE - FOLD * folds.filter(Boolean).length);
    const column = Math.max(64, Math.min(titles.length < 4 ? 240 : 170, room / Math.max(1, titles.length))),
      wide = column >= 92 ? 54 : 44, half = wide / 2;
    let x = SIDE;
    const xs = titles.map((_, i) => { x += (folds[i] ? FOLD : 0) + column; return x - column / 2; });
    const width = x + SIDE, total = top + height + 14, ground = HS.svg("g"), frames = HS.svg("g"),
      lines = HS.svg("g", { class: "lines" }), boxes = HS.svg("g");
    titles.forEach((title, i) => {
      ground.append(HS.svg("rect", { class: `layer-band${i % 2 ? " odd" : ""}`, x: xs[i] - column / 2, y: 0,
        width: column, height: total }), HS.svg("text",
        { x: xs[i], y: 17, "text-anchor": "middle", text: title }));
      if (folds[i]) ground.append(HS.svg("text",
        { x: xs[i] - column / 2 - FOLD / 2, y: 17, "text-anchor": "middle", text: "⋯" }));
    });
    stacks.forEach((stack, c) => stack.filter((item) => !item.lane).forEach((item) => {
      const high = HS.layout.size(item);
      if (item.frame) frames.append(HS.svg("rect",
        { class: "group", x: xs[c] - wide / 2 - 7, y: top + item.y - high / 2, width: wide + 14, height: high,
        rx: 8 }));
      for (const row of item.rows) {
        const y = top + HS.layout.rowY(row), kv = /^L\d+K/.test(row.name);
        const group = HS.svg("g", { class: "node", "data-head": row.name },
          HS.svg("rect", { class: `shape${kv ? " kv" : ""}`, x: xs[c] - wide / 2, y: y - TALL / 2, width: wide,
          height: TALL, rx: kv ? TALL / 2 : 5 }), HS.svg("text", { x: xs[c], y: y + 4, text: named(row.name) }));
        nodes.set(row.name, { x: xs[c], y, column: c, tall: TALL, group });
        boxes.append(group);
      }
    }));
    box.replaceChildren(HS.svg("svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, role: "img",
      "aria-label": label }, HS.routing.arrowheads(id), ground, frames, lines, boxes));
    const ways = new Map(chains.map((c) =>
      [`${c.source}>${c.target}`, c.chain.slice(1, -1).map((lane) => top + HS.layout.rowY(lane))]));
    return (edges) => {
      const made = edges.filter((e) => nodes.has(e.source) && nodes.has(e.target)).map((edge) => ({
        edge, pairing: edge.pairing, key: `${edge.source}>${edge.target}.${edge.pairing}`,
        a: nodes.get(edge.source), b: nodes.get(edge.target), via: ways.get(`${edge.source}>${edge.target}`) ?? [],
      }));
      HS.routing.spread(made);
      const touched = new Set(edges.flatMap((e) => [e.source, e.target]));
      const parts = made.map((r) => {
        const { edge } = r, thick = HS.routing.width(edge.strength);
        const { way } = HS.routing.route(r, xs, half, column, thick);
        const { path, hit } = HS.routing.line(id, way, edge, thick, true, edge.look ?? "");
        hit.dataset.look = edge.look ?? "";
        tips(hit, () => edge.text);
        return [path, hit];
      });
      lines.replaceChildren(...parts.map((p) => p[0]), ...parts.map((p) => p[1]));
      for (const [name, { group }] of nodes) {
        group.classList.toggle("active", touched.has(name));
        group.classList.toggle("idle", !touched.has(name));
      }
    };
  };

  return { plan, draw };
})();

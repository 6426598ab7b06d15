// All heads as points over two chosen measures, independent of the edges in the diagram.
"use strict";
HS.heads = (() => {
  const H = 380, LEFT = 52, BOTTOM = 40, TOP = 12, RIGHT = 14, NAMED = 24;

  // [key, title, value of a head, name of its band], for the measures that the result has.
  const measures = (() => {
    let made;
    return () => (made ??= [
      ["layer", "layer", (name) => HS.model.layer(name)],
      ...HS.data.hub_pairings.flatMap((p) =>
        ["outlet", "inlet"].map((kind) =>
        [`${kind}:${p}`, `${p} ${kind} z`, hubValue(p, kind), () => `hub:${HS.state.metric}/${p}/${kind}`])),
      ...Object.entries(HS.data.behaviour ?? {}).map(([kind, scores]) =>
        [`behaviour:${kind}`, `${kind.replaceAll("_", "-")} score`, (name) => scores[name] ?? NaN]),
      ...Object.entries(HS.data.head_values).map(([key, { title, values }]) =>
        [`value:${key}`, title, (name) => values[name] ?? NaN]),
    ]);
  })();
  const hubValue = (pairing, kind) => (name) => {
    const hub = HS.model.hub(HS.state.metric, pairing, `${kind}_corrected`);
    const i = hub ? HS.model.place(kind === "outlet" ? pairing[0] : pairing[1], name) : -1;
    return i >= 0 ? hub.values[i] : NaN;
  };
  const keys = () => measures().map(([key]) => key);

  // One axis: its values, its band and its scale. The band is what the extremes of as many heads reach by chance.
  const axis = (key, names, from, to) => {
    const [, title, value, bandName] = measures().find(([k]) => k === key) ?? measures()[0];
    const values = names.map(value), known = values.filter(Number.isFinite), band = HS.data.bands[bandName?.() ?? key]
      ?? null;
    const low = Math.min(...known, ...(band ?? [])), high = Math.max(...known, ...(band ?? [])),
      pad = key === "layer" ? 0.6 : (high - low || 1) * 0.05;
    const range = [low - pad, high + pad], at = (v) => from + ((v - range[0]) / (range[1] - range[0])) * (to - from);
    // How far a value lies outside the band, in halves of its width.
    const beyond = (v) => (band ? Math.max(v - band[1], band[0] - v) / ((band[1] - band[0]) / 2) : -Infinity);
    const ticks = (count) => (key === "layer" ? HS.wholeTicks(range, count) : HS.ticks(range, count));
    return { key, title, values, band, at, beyond, ticks, layer: key === "layer", hub: key.startsWith("outlet:")
      || key.startsWith("inlet:") };
  };

  // Points that would cover each other are moved apart along the axis of layers, where there is one, otherwise sideways
  // by at most a dot and a half. The order of the heads decides, so the picture is always the same.
  const separate = (points, r, x, y) => {
    const along = y.layer && !x.layer ? "y" : "x", across = along === "x" ? "y" : "x";
    const room = (x.layer || y.layer)
      ? Math.max(0, Math.abs((along === "x" ? x : y).at(1) - (along === "x" ? x : y).at(0)) / 2 - r) : 3 * r;
    const cell = 2 * r, grid = new Map(), cellOf = (v) => Math.floor(v / cell);
    const near = (p) => {
      const found = [], [i, j] = [cellOf(p.px), cellOf(p.py)];
      for (const di of [-1, 0, 1]) for (const dj of [-1, 0, 1]) found.push(...(grid.get(`${i + di},${j + dj}`) ?? []));
      return found;
    };
    const key = `p${along}`;
    for (const p of [...points].sort((a, b) => a[`p${across}`] - b[`p${across}`] || a[key] - b[key])) {
      const home = p[key];
      let best = home, clearance = -1;
      for (let step = 0; step * r * 0.7 <= room; step++) for (const side of step ? [1, -1] : [1]) {
        p[key] = home + side * step * r * 0.7;
        const nearest = Math.min(Infinity, ...near(p).map((q) => Math.hypot(q.px - p.px, q.py - p.py)));
        if (nearest > clearance + 1e-9 && clearance < 1.7 * r) { clearance = nearest; best = p[key]; }
      }
      p[key] = best;
      const where = `${cellOf(p.px)},${cellOf(p.py)}`;
      if (!grid.has(where)) grid.set(where, []);
      grid.get(where).push(p);
    }
  };

  const draw = () => {
    const box = HS.byId("heads-main"), width = Math.max(280, Math.min(box.clientWidth, 980));
    const names = HS.model.allHeads;
    if (measures().length < 2) {
      box.replaceChildren(HS.empty("There is nothing to compare heads by: hubs need two layers, head scores and "
        + "effects a run of the model."));
      return;
    }
    const x = axis(HS.state.hx, names, LEFT, width - RIGHT), y = axis(HS.state.hy, names, H - BOTTOM, TOP);
    const points = names.map((name, i) => ({ name, x: x.values[i], y: y.values[i] })).filter((p) =>
      Number.isFinite(p.x) && Number.isFinite(p.y));
    shown = { points, x, y };
    if (!points.length) { box.replaceChildren(HS.empty(`No head has both ${x.title} and ${y.title}.`));
      HS.byId("heads-caption").textContent = ""; return; }
    const svg = HS.svg("svg", { width, height: H, viewBox: `0 0 ${width} ${H}`, role: "group",
      "aria-label": `Heads by ${x.title} and ${y.title}` });
    if (y.band) svg.append(HS.svg("rect",
      { class: "crowd", x: LEFT, width: width - RIGHT - LEFT, y: y.at(y.band[1]),
      height: y.at(y.band[0]) - y.at(y.band[1]) }));
    if (x.band) svg.append(HS.svg("rect",
      { class: "crowd", y: TOP, height: H - BOTTOM - TOP, x: x.at(x.band[0]),
      width: x.at(x.band[1]) - x.at(x.band[0]) }));
    for (const v of x.ticks(8)) svg.append(HS.svg("line",
      { class: "grid", x1: x.at(v), x2: x.at(v), y1: TOP, y2: H - BOTTOM }),
      HS.svg("text", { class: "tick-x", x: x.at(v), y: H - BOTTOM + 15, "text-anchor": "middle", text: HS.tick(v) }));
    for (const v of y.ticks(6)) svg.append(HS.svg("line",
      { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y.at(v), y2: y.at(v) }),
      HS.svg("text", { class: "tick-y", x: LEFT - 6, y: y.at(v) + 4, "text-anchor": "end", text: HS.tick(v) }));
    svg.append(HS.svg("text", { x: (LEFT + width) / 2, y: H - 6, "text-anchor": "middle", text: x.title }),
      HS.svg("text", { x: 13, y: H / 2 - 10, transform: `rotate(-90 13 ${H / 2 - 10})`, "text-anchor": "middle",
      text: y.title }));
    const perLayer = Math.max(...HS.data.model.layers.map((layer) =>
      points.filter((p) => HS.model.layer(p.name) === layer).length));
    const column = x.layer ? x.at(1) - x.at(0) : y.layer ? y.at(0) - y.at(1) : Infinity;
    const r = Math.max(2, Math.min(points.length > 600 ? 2.5 : points.length > 200 ? 3.5 : 4.5,
      column / (2 * perLayer)));
    for (const p of points) Object.assign(p,
      { px: x.at(p.x), py: y.at(p.y), beyond: Math.max(x.beyond(p.x), y.beyond(p.y)) });
    separate(points, r, x, y);
    const named = labelled(points, width), fills = HS.shading("labels");
    for (const p of points) svg.append(HS.svg("g",
      { class: `point${p.name === HS.state.head ? " chosen" : ""}`, "data-head": p.name, "data-outside": outside(p)
      ? "" : null },
      HS.svg("circle", { cx: p.px.toFixed(1), cy: p.py.toFixed(1), r, fill: fills(p.name)[0] ?? "var(--histogram)" }),
      ...(named.has(p) ? [HS.svg("text",
        { x: (p.px + (p.px > width - 70 ? -8 : 8)).toFixed(1), y: (p.py + 4).toFixed(1),
        "text-anchor": p.px > width - 70 ? "end" : "start", text: p.name })] : [])));
    box.replaceChildren(svg);
    HS.byId("heads-caption").textContent = caption();
  };
  let shown = null;
  const outside = (p) => p.beyond > 1e-4; // values and bands are rounded to seven digits

  // Names of the heads farthest outside a band, where there is room.
  const labelled = (points, width) => {
    const found = new Set(), taken = [];
    for (const p of points.filter(outside).sort((a, b) => b.beyond - a.beyond)) {
      if (found.size === NAMED) break;
      if (taken.some((o) => Math.abs(o.px - p.px) < 54 && Math.abs(o.py - p.py) < 12)) continue;
      const side = p.px > width - 70 ? -1 : 1;
      if (found.size > 4 && points.some((o) => { const dx = (o.px - p.px) * side;
        return dx > 2 && dx < 48 && Math.abs(o.py - p.py) < 7; })) continue;
      found.add(p);
      taken.push(p);
    }
    return found;
  };

  const caption = () => {
    const { points, x, y } = shown, banded = [x, y].filter((a) => a.band),
      far = points.filter(outside).sort((a, b) => b.beyond - a.beyond);
    let text = `${HS.plural(points.length, "head")}, coloured by `
      + `label${x.layer || y.layer ? "; dots of a layer are side by side" : ""}. Select a point to open its card.`;
    const ends = (a) => `${a.title} ${HS.number(a.band[0], 2)} to ${HS.number(a.band[1], 2)}`;
    const hubs = banded.filter((a) => a.hub), crowds = banded.filter((a) => !a.hub);
    if (hubs.length) text += ` Band (${hubs.map(ends).join(", ")}): the smallest and the largest head stay inside it `
      + `in 95 % of simulations in which every head picks its partner at random.`;
    if (crowds.length) text += ` ${hubs.length ? "Other band" : "Band"} (${crowds.map(ends).join(", ")}): where the `
      + `extremes of as many normal values with this median and these quartiles would be. It describes the crowd; `
      + `chance is not known for this measure.`;
    if (banded.length) text += far.length
      ? ` Outside: ${HS.plural(far.length, "head")}, farthest ${far.slice(0, 3).map((p) => p.name).join(", ")}.`
      : " No head lies outside.";
    return text;
  };

  const start = () => {
    const options = measures().map(([key, title]) => [key, title]);
    HS.byId("heads-controls").append(HS.select("Across", "hx", options), HS.select("Up", "hy", options),
      HS.el("button", { type: "button", text: "Save CSV", "data-csv": "heads",
        onclick: () => HS.download("heads.csv",
        HS.csv([{ key: "name" }, { key: "x" }, { key: "y" }], shown?.points ?? [], (c, row) => row[c.key])) }));
    const box = HS.byId("heads-main"), name = (event) => event.target.closest?.(".point")?.dataset.head;
    box.addEventListener("click", (event) => { if (name(event)) HS.openHead(name(event)); });
    box.addEventListener("mousemove", (event) => {
      const p = shown?.points.find((q) => q.name === name(event)), words = p ? HS.classWords(p.name) : "";
      HS.tip(p
        ? `${p.name}${words ? `, ${words}` : ""}\n${shown.x.title} ${HS.number(p.x, 3)}\n${shown.y.title} `
          + `${HS.number(p.y, 3)}` : "", event);
    });
    box.addEventListener("mouseleave", (event) => HS.tip("", event));
    const part = HS.lazy(HS.byId("heads"), draw);
    HS.on(["hx", "hy", "metric", "head", "theme"], part);
    window.addEventListener("resize", part);
  };
  return { start, keys };
})();

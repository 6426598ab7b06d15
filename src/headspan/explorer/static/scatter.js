// Two similarities of the same forward pairs, plotted against each other.
"use strict";
HS.scatter = (() => {
  const LEFT = 56, BOTTOM = 40, TOP = 8, RIGHT = 14, MANY = 30000;
  let canvas, over, plot = null;

  const points = (pairing, xMetric, yMetric) => {
    const a = HS.model.matrix(xMetric, pairing), b = HS.model.matrix(yMetric, pairing);
    if (!a || !b || a.layers || b.layers) return null;
    const out = HS.model.heads(pairing[0]).map(HS.model.layer), into = HS.model.heads(pairing[1]).map(HS.model.layer);
    const index = [];
    for (let i = 0; i < a.values.length; i++)
      if (!Number.isNaN(a.values[i]) && !Number.isNaN(b.values[i])
        && out[Math.floor(i / a.columns)] < into[i % a.columns]) index.push(i);
    return { index, x: a.values, y: b.values, columns: a.columns };
  };

  const quantile = (values, share) => {
    const sorted = Float32Array.from(values).sort();
    const at = (sorted.length - 1) * share, low = Math.floor(at);
    return sorted[low] + (sorted[Math.min(sorted.length - 1, low + 1)] - sorted[low]) * (at - low);
  };

  const draw = () => {
    const box = HS.byId("scatter-main");
    const pairing = HS.state.scatter, xm = HS.state.x, ym = HS.state.y;
    const p = xm !== ym ? points(pairing, xm, ym) : null;
    if (!p || !p.index.length) {
      plot = null;
      box.replaceChildren(HS.empty(HS.data.metrics.length < 2
        ? "Only one similarity was computed. Score the model with --metric pk --metric cs to compare two."
        : HS.noPairs() ? HS.noPairs()
        : xm === ym ? "Choose two different similarities."
          : `This page does not store the single pairs of ${pairing}.`));
      HS.byId("scatter-caption").textContent = "";
      return;
    }
    box.replaceChildren(canvas, over);
    const width = Math.min(box.clientWidth, 980), height = Math.min(520, Math.round(width * 0.6));
    const context = HS.canvas(canvas, width, height);
    const xs = p.index.map((i) => p.x[i]), ys = p.index.map((i) => p.y[i]);
    const xr = padded(xs), yr = padded(ys);
    const X = (v) => LEFT + ((v - xr[0]) / (xr[1] - xr[0])) * (width - LEFT - RIGHT);
    const Y = (v) => height - BOTTOM - ((v - yr[0]) / (yr[1] - yr[0])) * (height - BOTTOM - TOP);
    const cuts = [quantile(xs, 0.97), quantile(ys, 0.97)];
    plot = { ...p, pairing, X, Y, width, height, cuts };
    grid(context, xr, yr, X, Y, xm, ym);
    dots(context);
    caption(pairing, xm, ym);
    highlight();
  };

  const padded = (values) => {
    let low = Infinity, high = -Infinity;
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    const pad = (high - low || 1) * 0.03;
    return [Math.max(0, low - pad) || low - pad, high + pad];
  };

  const groupOf = (i) => {
    const a = plot.x[i] >= plot.cuts[0], b = plot.y[i] >= plot.cuts[1];
    return a && b ? "both" : a ? "first" : b ? "second" : "neither";
  };

  const dots = (context) => {
    const colours = Object.fromEntries(["both", "first", "second", "neither"].map((g) => [g, HS.color(`group-${g}`)]));
    const many = plot.index.length > MANY, size = many ? 1 : 3.6;
    context.globalAlpha = many ? 0.25 : 0.7;
    for (const group of ["neither", "first", "second", "both"]) {
      context.fillStyle = colours[group];
      for (const i of plot.index) {
        if (groupOf(i) !== group) continue;
        if (many) context.fillRect(plot.X(plot.x[i]), plot.Y(plot.y[i]), 1.4, 1.4);
        else { context.beginPath(); context.arc(plot.X(plot.x[i]), plot.Y(plot.y[i]), size / 2, 0, 7); context.fill(); }
      }
    }
    context.globalAlpha = 1;
  };

  const grid = (context, xr, yr, X, Y, xm, ym) => {
    const { width, height } = plot;
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = HS.color("line");
    context.fillStyle = HS.color("soft");
    const line = (x1, y1, x2, y2) => { context.beginPath(); context.moveTo(x1, y1); context.lineTo(x2, y2);
      context.stroke(); };
    for (const v of HS.ticks(xr, 7)) {
      line(X(v), TOP, X(v), height - BOTTOM);
      context.textAlign = "center";
      context.fillText(HS.tick(v), X(v), height - BOTTOM + 15);
    }
    for (const v of HS.ticks(yr, 6)) {
      line(LEFT, Y(v), width - RIGHT, Y(v));
      context.textAlign = "right";
      context.fillText(HS.tick(v), LEFT - 6, Y(v) + 4);
    }
    context.setLineDash([4, 3]);
    context.strokeStyle = HS.color("faint");
    line(X(plot.cuts[0]), TOP, X(plot.cuts[0]), height - BOTTOM);
    line(LEFT, Y(plot.cuts[1]), width - RIGHT, Y(plot.cuts[1]));
    context.setLineDash([]);
    context.textAlign = "center";
    context.fillText(HS.model.metric(xm).title, (LEFT + width) / 2, height - 6);
    context.save();
    context.translate(13, (height - BOTTOM) / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(HS.model.metric(ym).title, 0, 0);
    context.restore();
  };

  const caption = (pairing, xm, ym) => {
    const found = HS.data.agreement?.[pairing]?.[`${xm},${ym}`] ?? HS.data.agreement?.[pairing]?.[`${ym},${xm}`];
    let text = `${HS.plural(plot.index.length, "forward pair")} of ${pairing}; dashed: the 97 % quantiles.`;
    if (found) text += ` Spearman ρ ${HS.number(found[0], 3)} over all, ${HS.number(found[1], 3)} over those above `
      + `either quantile.`;
    const item = (group, label) =>
      HS.el("span", {}, HS.el("i", { class: "swatch", css: { background: `var(--group-${group})` } }), label);
    const short = (key) => HS.model.metric(key).short;
    HS.byId("scatter-caption").replaceChildren(text,
      HS.el("div", { class: "legend" }, item("both", "top 3 % of both"), item("first", `of ${short(xm)} only`),
      item("second", `of ${short(ym)} only`), item("neither", "of neither")));
  };

  const highlight = () => {
    if (!plot) return;
    const context = HS.canvas(over, plot.width, plot.height);
    const ring = (i, radius, strong) => {
      context.beginPath();
      context.arc(plot.X(plot.x[i]), plot.Y(plot.y[i]), radius, 0, 7);
      context.lineWidth = strong ? 2.5 : 1;
      context.strokeStyle = HS.color("text");
      context.stroke();
    };
    const pair = HS.chosenPair();
    if (pair?.pairing === plot.pairing) { const i = pair.row * plot.columns + pair.column;
      if (!Number.isNaN(plot.x[i])) ring(i, 7, true); }
    if (!HS.state.head) return;
    const row = HS.model.place(plot.pairing[0], HS.state.head), column = HS.model.place(plot.pairing[1], HS.state.head);
    for (const i of plot.index) if (Math.floor(i / plot.columns) === row || i % plot.columns === column) ring(i, 3.5,
      false);
  };

  const nearest = (event) => {
    if (!plot) return -1;
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = -1, distance = 100;
    for (const i of plot.index) {
      const d = (plot.X(plot.x[i]) - x) ** 2 + (plot.Y(plot.y[i]) - y) ** 2;
      if (d < distance) { distance = d; best = i; }
    }
    return best;
  };

  const named = (i) => [HS.model.heads(plot.pairing[0])[Math.floor(i / plot.columns)],
    HS.model.heads(plot.pairing[1])[i % plot.columns]];

  const start = () => {
    const flow = HS.data.pairings.map((p) => [p, p]);
    const metrics = HS.data.metrics.map((m) => [m.key, m.title]);
    HS.byId("scatter-controls").append(HS.select("Pairing", "scatter", flow), HS.select("Across", "x", metrics),
      HS.select("Up", "y", metrics));
    canvas = HS.el("canvas", { id: "scatter-canvas", role: "img",
      "aria-label": "Scatter plot of two similarities; the edge table lists the same pairs" });
    over = HS.el("canvas", { "aria-hidden": "true" });
    canvas.addEventListener("mousemove", (event) => {
      const i = nearest(event);
      if (i < 0) { HS.tip("", event); return; }
      const [source, target] = named(i);
      HS.tip(
        `${source}.${plot.pairing[0]} → ${target}.${plot.pairing[1]}\n${HS.model.metric(HS.state.x).short} `
          + `${HS.score(plot.x[i], HS.state.x)}, ${HS.model.metric(HS.state.y).short} `
          + `${HS.score(plot.y[i], HS.state.y)}`, event);
    });
    canvas.addEventListener("mouseleave", (event) => HS.tip("", event));
    canvas.addEventListener("click",
      (event) => { const i = nearest(event); if (i >= 0) HS.choosePair(plot.pairing, ...named(i)); });
    const part = HS.lazy(HS.byId("scatter"), draw);
    HS.on(["scatter", "x", "y", "theme"], part);
    HS.on(["head", "pair"], HS.lazy(HS.byId("scatter-main"), highlight));
    window.addEventListener("resize", part);
  };
  return { start };
})();

// Round numbers that divide a range into about `count` steps.
HS.ticks = ([low, high], count) => {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) found.push(v);
  return found;
};
// Ticks at whole numbers, for layers.
HS.wholeTicks = ([low, high], count) => {
  const step = [1, 2, 5, 10, 20, 50, 100].find((s) => (high - low) / s <= count) ?? 1000, found = [];
  for (let v = Math.ceil(low); v <= high; v += 1) if (v >= 0 && v % step === 0) found.push(v);
  return found;
};
HS.tick = (v) => String(Number(v.toPrecision(6)));

// Projection Kernel of the forward pairs against two random subspaces, one panel per pairing.
"use strict";
HS.distribution = (() => {
  const W = 240, H = 96, BASE = 80;

  // All panels end at the largest 99.7 % point among them, as single outliers would squeeze the rest. What lies beyond
  // is one bar at the end of the axis, so the best pair is always in the picture.
  const reach = (d) => {
    let seen = 0;
    const last = d.counts.findIndex((n) => (seen += n) >= 0.997 * d.pairs);
    return Math.max(((d.first + last + 1) * d.high) / d.bins, d.random_mean + 5 * d.random_sd);
  };
  const OVER = 26; // width of the last bar and the gap before it

  const panel = (pairing, d, right) => {
    const picture = HS.svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
      "aria-label": `${pairing}: mean ${HS.number(d.mean, 2)}, random mean ${HS.number(d.random_mean, 2)}` });
    const bin = d.high / d.bins, end = W - 4 - OVER, X = (v) => 4 + (v / right) * (end - 4);
    const total = d.counts.reduce((a, b) => a + b, 0);
    const density = (v) => Math.exp(-0.5 * ((v - d.random_mean) / d.random_sd) ** 2) / (
      d.random_sd * Math.sqrt(2 * Math.PI));
    const tallest = Math.max(...d.counts) / total / bin;
    // Random subspaces vary so little that their peak would flatten the bars, so each has its own vertical scale.
    const Y = (v) => BASE - (v / tallest) * (BASE - 8);
    const beyond = d.counts.reduce((sum, n, i) => sum + ((d.first + i) * bin > right ? n : 0), 0);
    d.counts.forEach((n, i) => {
      if (!n || (d.first + i) * bin > right) return;
      const x = X((d.first + i) * bin), y = Y(n / total / bin);
      picture.append(HS.svg("rect", { class: "hist", x: x.toFixed(2), y: y.toFixed(2),
        width: Math.max(0.8, X(bin) - X(0)).toFixed(2), height: (BASE - y).toFixed(2) }));
    });
    const peak = density(d.random_mean);
    const line = Array.from({ length: 81 }, (_, i) => d.random_mean + (i / 10 - 4) * d.random_sd)
      .map((v, i) => `${i ? "L" : "M"}${X(v).toFixed(2)} ${(BASE - (density(v) / peak) * (BASE - 8)).toFixed(2)}`).join(
        "");
    picture.append(HS.svg("path", { class: "density", d: line }),
      HS.svg("path", { class: "base", d: `M4 ${BASE} H${end}` }));
    if (beyond) {
      const high = Math.max(2, (beyond / total / bin / tallest) * (BASE - 8)),
        best = HS.svg("title", { text: overText(pairing, d, beyond, right) });
      picture.append(HS.svg("g", { class: "over" }, best,
        HS.svg("rect", { class: "hist", x: end + 8, y: (BASE - Math.min(BASE - 8, high)).toFixed(2), width: OVER - 10,
        height: Math.min(BASE - 8, high).toFixed(2) }),
        HS.svg("path", { class: "base", d: `M${end + 5} ${BASE} H${W - 2}` })));
    }
    const bestAt = d.best.score > right ? end + 8 + (OVER - 10) / 2 : X(d.best.score);
    picture.append(HS.svg("path", { class: "best", d: `M${bestAt.toFixed(1)} ${BASE - 12} l-3 -6 h6 Z` },
      HS.svg("title", { text: `${d.best.source} → ${d.best.target}: ${HS.number(d.best.score, 2)}` })));
    for (const v of HS.ticks([0, right], 4)) picture.append(HS.svg("text",
      { x: X(v), y: H - 4, "text-anchor": "middle", text: HS.tick(v) }));
    if (beyond) picture.append(HS.svg("text",
      { x: W - 2, y: H - 4, "text-anchor": "end", text: `> ${HS.number(right, 1)}` }));
    const pair = HS.chosenPair();
    if (pair?.pairing === pairing) {
      const { score } = HS.model.value("pk", pairing, pair.row, pair.column);
      const x = score > right ? end + 8 + (OVER - 10) / 2 : X(score);
      if (!Number.isNaN(score)) picture.append(HS.svg("line", { class: "here", x1: x, x2: x, y1: 4, y2: BASE }));
    }
    return HS.el("div", { class: "dist", "data-pairing": pairing }, HS.el("b", { text: pairing }),
      HS.el("span", { class: "kl", text: `${HS.number(d.shift, 1)} sd, ${HS.number(100 * d.above, 1)} % above`,
      title: "shift of the mean in random standard deviations; share of pairs above the random 99.9 % point" }),
      picture,
      HS.el("p", { class: "best-pair" }, "best ",
        HS.el("button", { type: "button", class: "link", text: `${d.best.source} → ${d.best.target}`,
        title: "Open the pair card", onclick: () => HS.choosePair(pairing, d.best.source, d.best.target) }),
        ` ${HS.number(d.best.score, 2)}`));
  };
  const overText = (pairing, d, beyond, right) =>
    `${HS.plural(beyond, "pair")} of ${pairing} above ${HS.number(right, 1)}, up to ${HS.number(d.best.score, 2)}`;

  const draw = () => {
    const rows = Object.entries(HS.data.distributions ?? {});
    if (!rows.length) { HS.byId("distribution-grid").replaceChildren(HS.empty(HS.noPairs()
      || HS.data.missing.distributions)); return; }
    const right = Math.max(...rows.map(([, d]) => reach(d)));
    HS.byId("distribution-grid").replaceChildren(...rows.map(([pairing, d]) => panel(pairing, d, right)));
  };

  const start = () => {
    const rows = Object.entries(HS.data.distributions ?? {}).map(([pairing, d]) => ({ pairing, ...d }));
    const n = (key, title, digits) =>
      ({ key, title, number: true, text: (r) => (r[key] === null ? "–" : HS.number(r[key], digits)) });
    if (rows.length) HS.byId("distribution-table").append(HS.table([
      { key: "pairing", title: "Pairing" }, n("pairs", "Pairs", 0), n("mean", "Mean", 3), n("sd", "SD", 3),
        n("random_mean", "Random mean", 3), n("random_sd", "Random SD", 3),
      n("shift", "Shift (random SD)", 2), n("above", "Share above 99.9 %", 3),
        n("random_significant", "q ≤ 0.05, random", 0), n("reversed_significant", "q ≤ 0.05, reversed", 0),
        n("within_significant", "q ≤ 0.05, within", 0), n("both_significant", "reversed and within", 0),
    ], rows, { file: "distributions", shown: 16 }));
    HS.on(["pair"], HS.lazy(HS.byId("distributions"), draw));
  };
  return { start };
})();

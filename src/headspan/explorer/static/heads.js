// All heads as points over two chosen measures, independent of the edges in the diagram.
"use strict";
HS.heads = (() => {
  const H = 380, LEFT = 52, BOTTOM = 40, TOP = 12, RIGHT = 14;

  // [key, title, value of a head], for the measures that the result has.
  const measures = (() => {
    let made;
    return () => (made ??= [
      ["layer", "layer", (name) => HS.model.layer(name)],
      ...HS.data.hub_pairings.flatMap((p) => ["outlet", "inlet"].map((kind) => [`${kind}:${p}`, `${p} ${kind} z`, hubValue(p, kind)])),
      ...Object.entries(HS.data.behaviour ?? {}).map(([kind, scores]) => [`behaviour:${kind}`, `${kind.replaceAll("_", " ")} score`, (name) => scores[name] ?? NaN]),
      ...Object.entries(HS.data.head_values).map(([key, { title, values }]) => [`value:${key}`, title, (name) => values[name] ?? NaN]),
    ]);
  })();
  const hubValue = (pairing, kind) => (name) => {
    const hub = HS.model.hub(HS.state.metric, pairing, `${kind}_corrected`);
    const i = hub ? HS.model.place(kind === "outlet" ? pairing[0] : pairing[1], name) : -1;
    return i >= 0 ? hub.values[i] : NaN;
  };
  const keys = () => measures().map(([key]) => key);
  const of = (key) => measures().find(([k]) => k === key) ?? measures()[0];

  const draw = () => {
    const box = HS.byId("heads-main"), [, xTitle, X] = of(HS.state.hx), [, yTitle, Y] = of(HS.state.hy);
    const points = HS.model.allHeads.map((name) => ({ name, x: X(name), y: Y(name) })).filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y));
    if (!points.length) { box.replaceChildren(HS.empty(`No head has both ${xTitle} and ${yTitle}.`)); return; }
    const width = Math.max(280, Math.min(box.clientWidth, 980));
    const range = (values) => { const low = Math.min(...values), high = Math.max(...values), pad = (high - low || 1) * 0.05; return [low - pad, high + pad]; };
    const xr = range(points.map((p) => p.x)), yr = range(points.map((p) => p.y));
    const px = (v) => LEFT + ((v - xr[0]) / (xr[1] - xr[0])) * (width - LEFT - RIGHT), py = (v) => H - BOTTOM - ((v - yr[0]) / (yr[1] - yr[0])) * (H - BOTTOM - TOP);
    const svg = HS.svg("svg", { width, height: H, viewBox: `0 0 ${width} ${H}`, role: "group", "aria-label": `Heads by ${xTitle} and ${yTitle}` });
    for (const v of HS.ticks(xr, 8)) svg.append(HS.svg("line", { class: "grid", x1: px(v), x2: px(v), y1: TOP, y2: H - BOTTOM }), HS.svg("text", { x: px(v), y: H - BOTTOM + 15, "text-anchor": "middle", text: HS.tick(v) }));
    for (const v of HS.ticks(yr, 6)) svg.append(HS.svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(v), y2: py(v) }), HS.svg("text", { x: LEFT - 6, y: py(v) + 4, "text-anchor": "end", text: HS.tick(v) }));
    svg.append(HS.svg("text", { x: (LEFT + width) / 2, y: H - 6, "text-anchor": "middle", text: xTitle }), HS.svg("text", { x: 13, y: H / 2 - 10, transform: `rotate(-90 13 ${H / 2 - 10})`, "text-anchor": "middle", text: yTitle }));
    const fills = HS.shading("labels");
    // Names of outlying heads, where there is room.
    const spread = (p) => Math.abs((p.y - (yr[0] + yr[1]) / 2) / (yr[1] - yr[0])) + Math.abs((p.x - (xr[0] + xr[1]) / 2) / (xr[1] - xr[0])), taken = [];
    const far = [...points].sort((a, b) => spread(b) - spread(a)).filter((p) => {
      const at = [px(p.x), py(p.y)];
      if (taken.length > 24 || taken.some((o) => Math.abs(o[0] - at[0]) < 54 && Math.abs(o[1] - at[1]) < 13)) return false;
      const left = at[0] > width - 70;
      if (points.some((o) => { const dx = (px(o.x) - at[0]) * (left ? -1 : 1); return dx > 2 && dx < 52 && Math.abs(py(o.y) - at[1]) < 9; })) return false;
      taken.push(at);
      return true;
    });
    const named = new Set(far.map((p) => p.name));
    for (const p of points) svg.append(HS.svg("g", { class: `point${p.name === HS.state.head ? " chosen" : ""}`, "data-head": p.name },
      HS.svg("circle", { cx: px(p.x).toFixed(1), cy: py(p.y).toFixed(1), r: points.length > 600 ? 3 : 4.5, style: null, fill: fills(p.name)[0] ?? "var(--histogram)" }),
      ...(named.has(p.name) ? [HS.svg("text", { x: (px(p.x) + (px(p.x) > width - 70 ? -8 : 8)).toFixed(1), y: (py(p.y) + 4).toFixed(1), "text-anchor": px(p.x) > width - 70 ? "end" : "start", text: p.name })] : [])));
    box.replaceChildren(svg);
    HS.byId("heads-caption").textContent = `${HS.count(points.length)} heads, coloured by label. Select a point to open its card.`;
    shown = { points, xTitle, yTitle };
  };
  let shown = null;

  const start = () => {
    const options = measures().map(([key, title]) => [key, title]);
    HS.byId("heads-controls").append(HS.select("Across", "hx", options), HS.select("Up", "hy", options),
      HS.el("button", { type: "button", text: "Save CSV", "data-csv": "heads", onclick: () => HS.download("heads.csv", HS.csv([{ key: "name" }, { key: "x" }, { key: "y" }], shown?.points ?? [], (c, row) => row[c.key])) }));
    const box = HS.byId("heads-main"), name = (event) => event.target.closest?.(".point")?.dataset.head;
    box.addEventListener("click", (event) => { if (name(event)) HS.openHead(name(event)); });
    box.addEventListener("mousemove", (event) => {
      const p = shown?.points.find((q) => q.name === name(event));
      HS.tip(p ? `${p.name}${HS.model.labels(p.name).length ? `, ${HS.model.labels(p.name).join(", ").replaceAll("_", " ")}` : ""}\n${shown.xTitle} ${HS.number(p.x, 3)}\n${shown.yTitle} ${HS.number(p.y, 3)}` : "", event);
    });
    box.addEventListener("mouseleave", (event) => HS.tip("", event));
    const part = HS.lazy(HS.byId("heads"), draw);
    HS.on(["hx", "hy", "metric", "head", "theme"], part);
    window.addEventListener("resize", part);
  };
  return { start, keys };
})();

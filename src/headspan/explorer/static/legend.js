// The legend of the diagram: colours, line widths with their scores, dots with their effects. The same entries are
// shown under the diagram and drawn into a saved picture.
"use strict";
HS.legend = (() => {
  const data = HS.data;
  const READ = { Q: "read by queries", K: "read by keys", V: "read by values", O: "output", R: "read by nodes" };
  const STEPS = [0, 0.25, 0.5, 1];

  // The scores at which a line has these widths, for the pairing of the strongest edge.
  const scale = (edges) => {
    const edge = edges.reduce((best, one) => (best && best.strength >= one.strength ? best : one), null);
    if (!edge) return [];
    const { metric, pairing } = edge, row = HS.model.place(pairing[0], edge.source),
      column = HS.model.place(pairing[1], edge.target);
    const { chance, start, most } = HS.model.limits(metric, pairing, row, column), about = HS.model.metric(metric);
    const value = (s) => start + s * (most - start);
    const text = (s) => (about.sizes ? `${HS.number(value(s) / chance, 0)}×`
      : HS.number(value(s), most > 1 ? (value(s) < 10 ? 1 : 0) : 2));
    const name = about.sizes ? `${about.short}, times the expected` : about.short;
    return [{ text: `${name}:` }, ...STEPS.map((s) =>
      ({ line: pairing[1], width: HS.routing.width(s), text: text(s) }))];
  };

  // Effects whose dots are shown in the legend: the floor, and two larger ones.
  const dots = (edges) => {
    const pairings = data.pairings.filter((p) => edges.some((edge) => edge.pairing === p && HS.evidence.dot(edge)));
    if (!pairings.length) return [];
    const { floors, short_units: short } = data.effects, units = [...new Set(pairings.map((p) => short[p]))];
    const sizes = [floors[pairings[0]], 0.2, 0.8].map((effect) =>
      ({ dot: "large", r: HS.evidence.radius(effect), text: `${effect}` }));
    return [{ text: `large effect (${units.join(" or ")}):`, title: HS.largeMeans() }, ...sizes,
      { dot: "small", r: HS.evidence.radius(0.2), text: "measured, not large" }];
  };

  // Groups of entries: {text}, {line, width, text}, {dot, r, text} or {fill, text}.
  const groups = (edges, only) => {
    const roles = [..."QKVOR"].filter((role) => edges.some((edge) => edge.pairing[1] === role)), found = [];
    const coloured = edges.filter((edge) => only || HS.evidence.passes(edge));
    found.push(...roles.filter((role) => coloured.some((e) => e.pairing[1] === role)).map((role) =>
      [{ line: role, width: 3, text: READ[role] }]));
    if (coloured.length < edges.length)
      found.push([{ line: "rest", width: data.looks.rest, text: "no evidence above chance",
        title: "Neither above reversed pairs at q ≤ 0.05, nor a large effect, nor three times the expected influence; "
          + "or not tested" }]);
    if (coloured.length) found.push(scale(coloured));
    found.push(dots(edges));
    if (edges.some((edge) => edge.pairing[0] !== "O"))
      found.push([{ text: "Line: O solid, Q dashed, K dotted, V dash-dot" }]);
    if (HS.state.shade === "labels" && data.labels)
      found.push(Object.entries(data.labels.colours).map(([name, fill]) => ({ fill, text: HS.classWord(name) })));
    return found.filter((group) => group.length);
  };

  const colour = (role) => `var(--${role === "rest" ? "rest" : `role-${role}`})`;
  const mark = ({ line, dot, fill, width, r }) => {
    if (line) return HS.el("i", { class: "stroke", css: { height: `${width}px`, background: colour(line) } });
    if (dot) return HS.el("i", { class: `effect-key ${dot}`, css: { width: `${2 * r}px`, height: `${2 * r}px` } });
    return fill ? HS.el("i", { class: "swatch", css: { background: fill } }) : "";
  };
  const current = () => groups(HS.wiring.lines().map((l) => l.edge), HS.wiring.view().only);
  const show = () => HS.byId("legend").replaceChildren(...current().map((group) =>
    HS.el("span", { class: "key" }, ...group.map((entry) =>
      HS.el("span", { title: entry.title }, mark(entry), entry.text)))));

  // The same as SVG, in rows no wider than `wide`; returns the group and its height.
  const drawn = (wide) => {
    const picture = HS.svg("g", { class: "legend" }), ROW = 20, LETTER = 6.7;
    let x = 12, y = 14;
    for (const group of current()) {
      const size = (e) => (e.line ? 26 : e.dot ? 2 * e.r + 6 : e.fill ? 18 : 0) + LETTER * e.text.length + 10;
      if (x > 12 && x + group.reduce((sum, e) => sum + size(e), 0) > wide) { x = 12; y += ROW; }
      for (const entry of group) {
        if (x > 12 && x + size(entry) > wide) { x = 12; y += ROW; }
        const { line, dot, fill, width, r, text } = entry, middle = y - 4;
        let at = x;
        if (line) {
          const ink = HS.color(line === "rest" ? "rest" : `role-${line}`);
          picture.append(HS.svg("line", { x1: x, x2: x + 20, y1: middle, y2: middle, stroke: ink,
            "stroke-width": width }));
          at += 26;
        } else if (dot) {
          const ink = HS.color("text"), paint = dot === "large" ? { fill: ink }
            : { fill: "none", stroke: ink, "stroke-width": 1.3 };
          picture.append(HS.svg("circle", { cx: x + r, cy: middle, r, ...paint }));
          at += 2 * r + 6;
        } else if (fill) {
          picture.append(HS.svg("rect", { x, y: middle - 6, width: 12, height: 12, rx: 3, fill }));
          at += 18;
        }
        picture.append(HS.svg("text", { x: at, y, fill: HS.color("text"), "font-family": "sans-serif", "font-size": 12,
          text }));
        x += size(entry);
      }
      x += 8;
    }
    return { picture, height: y + 8 };
  };
  return { show, drawn };
})();

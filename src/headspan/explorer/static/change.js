// The change pages: a comparison of two models, or a training run with a slider over its steps.
"use strict";
HS.data = JSON.parse(HS.byId("payload").textContent);
(() => {
  const data = HS.data, ROLES = ["Q", "K", "V", "O"];
  const series = data.kind === "series";
  const layers = [...new Set(ROLES.flatMap((role) => data.heads[role].map((head) => head[1])))].sort((a, b) => a - b);
  const tallest = 1 + Math.max(...ROLES.flatMap((role) => data.heads[role].map((head) => head[2])));
  const main = HS.byId("main");
  const section = (id, title, lead, ...children) => {
    const node = HS.el("section", { id }, HS.el("h2", { text: title }),
      lead ? HS.el("p", { class: "lead", text: lead }) : null, ...children);
    main.append(node);
    return node;
  };
  const tips = (node, text) => {
    node.addEventListener("pointermove", (event) => HS.tip(text(), event));
    node.addEventListener("pointerleave", (event) => HS.tip("", event));
  };

  // ---------------------------------------------------------------- wiring
  const about = { names: [], layer: {}, kv: data.served_by };
  for (const role of ROLES) for (const [name, layer] of data.heads[role]) if (
    !(name in about.layer)) { about.names.push(name); about.layer[name] = layer; }

  const legend = (...more) => HS.el("div", { class: "legend" }, ...["Q", "K", "V"].map((role) =>
    HS.el("span", {}, HS.el("i", { class: "swatch", css: { background: `var(--role-${role})` } }), `O → ${role}`)),
      ...more.map((text) => HS.el("span", { text })));

  // ---------------------------------------------------------------- heat map of heads × roles, one block per layer
  const ports = (box) => {
    const size = Math.max(9, Math.min(18, 400 / tallest)), block = 4 * size + 20;
    const across = Math.max(1, Math.floor(1180 / block)), down = Math.ceil(layers.length / across);
    const cells = new Map(), svg = HS.svg("svg",
      { width: across * block + 24, height: down * (tallest * size + 36), role: "img",
      "aria-label": "Drift of every head and role" });
    layers.forEach((layer, i) => {
      const left = 22 + (i % across) * block, top = 16 + Math.floor(i / across) * (tallest * size + 36);
      svg.append(HS.svg("text", { x: left, y: top - 5, text: `L${layer}` }));
      ROLES.forEach((role, column) => {
        svg.append(HS.svg("text", { x: left + column * size + size / 3, y: top + tallest * size + 11, text: role }));
        for (const [name, where, row] of data.heads[role]) {
          if (where !== layer) continue;
          const spot = { x: left + column * size, y: top + row * size, width: size, height: size };
          const cell = HS.svg("rect", { class: "cell", ...spot, "data-port": `${name}.${role}` });
          svg.append(HS.svg("rect", { class: "ground", ...spot }), cell);
          cells.set(`${name}.${role}`, cell);
        }
      });
    });
    box.append(svg);
    return (valueOf, textOf) => {
      const largest = Math.max(1e-12, ...[...cells.keys()].map((port) => valueOf(port) || 0));
      for (const [port, cell] of cells) {
        const value = valueOf(port);
        cell.setAttribute("fill-opacity", Number.isFinite(value) ? Math.max(0, value / largest).toFixed(3) : "0");
        if (!cell.dataset.hasTip) tips(cell, () => cell.dataset.text);
        cell.dataset.hasTip = "1";
        cell.dataset.text = textOf(port, value);
      }
      return largest;
    };
  };
  const toggles = (label, key, options) => HS.el("fieldset", { class: "field" }, HS.el("legend", { text: label }),
    HS.el("div", { class: "toggles" }, ...options.map(([value, text]) => {
      const button = HS.el("button", { type: "button", class: "toggle", text, "data-value": value, onclick: () => {
        const chosen = new Set(HS.state[key].split(",").filter(Boolean));
        if (!chosen.delete(value)) chosen.add(value);
        HS.set({ [key]: options.map((o) => o[0]).filter((v) => chosen.has(v)).join(",") });
      } });
      const sync = () => button.setAttribute("aria-pressed", String(HS.state[key].split(",").includes(value)));
      HS.on([key], sync);
      sync();
      return button;
    })));
  const pairings = [["OQ", "OQ"], ["OK", "OK"], ["OV", "OV"]];
  const overview = () => {
    const facts = HS.el("div", { class: "facts" },
      ...Object.entries(data.facts).map(([name, value]) =>
      HS.el("div", {}, HS.el("span", { text: name }), HS.el("b", { text: value }))));
    section("overview", series ? "A training run" : "Two models", "", facts,
      ...data.notes.map((text) => HS.el("p", { class: "note", text })));
  };
  const column = (key, title, digits) =>
    (digits === undefined ? { key, title } : { key, title, number: true, text: (row) => HS.number(row[key], digits) });
  const pairColumn = { key: "edge", title: "edge", value: (row) => `${row.source}-${row.target}`,
    text: (row) => `${row.source} → ${row.target}` };

  // ---------------------------------------------------------------- two models
  const startDiff = () => {
    const byPort = new Map(data.drift.map((row) => [`${row.head}.${row.role}`, row]));
    const map = HS.el("div", { class: "ports", tabindex: "0", role: "group", "aria-label": "Drift of every weight" });
    section("drift", "How far heads moved",
      "Drift is 1 − PK/rank of a weight's subspace before and after: 0 for the same span, 1 for orthogonal spans. "
        + "Weights at the rounding floor are left empty.", map,
      HS.table([{ key: "port", title: "weight", value: (r) => `${r.head}.${r.role}`,
        text: (r) => `${r.head}.${r.role}` }, column("drift", "drift", 5), column("floor", "rounding floor", 7),
        column("angle", "largest angle °", 2),
        { key: "moved", title: "moved", text: (r) => (r.moved ? "yes" : "no") }], data.drift, { file: "drift" }));
    ports(map)((port) => (byPort.get(port)?.moved ? byPort.get(port).drift : 0), (port) => {
      const row = byPort.get(port);
      return row
        ? `${port}\ndrift ${HS.number(row.drift, 5)}, rounding floor ${HS.number(row.floor, 7)}\nlargest angle `
          + `${HS.number(row.angle, 2)}°` : port;
    });
    startEdges();
    section("hubs", "Hubs whose rank changed", "",
      data.hubs.length ? HS.table([column("pairing", "pairing"), column("hub", "hub"), column("head", "head"),
      column("kind", "change"), column("before", "before", 2), column("after", "after", 2),
      column("rank_before", "rank before", 0), column("rank_after", "rank after", 0)], data.hubs, { file: "hubs" })
        : HS.empty("No hub changed rank."));
  };

  // Both wirings in one layout: overlaid or side by side.
  const startEdges = () => {
    const kinds = ["entered", "left", "kept", "strengthened", "weakened"];
    const box = HS.el("div", { class: "twins" }), list = HS.el("div"),
      hint = HS.el("p", { class: "hint", role: "status", id: "edge-notes" });
    section("edges", "Two wirings", "",
      HS.el("div", { class: "controls" }, HS.select("view", "view", [["over", "overlaid"], ["beside", "side by side"]]),
      toggles("pairings", "pairings", pairings), toggles("edges", "kinds", kinds.map((kind) => [kind, kind]))),
      HS.el("p", { class: "lead", id: "edges-lead" }), hint, box,
        legend("solid: entered or stronger", "dashed: left or weaker"), list);
    const leads = {
      over: `Wider lines changed more. Entered, left: the top ${data.k} of a pairing. Kept: in it before and after.`,
      beside: `The top ${data.k} of every pairing before (left) and after (right), with every head in the same place. `
        + `The farther the PK is above chance, the wider the line. Heavy lines appear on one side only.`,
    };
    const text = (e) =>
      `${e.source} → ${e.target} (${e.pairing}), ${e.kind}\nPK ${HS.number(e.before, 3)} → `
        + `${HS.number(e.after, 3)}\nrank ${e.rank_before} → ${e.rank_after}`;
    const panel = (title, chosen, arranged, id) => {
      const inside = HS.el("div", { class: "diagram wide", tabindex: "0", role: "group",
        "aria-label": title || "Both wirings" }),
        figure = HS.el("figure", { class: "diagram-box", id }, title ? HS.el("figcaption", { text: title }) : null,
        inside);
      box.append(figure);
      HS.flow.draw(inside, arranged, `arrow-${id}`, title || "Edges that changed", tips)(chosen);
    };
    const update = () => {
      const chosen = data.edges.filter((e) => HS.state.pairings.split(",").includes(e.pairing)
        && HS.state.kinds.split(",").includes(e.kind));
      const beside = HS.state.view === "beside", largest = Math.max(1e-9, ...chosen.map((e) => Math.abs(e.change)));
      const side = (value, rank, mine) =>
        chosen.filter((e) => e[rank] >= 1 && e[rank] <= data.k).map((e) =>
        ({ ...e, strength: e[`${value}_strength`], look: e.kind === mine ? mine : "kept", text: text(e) }));
      const parts = beside ? [side("before", "rank_before", "left"), side("after", "rank_after", "entered")]
        : [chosen.map((e) => ({ ...e, look: { strengthened: "entered", weakened: "left" }[e.kind] ?? e.kind,
          strength: Math.abs(e.change) / largest, text: text(e) }))];
      const arranged = HS.flow.plan(parts.flat(), about);
      HS.byId("edges-lead").textContent = leads[beside ? "beside" : "over"];
      box.replaceChildren();
      box.classList.toggle("beside", beside);
      if (beside) { panel(`before: ${data.facts.before}`, parts[0], arranged, "before");
        panel(`after: ${data.facts.after}`, parts[1], arranged, "after"); } else panel("", parts[0], arranged, "both");
      const counts = kinds.map((kind) => [kind, chosen.filter((e) => e.kind === kind).length]).filter(([, n]) => n);
      hint.textContent = chosen.length ? counts.map(([kind, n]) => `${HS.count(n)} ${kind}`).join(", ")
        : "No edges selected.";
      list.replaceChildren(HS.table([column("pairing", "pairing"), pairColumn, column("kind", "change"),
        column("before", "before", 3), column("after", "after", 3), column("change", "difference", 3),
        column("rank_before", "rank before", 0), column("rank_after", "rank after", 0)], chosen, { file: "edges" }));
    };
    HS.on(["pairings", "kinds", "view"], update);
    update();
  };

  // ---------------------------------------------------------------- a training run
  const startSeries = () => {
    const count = data.edge_list.length, steps = data.steps.length;
    const scores = HS.decode(data.scores, Float32Array), ranks = HS.decode(data.ranks, Int32Array);
    const drift = Object.fromEntries(["from_previous",
      "from_last"].map((kind) => [kind,
      Object.fromEntries(ROLES.map((role) => [role, HS.decode(data[kind][role], Float32Array)]))]));
    // Files from earlier versions do not record the width of heads: scale by the largest PK of the run.
    const strengths = data.strengths ? HS.decode(data.strengths, Float32Array) : null, largest = {};
    if (!strengths) data.edge_list.forEach(([pairing], i) => {
      for (let s = 0; s < steps; s++) if (scores[s * count + i] > (largest[pairing]
      ?? 0)) largest[pairing] = scores[s * count + i]; });
    const slider = HS.el("input", { type: "range", id: "step", min: 0, max: steps - 1, step: 1, "aria-label": "Step",
      oninput: (event) => HS.set({ step: event.target.value }) });
    const shown = HS.el("output", { for: "step", id: "step-name" });
    let timer = 0;
    const play = HS.el("button", { type: "button", id: "play", text: "Play", onclick: () => {
      if (timer) return stop();
      if (Number(HS.state.step) === steps - 1) HS.set({ step: 0 });
      timer = setInterval(() => (Number(HS.state.step) < steps - 1 ? HS.set({ step: Number(HS.state.step) + 1 })
        : stop()), 450);
      play.textContent = "Pause";
    } });
    const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
    const box = HS.el("div", { class: "diagram wide", tabindex: "0", role: "group", "aria-label": "Wiring diagram" }),
      hint = HS.el("p", { class: "hint", role: "status", id: "wiring-notes" }),
      courses = HS.el("div", { class: "lines" });
    const many = HS.el("input", { type: "number", id: "top", min: 1, max: data.k,
      onchange: (event) =>
      HS.set({ top: Math.max(1, Math.min(data.k, Math.round(Number(event.target.value)) || 1)) }) });
    section("wiring", "Wiring at one step",
      `Move the slider. A line joins the head that writes to the head that reads; it is wider the `
        + `${strengths ? "farther its PK is above chance" : "larger its PK is, relative to the largest of the run"}.`,
      HS.el("div", { class: "timeline" }, play, slider, shown),
      HS.el("div", { class: "controls" }, toggles("pairings", "pairings", pairings),
        HS.el("label", { class: "field" }, HS.el("span", { text: "edges per pairing" }), many),
        HS.select("compare with", "with",
          [["", "nothing"], ["previous", "the previous step"], ["first", "the first step"],
          ["last", "the last step"]])), hint,
      HS.el("div", { class: "diagram-box" }, box),
        legend("heavy: only at this step", "dashed: only at the other step"));
    let draw = null, drawn = "";
    const redraw = lines(courses, scores, count);
    section("courses", "Edges over steps", "Every kept edge. The dashed line marks the step shown above.", courses,
      HS.table([column("pairing", "pairing"), pairColumn, column("first", "first PK", 2), column("final", "last PK", 2),
      column("growth", "growth", 2), column("birth", "birth", 0), column("half", "half-time", 0),
        column("rank", "last rank", 0)], data.trajectories, { file: "trajectories" }));
    const map = HS.el("div", { class: "ports", tabindex: "0", role: "group", "aria-label": "Drift of every weight" }),
      drifted = HS.el("p", { class: "hint", id: "drift-notes" });
    section("drift", "How far heads moved",
      "Drift is 1 − PK/rank of a weight's subspace: 0 for the same span, 1 for orthogonal spans.",
      HS.el("div", { class: "controls" },
        HS.select("against", "against", [["from_previous", "the previous step"], ["from_last", "the last step"]])),
        drifted, map);
    const paint = ports(map);
    const places = Object.fromEntries(ROLES.map((role) =>
      [role, new Map(data.heads[role].map(([name], i) => [name, i]))]));
    const behaviour = behaviours();
    const update = () => {
      const step = Number(HS.state.step), chosen = HS.state.pairings.split(","), top = Number(HS.state.top);
      slider.value = String(step);
      many.value = HS.state.top;
      shown.textContent = `step ${HS.count(data.steps[step][0])} (${step + 1} of ${steps})`;
      slider.setAttribute("aria-valuetext", data.steps[step][1]);
      const among = (s, i) => s !== null && ranks[s * count + i] >= 1 && ranks[s * count + i] <= top;
      const other = { previous: step > 0 ? step - 1 : null, first: 0, last: steps - 1 }[HS.state.with] ?? null;
      const edges = data.edge_list.flatMap(([pairing, source, target], i) => {
        const now = among(step, i), then = among(other, i), at = now ? step : other;
        if (!chosen.includes(pairing) || !(now || then)) return [];
        const score = scores[at * count + i], look = other === null ? "" : now && then ? "kept" : now ? "entered"
          : "left";
        return [{ pairing, source, target, look, strength: strengths ? strengths[at * count + i]
          : Math.max(0, score / largest[pairing]),
          text: `${source} → ${target} (${pairing})${look ? `, ${look}` : ""}\nPK ${HS.number(score, 3)}, rank `
            + `${ranks[at * count + i]}${now ? "" : ` at step ${data.steps[at][0]}`}` }];
      });
      // One layout for all steps, so that nothing jumps while the slider moves.
      const planned = `${HS.state.pairings} ${top}`;
      if (drawn !== planned) {
        const ever = data.edge_list.flatMap(([pairing, source, target], i) =>
          (chosen.includes(pairing) && data.steps.some((_, s) => among(s, i)) ? [{ pairing, source, target }] : []));
        draw = HS.flow.draw(box, HS.flow.plan(ever, about), "arrow", "Wiring diagram", tips);
        drawn = planned;
      }
      draw(edges);
      const counts = ["entered", "left",
        "kept"].map((look) => [look, edges.filter((e) => e.look === look).length]).filter(([, n]) => n);
      const now = HS.plural(edges.filter((e) => e.look !== "left").length, "edge");
      const kinds = counts.map(([look, n]) => `${n} ${look}`).join(", ");
      hint.textContent = `${data.steps[step][1]}: ${now}`
        + (counts.length ? ` (${kinds}, against ${data.steps[other][1]})` : "");
      redraw(step);
      const kind = HS.state.against;
      const value = (port) => { const [name, role] = port.split(".");
        return drift[kind][role][step * data.heads[role].length + places[role].get(name)]; };
      const most = paint(value, (port, v) => `${port}\ndrift ${HS.number(v, 5)}`);
      drifted.textContent = kind === "from_previous" && step === 0 ? "The first step has no previous step."
        : `Darkest: drift ${HS.number(most, 4)}.`;
      behaviour(step);
    };
    HS.on(["step", "pairings", "top", "against", "with", "theme"], update);
    update();
  };
  const lines = (box, scores, count) => {
    const width = 380, height = 190, left = 34, bottom = 22, first = data.steps[0][0], last = data.steps.at(-1)[0];
    const marks = [];
    for (const [pairing] of pairings) {
      const mine = data.edge_list.flatMap((edge, i) => (edge[0] === pairing ? [i] : []));
      const values = mine.flatMap((i) => data.steps.map((_, s) => scores[s * count + i])).filter(Number.isFinite);
      if (!values.length) continue;
      const low = Math.min(...values), high = Math.max(...values);
      const x = (s) => left + ((data.steps[s][0] - first) / Math.max(1, last - first)) * (width - left - 6);
      const y = (value) => height - bottom - ((value - low) / Math.max(1e-9, high - low)) * (height - bottom - 18);
      const svg = HS.svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
        "aria-label": `PK of ${pairing} edges over steps` });
      for (const i of mine) {
        const dots = data.steps.map((_, s) => [x(s), y(scores[s * count + i])]).filter(([, at]) => Number.isFinite(at));
        const points = dots.map(([across, down]) => `${across.toFixed(1)},${down.toFixed(1)}`);
        svg.append(HS.svg("polyline", { class: `course edge to-${pairing[1]}`, points: points.join(" ") }));
      }
      const now = HS.svg("line", { class: "now", y1: 14, y2: height - bottom });
      svg.append(HS.svg("line", { class: "axis", x1: left, x2: width - 6, y1: height - bottom, y2: height - bottom }),
        now,
        HS.svg("text", { x: left, y: 11, text: `${pairing}: PK` }),
          HS.svg("text", { x: 2, y: y(high) + 8, text: HS.number(high, 1) }),
          HS.svg("text", { x: 2, y: y(low), text: HS.number(low, 1) }),
        HS.svg("text", { x: left, y: height - 8, text: String(first) }),
          HS.svg("text", { x: width - 50, y: height - 8, text: String(last) }));
      marks.push([now, x]);
      box.append(svg);
    }
    box.style.setProperty("display", "flex");
    box.style.setProperty("flex-wrap", "wrap");
    return (step) => { for (const [now, x] of marks) for (const end of ["x1", "x2"]) now.setAttribute(end, x(step)); };
  };
  const behaviours = () => {
    if (!data.head_scores.length) return () => {};
    const arrays = data.head_scores.map(({ values }) => HS.decode(values, Float32Array)),
      list = HS.el("div", { id: "head-scores" });
    section("behaviour", "Head scores at this step", "Mean attention on random sequences repeated twice.", list);
    return (step) => {
      const rows = data.query.map((head, i) =>
        ({ head, ...Object.fromEntries(data.head_scores.map(({ kind }, j) =>
        [kind, arrays[j][step * data.query.length + i]])) }));
      list.replaceChildren(HS.table([column("head", "head"),
        ...data.head_scores.map(({ kind, title }) => column(kind, title, 3))], rows,
        { file: "head-scores", sort: { column: data.head_scores.at(-1).kind, down: true } }));
    };
  };

  // ---------------------------------------------------------------- start
  HS.defaults = { pairings: "OQ,OK,OV", kinds: "entered,left,kept,strengthened,weakened", view: "over", with: "",
    step: String((data.steps?.length ?? 1) - 1), top: String(Math.min(data.k, 10)), against: "from_previous", theme: "",
    head: "", pair: "" };
  const sound = (state) => {
    if (!/^\d{1,6}$/.test(state.step) || Number(state.step) >= (data.steps?.length ?? 1)) state.step = HS.defaults.step;
    if (!/^\d{1,5}$/.test(state.top) || Number(state.top) < 1
      || Number(state.top) > data.k) state.top = HS.defaults.top;
    if (!["from_previous", "from_last"].includes(state.against)) state.against = HS.defaults.against;
    if (!["over", "beside"].includes(state.view)) state.view = "over";
    if (!["", "previous", "first", "last"].includes(state.with)) state.with = "";
    if (!["", "light", "dark"].includes(state.theme)) state.theme = "";
    return state;
  };
  const dark = () => (HS.state.theme ? HS.state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const paintTheme = (isDark = dark()) => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    HS.byId("theme").textContent = isDark ? "Light" : "Dark";
    HS.byId("theme").setAttribute("aria-pressed", String(isDark));
  };
  HS.state = sound(HS.parse(location.hash));
  paintTheme();
  HS.listeners.unshift((changed) => { if (changed.has("theme")) paintTheme(); });
  HS.byId("share").addEventListener("click", () => HS.copy(location.href, HS.byId("share")));
  HS.byId("theme").addEventListener("click", () => HS.set({ theme: dark() ? "light" : "dark" }));
  window.addEventListener("beforeprint", () => paintTheme(false)); // paper is white
  window.addEventListener("afterprint", () => paintTheme());
  window.addEventListener("hashchange", () => { const before = HS.state; HS.state = sound(HS.parse(location.hash));
    HS.announce(before); });
  overview();
  if (series) startSeries(); else startDiff();
  document.documentElement.dataset.ready = "true";
})();

// Task circuits: the best edges of a task in their own layout, the faithfulness of circuits, and a table.
"use strict";
HS.task = (() => {
  const DRAWN = 120, FEW = 40; // edges in the diagram, and in a circuit of unknown size
  const data = HS.data;
  let diagram = null, curve = null, table = null, status = null, slider = null, output = null, wire = null;

  const words = {
    attribution: "An estimate, from gradients, of how the task's value changes if an edge carries what it carries on " +
      "the corrupted prompt. Negative: the edge helps. Exact is that change measured. Frequency is how often the " +
      "edge is among the best when the prompts are drawn again.",
    faithfulness: "The share of the task's value that is left if the edges of a circuit carry what they carry on the " +
      "clean prompt, and all others what they carry on the corrupted one: 1 for the whole model, 0 for no edges.",
  };
  if (data.tasks.length) {
    Object.assign(HS.words, words);
    const column = "attribution";
    Object.assign(HS.glossary.columns, { Attribution: column, Exact: column, Frequency: column });
  }

  // ---------------------------------------------------------------- data
  const decoded = new Map();
  const task = () => data.tasks[Number(HS.state.task) - 1];
  const port = (text) => ({ name: text.slice(0, text.lastIndexOf(".")), role: text.at(-1) });

  // All edges of the page, best first, each with what is known about it.
  const edgesOf = (one) => {
    if (!decoded.has(one)) decoded.set(one, decode(one));
    return decoded.get(one);
  };
  const decode = (one) => {
    const numbers = (text) => HS.decode(text, Float32Array);
    const attribution = numbers(one.attribution), exact = numbers(one.exact), frequency = numbers(one.frequency);
    const kept = one.in_circuit ? HS.decode(one.in_circuit, Uint8Array) : null;
    const columns = one.columns.map((column) => [column.key, numbers(column.values)]);
    return one.edges.map(([from, to], i) => {
      const a = port(from), b = port(to), pairing = a.role + b.role;
      return {
        place: i + 1, from, to, source: a.name, target: b.name, pairing,
        pair: HS.pairOf(`${from}-${to}`) ? `${from}-${to}` : null, // where it has a card
        attribution: attribution[i], exact: exact[i], frequency: frequency[i], in_circuit: kept ? kept[i] > 0 : null,
        ...Object.fromEntries(columns.map(([key, values]) => [key, values[i]])),
      };
    });
  };

  // The size of the circuit that is shown: chosen, that of the task, or a few edges.
  const size = (one) => {
    const most = one.edges.length, own = one.largest && one.circuit <= most ? one.circuit : Math.min(FEW, most);
    return Math.max(1, Math.min(most, HS.state.edges === "" ? own : Number(HS.state.edges)));
  };

  // Measured circuits of the largest attributions: those of the curve, and the task's own.
  const points = (one) => {
    const found = new Map(one.curve);
    if (one.largest && one.faithfulness !== null) found.set(one.circuit, one.faithfulness);
    return [...found].sort((a, b) => a[0] - b[0]);
  };

  // ---------------------------------------------------------------- text
  const about = (one) => {
    const { prompts, solved, clean, corrupted } = one.values;
    return [
      `Task ${one.name}: attributions of ${HS.count(one.n_edges)} edges${one.method ? ` by ${one.method}` : ""} on`,
      `${prompts} prompts, of which ${HS.number(100 * solved, 0)} % are solved. Mean ${one.objective}:`,
      `${HS.number(clean, 2)}, and ${HS.number(corrupted, 2)} on the corrupted prompts.`,
      one.cpr === null ? "" : `CPR ${HS.number(one.cpr, 3)}, CMD ${HS.number(one.cmd, 3)}.`,
      one.interrupted ? "The run was interrupted." : "",
    ].filter(Boolean).join(" ");
  };

  const faithfulness = (one, n) => {
    const known = points(one), prompts = one.held_out ? ` on ${one.held_out.prompts} held-out prompts` : "";
    const start = `${HS.count(n)} of ${HS.count(one.n_edges)} edges`;
    if (!known.length) return `${start}. The faithfulness of circuits was not measured.`;
    const here = known.find(([edges]) => edges === n);
    if (here) return `${start}: faithfulness ${HS.number(here[1], 2)}${prompts}.`;
    const near = [known.findLast(([edges]) => edges < n), known.find(([edges]) => edges > n)].filter(Boolean);
    const said = near.map(([edges, f]) => `${HS.number(f, 2)} with ${HS.count(edges)}`).join(", ");
    return `${start}: not measured at this size; faithfulness is ${said} edges${prompts}.`;
  };

  // What to say about the task's own circuit where the page cannot show it as it is.
  const given = (one) => {
    if (one.circuit === null || (one.largest && one.circuit <= one.edges.length)) return "";
    const f = one.faithfulness === null ? "" : `, faithfulness ${HS.number(one.faithfulness, 2)}`;
    const size = `${HS.count(one.circuit)} edges${f}`, page = HS.count(one.edges.length);
    if (one.largest) return `The circuit of this task has ${size}; this page has the best ${page}.`;
    const inside = edgesOf(one).filter((edge) => edge.in_circuit).length;
    return `The circuit of this task was given: ${size}; ${HS.count(inside)} of them are among the ${page} here.`;
  };

  // ---------------------------------------------------------------- curve
  // Faithfulness over the number of edges, on a logarithmic scale, with a line at the current size.
  const drawCurve = (one, n) => {
    const W = 330, H = 150, x0 = 34, x1 = 322, y0 = 122, y1 = 12, known = points(one);
    if (!known.length) return [];
    const values = known.map(([, f]) => f), top = Math.max(1, ...values), low = Math.min(0, ...values);
    const x = (edges) => (x0 + ((x1 - x0) * Math.log(edges)) / Math.log(Math.max(2, one.n_edges))).toFixed(1);
    const y = (f) => (y0 - ((y0 - y1) * (f - low)) / (top - low)).toFixed(1);
    const said = ([edges, f]) => `${HS.number(f, 2)} with ${HS.count(edges)} edges`;
    const point = ([edges, f]) => HS.svg("circle", {
      cx: x(edges), cy: y(f), r: edges === n ? 4.5 : 2.8, class: edges === n ? "here" : "",
      "data-edges": edges, "data-faithfulness": f,
    }, HS.svg("title", { text: said([edges, f]) }));
    const note = (at, height, anchor, text) => HS.svg("text", { x: at, y: height, "text-anchor": anchor, text });
    const ticks = [1, 10, 100, 1000, 10000, 100000].filter((edges) => edges <= one.n_edges);
    const label = `Faithfulness of circuits: ${said(known[0])} to ${said(known.at(-1))}`;
    return [HS.svg("svg", { class: "task-curve", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label },
      HS.svg("path", { class: "axis", d: `M${x0} ${y1} V${y0} H${x1}` }),
      HS.svg("path", { class: "whole", d: `M${x0} ${y(1)} H${x1}` }),
      HS.svg("path", { class: "now", d: `M${x(n)} ${y1} V${y0}`, "data-edges": n }),
      HS.svg("path", { class: "course", d: `M${known.map(([edges, f]) => `${x(edges)} ${y(f)}`).join("L")}` }),
      ...known.map(point), ...[0, 1].map((f) => note(x0 - 6, Number(y(f)) + 4, "end", String(f))),
      ...ticks.map((edges) => note(x(edges), y0 + 14, "middle", HS.count(edges))),
      note(x1, H - 3, "end", "edges kept (log scale)"), note(x0 + 6, y1 + 16, "start", "faithfulness"))];
  };

  // ---------------------------------------------------------------- diagram
  const end = Math.max(...data.model.layers) + 1; // the unembedding comes after the last layer
  const level = (position) => Math.min(Math.floor(position / 2), end);
  const title = (position) => {
    if (position < 0) return "Embed";
    if (level(position) === end) return "Logits";
    return position % 2 ? `MLP ${(position - 1) / 2}` : `L${position / 2}`;
  };
  const tips = (element, text) => {
    element.addEventListener("pointermove", (event) => HS.tip(text(), event));
    element.addEventListener("pointerleave", () => HS.tip(""));
  };
  const tip = (edge) => `${edge.from} → ${edge.to}\nattribution ${HS.number(edge.attribution, 3)}` +
    (Number.isNaN(edge.exact) ? "" : `, exact ${HS.number(edge.exact, 3)}`);

  const drawDiagram = (one, edges) => {
    const most = Math.abs(edgesOf(one)[0].attribution), names = one.nodes.map(([name]) => name);
    const lines = edges.slice(0, DRAWN).map((edge) => ({
      ...edge, text: tip(edge), look: edge.attribution > 0 ? "against" : "",
      strength: most ? Math.abs(edge.attribution) / most : 0,
    }));
    const plan = HS.flow.plan(lines, {
      names, layer: Object.fromEntries(one.nodes.map(([name, , position]) => [name, position])),
      kv: Object.fromEntries(names.map((name) => [name, HS.model.kvOf(name)])), title, level,
      label: (name) => (name === "embedding" ? "embed" : name),
    });
    const label = `The ${lines.length} edges with the largest attributions, from the embedding to the logits; ` +
      "the table lists them";
    HS.flow.draw(diagram, plan, "task-arrow", label, tips)(lines);
    legend(lines, edges.length, most);
  };

  const READS = { Q: "queries", K: "keys", V: "values", R: "MLPs and logits" };
  const legend = (lines, count, most) => {
    const roles = Object.keys(READS).filter((role) => lines.some((edge) => edge.pairing[1] === role));
    const swatch = (role) => HS.el("i", { class: "swatch", css: { background: `var(--role-${role})` } });
    const notes = [`Width: size of the attribution, at most ${HS.number(most, 2)}`];
    if (lines.some((edge) => edge.look)) notes.push("Dashed: works against the answer");
    if (diagram.scrollWidth > diagram.clientWidth) notes.push("Scroll the diagram for later layers");
    if (lines.length < count) notes.push(`Drawn: the best ${lines.length} of these ${count} edges`);
    HS.byId("task-legend").replaceChildren(...roles.map((role) =>
      HS.el("span", {}, swatch(role), `read by ${READS[role]}`)),
      ...notes.map((text) => HS.el("span", { text })));
  };

  // ---------------------------------------------------------------- table
  const link = (text, onclick, hint) => HS.el("button", { type: "button", class: "link", text, title: hint, onclick });
  const side = (key, at, heading) => ({ key: at, title: heading, node: (e) => (HS.model.exists(e[key])
    ? link(e[at], () => HS.openHead(e[key])) : HS.el("span", { class: "mono", text: e[at] })) });
  const attribution = { key: "attribution", title: "Attribution", number: true, node: (e) => {
    const text = HS.number(e.attribution, 3);
    if (!e.pair) return HS.el("span", { text });
    return link(text, () => HS.choosePair(e.pairing, e.source, e.target), "Open the pair card");
  } };
  const number = (key, heading, digits) =>
    ({ key, title: heading, number: true, text: (e) => HS.number(e[key], digits) });

  const listed = (one, edges) => HS.table([
    { key: "place", title: "#", number: true }, side("source", "from", "Source"), side("target", "to", "Target"),
    attribution, number("exact", "Exact", 3), number("frequency", "Frequency", 2),
    ...(one.circuit !== null && !one.largest
      ? [{ key: "in_circuit", title: "In circuit", text: (e) => (e.in_circuit ? "yes" : "no") }] : []),
    ...one.columns.map((column) => number(column.key, column.title, column.key.endsWith("_rank") ? 0 : 3)),
  ], edges, { file: `task-${one.name}`, shown: 15, key: (e) => e.pair ?? "" });

  // ---------------------------------------------------------------- the part
  const draw = () => {
    const one = task(), n = size(one), edges = edgesOf(one).slice(0, n);
    const pairs = edges.filter((edge) => edge.pair).length;
    slider.max = one.edges.length;
    slider.value = n;
    output.textContent = `${HS.count(n)} ${n === 1 ? "edge" : "edges"}`;
    status.textContent = faithfulness(one, n);
    HS.byId("task-about").textContent = `${about(one)} ${given(one)}`.trim();
    curve.replaceChildren(...drawCurve(one, n));
    drawDiagram(one, edges);
    table.replaceChildren(listed(one, edges));
    wire.disabled = !pairs;
    wire.textContent = `Show in wiring: ${pairs} ${pairs === 1 ? "edge" : "edges"} between heads`;
  };

  // One step in the history: the edges between heads become the pinned circuit, which is shown alone.
  const show = () => {
    const one = task(), pins = edgesOf(one).slice(0, size(one)).map((edge) => edge.pair).filter(Boolean);
    const circuit = { pins: pins.slice(0, 400).join("|"), circuit: one.name.slice(0, 80), only: "1" };
    HS.set({ ...circuit, head: "", pair: "", at: "wiring" }, true);
    HS.byId("wiring").scrollIntoView();
  };

  const build = () => {
    const count = (name) => data.tasks.filter((one) => one.name === name).length;
    const named = data.tasks.map((one, i) =>
      [String(i + 1), count(one.name) > 1 ? `${one.name} (${one.method || i + 1})` : one.name]);
    slider = HS.el("input", { type: "range", id: "control-edges", min: 1, step: 1,
      oninput: (event) => HS.set({ edges: event.target.value }) });
    output = HS.el("output", { for: "control-edges" });
    status = HS.el("p", { class: "hint", id: "task-status", role: "status" });
    wire = HS.el("button", { type: "button", id: "task-wire", onclick: show });
    [curve, table] = [HS.el("div"), HS.el("div", { id: "task-table" })];
    diagram = HS.el("div", { class: "diagram wide", id: "task-diagram", tabindex: "0", role: "region",
      "aria-label": "Circuit of the task" });
    HS.byId("task-body").append(
      data.tasks.length > 1 ? HS.select("Task", "task", named) : "", HS.el("p", { class: "lead", id: "task-about" }),
      HS.el("div", { class: "task-top" }, HS.el("div", {},
        HS.el("label", { class: "field", for: "control-edges", text: "Edges in the circuit" }),
        HS.el("div", { class: "task-slider" }, slider, output), status, wire), curve),
      HS.el("div", { class: "diagram-box" }, diagram), HS.el("div", { class: "legend", id: "task-legend" }), table);
  };

  const start = () => {
    if (!data.tasks.length) return;
    HS.byId("task").hidden = false;
    build();
    const later = HS.lazy(HS.byId("task"), draw);
    HS.on(["task"], () => { if (HS.state.edges !== "") HS.set({ edges: "" }); });
    HS.on(["task", "edges", "theme"], later);
    window.addEventListener("resize", later);
  };
  return { start, edgesOf, size, points };
})();

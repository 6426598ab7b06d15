// Task circuits: the best edges of a task in their own layout, the faithfulness of circuits, and a table.
"use strict";
HS.task = (() => {
  const DRAWN = 120, FEW = 40; // edges in the diagram, and in a circuit of unknown size
  const data = HS.data;
  let diagram = null, curve = null, table = null, status = null, slider = null, output = null, wire = null;

  // ---------------------------------------------------------------- data
  const decoded = new Map();
  const task = () => data.tasks[Number(HS.state.task) - 1];
  const port = (text) => { const at = text.lastIndexOf("."); return { name: text.slice(0, at), role: text.slice(at + 1) }; };

  // All edges of the page, best first, each with what is known about it.
  const edgesOf = (one) => {
    if (!decoded.has(one)) {
      const [attribution, exact, frequency] = ["attribution", "exact", "frequency"].map((key) => HS.decode(one[key], Float32Array));
      const kept = one.in_circuit ? HS.decode(one.in_circuit, Uint8Array) : null;
      const columns = one.columns.map((column) => [column.key, HS.decode(column.values, Float32Array)]);
      decoded.set(one, one.edges.map(([from, to], i) => {
        const a = port(from), b = port(to), pairing = a.role + b.role;
        const known = data.pairings.includes(pairing) && HS.pairOf(`${from}-${to}`) !== null;
        return {
          place: i + 1, source: a.name, target: b.name, pairing, from, to, pair: known ? `${from}-${to}` : null,
          attribution: attribution[i], exact: exact[i], frequency: frequency[i], in_circuit: kept ? kept[i] > 0 : null,
          ...Object.fromEntries(columns.map(([key, values]) => [key, values[i]])),
        };
      }));
    }
    return decoded.get(one);
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
    return `${one.name}, attributions of ${HS.count(one.n_edges)} edges${one.method ? ` by ${one.method}` : ""} on ${prompts} prompts, of which ${HS.number(100 * solved, 0)} % are solved. ` +
      `Mean ${one.objective}: ${HS.number(clean, 2)}, and ${HS.number(corrupted, 2)} on the corrupted prompts.` +
      (one.cpr === null ? "" : ` CPR ${HS.number(one.cpr, 3)}, CMD ${HS.number(one.cmd, 3)}.`) + (one.interrupted ? " The run was interrupted." : "");
  };

  const faithfulness = (one, n) => {
    const known = points(one), prompts = one.held_out ? ` on ${one.held_out.prompts} held-out prompts` : "";
    const start = `${HS.count(n)} of ${HS.count(one.n_edges)} edges`;
    if (!known.length) return `${start}. The faithfulness of circuits was not measured.`;
    const here = known.find(([edges]) => edges === n);
    if (here) return `${start}: faithfulness ${HS.number(here[1], 2)}${prompts}.`;
    const below = known.findLast(([edges]) => edges < n), above = known.find(([edges]) => edges > n);
    const said = [below, above].filter(Boolean).map(([edges, f]) => `${HS.number(f, 2)} with ${HS.count(edges)}`);
    return `${start}: not measured at this size; faithfulness is ${said.join(", ")} edges${prompts}.`;
  };

  const given = (one) => {
    if (one.circuit === null) return null;
    const inside = edgesOf(one).filter((edge) => edge.in_circuit).length, f = one.faithfulness === null ? "" : `, faithfulness ${HS.number(one.faithfulness, 2)}`;
    if (!one.largest) return `The circuit of this task was given: ${HS.count(one.circuit)} edges${f}; ${HS.count(inside)} of them are among the ${one.edges.length} here.`;
    return one.circuit > one.edges.length ? `The circuit of this task has ${HS.count(one.circuit)} edges${f}; this page has the best ${one.edges.length}.` : null;
  };

  // ---------------------------------------------------------------- curve
  // Faithfulness over the number of edges, on a logarithmic scale, with a line at the current size.
  const drawCurve = (one, n) => {
    const W = 330, H = 150, x0 = 34, x1 = 322, y0 = 122, y1 = 12, known = points(one);
    if (!known.length) return [];
    const top = Math.max(1, ...known.map(([, f]) => f)), low = Math.min(0, ...known.map(([, f]) => f));
    const x = (edges) => x0 + ((x1 - x0) * Math.log(edges)) / Math.log(Math.max(2, one.n_edges));
    const y = (f) => y0 - ((y0 - y1) * (f - low)) / (top - low);
    const label = `Faithfulness of circuits of ${HS.count(known[0][0])} to ${HS.count(known.at(-1)[0])} edges, from ${HS.number(known[0][1], 2)} to ${HS.number(known.at(-1)[1], 2)}`;
    const picture = HS.svg("svg", { class: "task-curve", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
    picture.append(
      HS.svg("path", { class: "axis", d: `M${x0} ${y1} V${y0} H${x1}` }), HS.svg("path", { class: "whole", d: `M${x0} ${y(1).toFixed(1)} H${x1}` }),
      HS.svg("path", { class: "now", d: `M${x(n).toFixed(1)} ${y1} V${y0}`, "data-edges": n }),
      HS.svg("path", { class: "course", d: known.map(([edges, f], i) => `${i ? "L" : "M"}${x(edges).toFixed(1)} ${y(f).toFixed(1)}`).join("") }),
      ...known.map(([edges, f]) => HS.svg("circle", { cx: x(edges).toFixed(1), cy: y(f).toFixed(1), r: edges === n ? 4.5 : 2.8, class: edges === n ? "here" : "", "data-edges": edges, "data-faithfulness": f },
        HS.svg("title", { text: `${HS.count(edges)} edges: ${HS.number(f, 3)}` }))),
      ...[0, 1].map((f) => HS.svg("text", { x: x0 - 6, y: y(f) + 4, "text-anchor": "end", text: String(f) })),
      ...[1, 10, 100, 1000, 10000, 100000].filter((edges) => edges <= one.n_edges).map((edges) => HS.svg("text", { x: x(edges), y: y0 + 14, "text-anchor": "middle", text: HS.count(edges) })),
      HS.svg("text", { x: x1, y: H - 3, "text-anchor": "end", text: "edges kept (log scale)" }), HS.svg("text", { x: x0 + 6, y: y1 + 2, text: "faithfulness" }),
    );
    return [picture];
  };

  // ---------------------------------------------------------------- diagram
  const title = (position) => (position < 0 ? "Embed" : position > 2 ** 30 ? "Logits" : position % 2 ? `MLP ${(position - 1) / 2}` : `L${position / 2}`);
  const last = Math.max(...data.model.layers) + 1;
  const tips = (element, text) => {
    element.addEventListener("pointermove", (event) => HS.tip(text(), event));
    element.addEventListener("pointerleave", () => HS.tip(""));
  };

  const drawDiagram = (one, edges) => {
    const most = Math.abs(edgesOf(one)[0].attribution), layer = Object.fromEntries(one.nodes.map(([name, , position]) => [name, position]));
    const lines = edges.slice(0, DRAWN).map((edge) => ({
      ...edge, strength: most ? Math.abs(edge.attribution) / most : 0, look: edge.attribution > 0 ? "against" : "",
      text: `${edge.from} → ${edge.to}\nattribution ${HS.number(edge.attribution, 3)}${Number.isNaN(edge.exact) ? "" : `, exact ${HS.number(edge.exact, 3)}`}`,
    }));
    const names = one.nodes.map(([name]) => name);
    const plan = HS.flow.plan(lines, {
      names, layer, kv: Object.fromEntries(names.map((name) => [name, HS.model.kvOf(name)])), title,
      level: (position) => Math.min(Math.floor(position / 2), last), label: (name) => (name === "embedding" ? "embed" : name),
    });
    HS.flow.draw(diagram, plan, "task-arrow", `The ${lines.length} edges with the largest attributions, from the embedding to the logits; the table lists them`, tips)(lines);
    const legend = `Width: size of the attribution; the largest is ${HS.number(most, 2)}. Dashed: the edge works against the answer. Colour: what reads (queries, keys, values, or MLPs and logits).`;
    return lines.length < edges.length ? `${legend} The diagram draws the best ${lines.length} of these edges.` : legend;
  };

  // ---------------------------------------------------------------- table
  const number = (key, text, digits) => ({ key, title: text, number: true, text: (e) => HS.number(e[key], digits) });
  const end = (key, at) => ({ key: at, title: key === "source" ? "Source" : "Target", node: (e) => (HS.model.exists(e[key]) ? HS.el("button", { type: "button", class: "link", text: e[at], onclick: () => HS.openHead(e[key]) }) : HS.el("span", { class: "mono", text: e[at] })) });
  const listed = (one, edges) => HS.table([
    { key: "place", title: "#", number: true }, end("source", "from"), end("target", "to"),
    { key: "attribution", title: "Attribution", number: true, node: (e) => (e.pair
      ? HS.el("button", { type: "button", class: "link", text: HS.number(e.attribution, 3), title: "Open the pair card", onclick: () => HS.choosePair(e.pairing, e.source, e.target) })
      : HS.el("span", { text: HS.number(e.attribution, 3) })) },
    number("exact", "Exact", 3), number("frequency", "Frequency", 2),
    ...(one.circuit !== null && !one.largest ? [{ key: "in_circuit", title: "In circuit", text: (e) => (e.in_circuit ? "yes" : "no") }] : []),
    ...one.columns.map((c) => number(c.key, c.title, c.key.endsWith("_rank") ? 0 : 3)),
  ], edges, { file: `task-${one.name}`, shown: 15, key: (e) => e.pair ?? "" });

  // ---------------------------------------------------------------- the part
  const draw = () => {
    const one = task(), n = size(one), edges = edgesOf(one).slice(0, n), pairs = edges.map((e) => e.pair).filter(Boolean);
    slider.max = one.edges.length;
    slider.value = n;
    slider.setAttribute("aria-valuetext", `${n} edges`);
    output.textContent = `${HS.count(n)} edges`;
    status.textContent = faithfulness(one, n);
    HS.byId("task-about").textContent = [about(one), given(one)].filter(Boolean).join(" ");
    curve.replaceChildren(...drawCurve(one, n));
    HS.byId("task-legend").textContent = drawDiagram(one, edges);
    table.replaceChildren(listed(one, edges));
    wire.disabled = !pairs.length;
    wire.textContent = `Show in wiring: ${pairs.length} ${pairs.length === 1 ? "edge" : "edges"} between heads`;
  };

  // One step in the history: the edges between heads become the pinned circuit, which is shown alone.
  const show = () => {
    const one = task(), pins = edgesOf(one).slice(0, size(one)).map((e) => e.pair).filter(Boolean);
    HS.set({ pins: pins.slice(0, 400).join("|"), circuit: one.name.slice(0, 80), only: "1", head: "", pair: "", at: "wiring" }, true);
    HS.byId("wiring").scrollIntoView();
  };

  const start = () => {
    if (!data.tasks.length) return;
    HS.byId("task").hidden = false;
    const count = (name) => data.tasks.filter((one) => one.name === name).length;
    const named = data.tasks.map((one, i) => [String(i + 1), count(one.name) > 1 ? `${one.name} (${one.method || i + 1})` : one.name]);
    slider = HS.el("input", { type: "range", id: "control-edges", min: 1, step: 1, oninput: (event) => HS.set({ edges: event.target.value }) });
    output = HS.el("output", { for: "control-edges" });
    status = HS.el("p", { class: "hint", id: "task-status", role: "status" });
    wire = HS.el("button", { type: "button", id: "task-wire", onclick: show });
    [curve, table] = [HS.el("div"), HS.el("div", { id: "task-table" })];
    diagram = HS.el("div", { class: "diagram wide", id: "task-diagram", tabindex: "0", role: "region", "aria-label": "Circuit of the task" });
    HS.byId("task-body").append(
      HS.el("p", { class: "lead", id: "task-about" }),
      HS.el("div", { class: "task-top" }, HS.el("div", {}, data.tasks.length > 1 ? HS.select("Task", "task", named) : null,
        HS.el("label", { class: "field", for: "control-edges" }, HS.el("span", { text: "Edges in the circuit" })), HS.el("div", { class: "task-slider" }, slider, output), status, wire), curve),
      HS.el("div", { class: "diagram-box" }, diagram), HS.el("p", { class: "hint", id: "task-legend" }), table);
    const later = HS.lazy(HS.byId("task"), draw);
    HS.on(["task"], () => { if (HS.state.edges !== "") HS.set({ edges: "" }); });
    HS.on(["task", "edges", "theme"], later);
    window.addEventListener("resize", later);
  };
  return { start, edgesOf, size, points };
})();

// A circuit: edges that the reader pins one by one. It has a name, is part of the page's address, can be drawn alone
// and saved as JSON.
"use strict";
HS.circuit = (() => {
  const keys = () => HS.state.pins.split("|").filter((key) => HS.pairOf(key));
  const edgeOf = (key) => {
    const { pairing, source, target, row, column } = HS.pairOf(key);
    const edge = HS.model.findEdge(HS.state.metric, pairing, row, column);
    if (edge) return edge;
    const { score, exact } = HS.model.value(HS.state.metric, pairing, row, column),
      { start, most } = HS.model.limits(HS.state.metric, pairing, row, column);
    const strength = Number.isNaN(score) ? 0 : Math.max(0, Math.min(1, (score - start) / (most - start)));
    return { metric: HS.state.metric, pairing, source, target, score, rank: 0, strength, evidence: null, exact,
      z: null, q: { random: null, reversed: null, within: null }, effect: null, percentile: null, large: null,
      ratio: null };
  };
  const edges = () => keys().map(edgeOf);
  const key = (edge) => `${edge.source}.${edge.pairing[0]}-${edge.target}.${edge.pairing[1]}`;
  const has = (edge) => keys().includes(key(edge));
  const set = (list, more = {}) => HS.set({ pins: [...new Set(list)].join("|"), ...more }, true);
  // more: other changes of the view that belong to the same step in the history.
  const toggle = (edge, more) => set(has(edge) ? keys().filter((k) => k !== key(edge)) : [...keys(), key(edge)], more);
  const add = (list) => set([...keys(), ...list]);
  const alone = () => HS.state.only === "1" && keys().length > 0;

  const button = (edge) => HS.el("button", {
    type: "button", class: "pin", "aria-pressed": String(has(edge)), "data-pin": key(edge),
    "aria-label": `${has(edge) ? "Unpin" : "Pin"} ${edge.source} → ${edge.target} (${edge.pairing})`,
    title: has(edge) ? "Remove from the circuit" : "Add to the circuit", text: has(edge) ? "−" : "+",
    onclick: () => toggle(edge),
  });

  // The format that the command line and Python read.
  const content = () => {
    const list = edges();
    return { format: "headspan circuit", version: 1, name: HS.state.circuit || "circuit",
      model: HS.data.model.reference,
      nodes: [...new Set(list.flatMap((e) => [e.source, e.target]).map(HS.model.own))],
      edges: list.map((e) => ({ source: `${HS.model.own(e.source)}.${e.pairing[0]}`,
        target: `${HS.model.own(e.target)}.${e.pairing[1]}`, metric: e.metric,
        score: Number.isNaN(e.score) ? null : e.score })) };
  };

  const file = () => (HS.state.circuit || "circuit").replace(/[^\w.-]+/g, "-").slice(0, 60) || "circuit";

  const show = () => {
    const box = HS.byId("circuit"), list = edges();
    if (!list.length) {
      box.replaceChildren(HS.el("p", { class: "hint",
        text: "To collect a circuit, select a head and press + next to a partner in its card. The page then moves on "
          + "to that partner." }));
      return;
    }
    const name = HS.el("input", { type: "text", id: "circuit-name", maxlength: 80, placeholder: "circuit",
      value: HS.state.circuit, oninput: (event) => HS.set({ circuit: event.target.value }) });
    box.replaceChildren(
      HS.el("div", { class: "circuit-bar" },
        HS.el("label", { class: "field inline" }, HS.el("span", { text: "Circuit" }), name),
        HS.el("button", { type: "button", id: "circuit-save", text: "Save JSON",
          onclick: () => HS.download(`${file()}.json`, `${JSON.stringify(content(), null, 1)}\n`,
          "application/json") }),
        HS.el("button", {
          type: "button", id: "circuit-only", "aria-pressed": String(alone()), text: "Only this circuit",
          title: "Draw these edges alone, with a layout of their own",
          onclick: () => HS.set({ only: alone() ? "" : "1" }, true),
        }),
        HS.el("button", { type: "button", text: "Clear", onclick: () => set([]) })),
      HS.el("ul", { class: "pins" }, ...list.map((edge) =>
        HS.el("li", {}, HS.pairLink(edge.pairing, edge.source, edge.target),
        HS.el("span", { text: `${edge.pairing} ${HS.score(edge.score, edge.metric)}` }), button(edge)))),
    );
  };

  const start = () => { show(); HS.on(["pins", "metric", "only"], show); };
  return { keys, edges, alone, has, toggle, add, button, content, start };
})();

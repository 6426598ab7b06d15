// The controls of the wiring diagram, the shading of heads and the legend.
"use strict";
HS.controls = (() => {
  const RULES = [["top", "best k per pairing"], ["top-per-target", "best k per target"], ["significance", "significant (q-value)"], ["threshold", "all above minimum"]];
  const QS = ["0.05", "0.01", "0.001", "0.000001"];

  const pairings = () => {
    const box = HS.el("div", { class: "toggles" });
    const buttons = HS.data.pairings.map((pairing) => HS.el("button", {
      type: "button", class: "toggle", text: pairing, "data-pairing": pairing, css: { "--swatch": `var(--role-${pairing[1]})` },
      title: `${pairing[0]} of the source head with ${pairing[1]} of the target head`,
      onclick: () => {
        const chosen = new Set(HS.state.pairings.split(",").filter(Boolean));
        if (!chosen.delete(pairing)) chosen.add(pairing);
        HS.set({ pairings: HS.data.pairings.filter((p) => chosen.has(p)).join(",") });
      },
    }));
    box.append(...buttons);
    const sync = () => {
      const chosen = HS.state.pairings.split(",");
      for (const button of buttons) button.setAttribute("aria-pressed", String(chosen.includes(button.dataset.pairing)));
    };
    HS.on(["pairings"], sync);
    sync();
    return HS.el("fieldset", { class: "field" }, HS.el("legend", { text: "Pairings (source, target)" }), box);
  };

  const number = (label, key, properties) => {
    const box = HS.el("input", { type: "number", id: `control-${key}`, ...properties,
      oninput: (event) => { if (event.target.validity.valid) HS.set({ [key]: event.target.value }); } });
    const sync = () => { if (box.value !== HS.state[key]) box.value = HS.state[key]; };
    HS.on([key], sync);
    sync();
    return HS.el("label", { class: "field" }, HS.el("span", { text: label }), box);
  };

  const check = (label, key, on, title) => {
    const box = HS.el("input", { type: "checkbox", id: `control-${key}`, onchange: (event) => HS.set({ [key]: event.target.checked ? on : "" }) });
    const sync = () => { box.checked = HS.state[key] === on; };
    HS.on([key], sync);
    sync();
    return HS.el("label", { class: "check", title }, box, label);
  };

  // Enable only the controls that the selected rule uses.
  const enable = () => {
    const rule = HS.state.rule;
    HS.byId("control-k").disabled = !rule.startsWith("top");
    for (const key of ["q", "null"]) HS.byId(`control-${key}`).parentElement.classList.toggle("unused", rule !== "significance");
    const hasQ = HS.data.pairings.some((p) => HS.data.edges[`${HS.state.metric}/${p}`]?.[`q_${HS.state.null}`]);
    HS.byId("control-rule").title = hasQ ? "" : "This report has no such q-values for this similarity";
  };

  const shadings = () => {
    const options = [["none", "nothing"]];
    if (HS.data.labels) options.push(["labels", "labels"]);
    for (const name of Object.keys(HS.data.behaviour ?? {})) options.push([`behaviour:${name}`, `${name.replaceAll("_", " ")} score`]);
    for (const pairing of HS.data.hub_pairings) options.push([`outlet:${pairing}`, `${pairing} outlet`], [`inlet:${pairing}`, `${pairing} inlet`]);
    return options;
  };

  const start = () => {
    const form = HS.byId("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.append(...[
      HS.select("Similarity", "metric", HS.data.metrics.map((m) => [m.key, m.title])),
      HS.select("Edges", "rule", RULES),
      number("k", "k", { min: 0, max: HS.data.limits.overall, step: 1 }),
      number("Minimum score", "min", { step: "any", placeholder: "none" }),
      HS.select("q at most", "q", QS.map((q) => [q, q === "0.000001" ? "10⁻⁶" : q])),
      HS.select("against", "null", [["reversed", "reversed pairs"], ["within", "heads of the same two layers"], ["random", "random subspaces"]]),
      HS.select("Shade heads by", "shade", shadings()),
      pairings(), HS.el("div", { class: "checks" }, HS.data.effects?.compared ? check("large effects only", "large", "1", HS.largeMeans()) : null,
        check("numerical order", "order", "number", "Order heads by number from top to bottom; otherwise, to reduce crossings"),
        check("heads without lines", "idle", "1", "Also show heads that have no lines")),
    ].filter(Boolean));
    HS.on(["rule", "metric"], enable);
    enable();
  };
  return { start };
})();

// The fill colours of a head for a kind of shading, as a function of its name: one colour, or one for each of its classes.
HS.shading = (kind, key) => {
  if (kind === "labels" && HS.data.labels) return (name) => HS.model.labels(name).map((label) => HS.data.labels.colours[label]);
  const ramp = (value, largest) => (value > 0 && largest > 0
    ? [`color-mix(in srgb, var(--accent) ${Math.round(8 + 62 * Math.min(1, value / largest))}%, var(--panel))`] : []);
  if (kind === "behaviour" && HS.data.behaviour?.[key]) {
    const scores = HS.data.behaviour[key];
    const largest = Math.max(...Object.values(scores));
    return (name) => ramp(scores[name] ?? 0, largest);
  }
  const hub = kind === "outlet" || kind === "inlet" ? HS.model.hub(HS.state.metric, key, kind) : null;
  if (!hub) return () => [];
  const values = new Map(hub.names.map((name, i) => [name, hub.values[i]]));
  const largest = hub.values[hub.order[0]];
  return (name) => ramp(values.get(name) ?? 0, largest);
};

HS.materials = { random: "random sequences repeated twice", text: "a short text", tokens: "given tokens" };
HS.material = (name) => `${HS.materials[name] ?? name}${name in HS.data.effects.tokens ? ` (${HS.count(HS.data.effects.tokens[name])} tokens)` : ""}`;

HS.largeMeans = () => {
  const { pairings, floors, units, least_ratio: least } = HS.data.effects;
  return `At least ${pairings.map((p) => `${floors[p]} ${units[p]} for ${p}`).join(", ")}, and ${least} times the effect of an output of the same length in a random direction; measured on ${HS.data.effects.materials.map(HS.material).join(" and ")}`;
};

// The verdict on a measured effect: large, no larger than that of a random output, small, or not compared.
HS.largeText = (edge) => {
  const { floors, units } = HS.data.effects;
  if (edge.large === null) return "not compared with random outputs";
  if (edge.ratio === null) return `no: below the floor of ${floors[edge.pairing]} ${units[edge.pairing]}`;
  return `${edge.large ? "yes" : "no"}, ${HS.number(edge.ratio, 1)} times a random output; floor ${floors[edge.pairing]} ${units[edge.pairing]}`;
};

HS.legend = () => {
  const box = HS.byId("legend");
  const item = (text, css) => HS.el("span", {}, HS.el("i", { class: "swatch", css }), text);
  const roles = { Q: "queries", K: "keys", V: "values", O: "output" };
  const targets = [...new Set(HS.state.pairings.split(",").filter(Boolean).map((p) => p[1]))];
  const items = targets.map((role) => item(`read by ${roles[role] ?? "nodes"} (${role})`.replace("read by output", "output"), { background: `var(--role-${role})` }));
  items.push(HS.el("span", { class: "scale", title: "Line width and opacity: the square root of the score's position between chance and the largest possible score, on the same scale for every model" },
    "at chance", ...[0, 0.25, 0.5, 0.75, 1].map((s) => HS.el("i", { css: { height: `${0.9 + 3.4 * s}px`, opacity: Math.min(1, 0.14 + 1.05 * s) } })), "largest possible"));
  if (HS.state.shade === "labels" && HS.data.labels)
    for (const [name, colour] of Object.entries(HS.data.labels.colours)) items.push(item(name.replaceAll("_", " "), { background: colour }));
  if (HS.data.effects?.compared && HS.state.pairings.split(",").some((p) => HS.data.effects.pairings.includes(p)))
    items.push(HS.el("span", { class: "large-key", title: HS.largeMeans() }, HS.el("i", { class: "swatch dot" }), "large effect"),
      HS.el("span", { text: "no dot: effect not large, or not measured" }));
  if (HS.state.pairings.split(",").some((p) => p && p[0] !== "O")) items.push(HS.el("span", { text: "Line: O solid, Q dashed, K dotted, V dash-dot" }));
  box.replaceChildren(...items);
};

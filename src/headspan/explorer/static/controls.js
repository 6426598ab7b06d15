// The controls of the wiring diagram, the shading of heads and the legend.
"use strict";
HS.controls = (() => {
  const NULLS = { reversed: "reversed pairs", within: "heads of the same two layers", random: "random subspaces" };
  const RULES = [["top", "best k per pairing"], ["top-per-target", "best k per target"],
    ["significance", "significant (q-value)"], ["threshold", "all above minimum"]];
  const QS = ["0.5", "0.2", "0.1", "0.05", "0.01", "0.001", "0.000001"];
  const WAIT = 250; // milliseconds after the last key before a number counts

  // One group of pairings: those that follow the flow of information are in the row, the others behind "more".
  const pairings = (list, title) => {
    const buttons = list.map((pairing) => HS.el("button", {
      type: "button", class: "toggle", text: pairing, "data-pairing": pairing,
      css: { "--swatch": `var(--role-${pairing[1]})` },
      title: `${pairing[0]} of the source head with ${pairing[1]} of the target head`,
      onclick: () => {
        const chosen = new Set(HS.state.pairings.split(",").filter(Boolean));
        if (!chosen.delete(pairing)) chosen.add(pairing);
        HS.set({ pairings: HS.data.pairings.filter((p) => chosen.has(p)).join(",") });
      },
    }));
    const sync = () => {
      const chosen = HS.state.pairings.split(",");
      for (const button of buttons) button.setAttribute("aria-pressed",
        String(chosen.includes(button.dataset.pairing)));
    };
    HS.on(["pairings"], sync);
    sync();
    return HS.el("fieldset", { class: "field" }, HS.el("legend", { text: title }),
      HS.el("div", { class: "toggles" }, ...buttons));
  };

  // Typing is debounced; Enter, the arrows' change and leaving the field count at once.
  const number = (label, key, properties) => {
    let waiting = 0;
    const take = () => {
      clearTimeout(waiting);
      if (box.validity.valid) HS.set({ [key]: box.value });
    };
    const box = HS.el("input", { type: "number", id: `control-${key}`, ...properties, onchange: take,
      oninput: () => { clearTimeout(waiting); waiting = setTimeout(take, WAIT); } });
    const sync = () => { if (box.value !== HS.state[key]) box.value = HS.state[key]; };
    HS.on([key], sync);
    sync();
    return HS.el("label", { class: "field" }, HS.el("span", { text: label }), box);
  };

  const check = (label, key, on, title) => {
    const box = HS.el("input", { type: "checkbox", id: `control-${key}`, onchange: (event) =>
      HS.set({ [key]: event.target.checked ? on : "" }) });
    const sync = () => { box.checked = HS.state[key] === on; };
    HS.on([key], sync);
    sync();
    return HS.el("label", { class: "check", title }, box, label);
  };

  // Show only the controls that the selected rule uses.
  const enable = () => {
    const rule = HS.state.rule;
    const show = (key, shown) => HS.byId(`control-${key}`).parentElement.classList.toggle("unused", !shown);
    show("k", rule.startsWith("top"));
    for (const key of ["q", "null"]) show(key, rule === "significance");
    if (rule === "threshold") HS.byId("more").open = true;
  };

  const shadings = () => {
    const options = [["none", "nothing"]];
    if (HS.data.labels) options.push(["labels", "labels"]);
    for (const name of Object.keys(HS.data.behaviour ?? {}))
      options.push([`behaviour:${name}`, `${name.replaceAll("_", " ")} score`]);
    for (const pairing of HS.data.hub_pairings)
      options.push([`outlet:${pairing}`, `${pairing} outlet`], [`inlet:${pairing}`, `${pairing} inlet`]);
    return options;
  };

  const start = () => {
    const form = HS.byId("controls"), all = HS.data.pairings;
    const flow = all.filter((p) => "OW".includes(p[0]) && "QKVR".includes(p[1]));
    const shown = flow.length ? flow : all.slice(0, 3), rest = all.filter((p) => !shown.includes(p));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.append(...[
      pairings(shown, "Pairings (source, target)"),
      HS.select("Edges", "rule", RULES),
      number("k", "k", { min: 0, step: 1 }),
      HS.select("q at most", "q", QS.map((q) => [q, q === "0.000001" ? "10⁻⁶" : q])),
      HS.select("against", "null", Object.entries(NULLS)),
      HS.select("Shade heads by", "shade", shadings()),
      HS.data.effects?.compared ? check("large effects only", "large", "1", HS.largeMeans()) : null,
      HS.el("details", { id: "more", class: "more" }, HS.el("summary", { text: "More" }),
        HS.el("div", { class: "controls" },
          HS.select("Similarity", "metric", HS.data.metrics.map((m) => [m.key, m.title])),
          rest.length ? pairings(rest, `The other ${rest.length} pairings`) : null,
          number("Minimum score", "min", { step: "any", placeholder: "none" }),
          check("numerical order", "order", "number",
            "Order heads by number from top to bottom; otherwise, to reduce crossings"),
          check("heads without lines", "idle", "1", "Also show heads that have no lines"))),
    ].filter(Boolean));
    HS.on(["rule"], enable);
    enable();
    // A view that differs in these settings shows them.
    const { metric, pairings: chosen, min, order, idle } = HS.state;
    const others = rest.some((p) => chosen.split(",").includes(p));
    if (metric !== HS.defaults.metric || min || order || idle || others) HS.byId("more").open = true;
  };
  return { start, QS, NULLS };
})();

// The fill colours of a head for a kind of shading, as a function of its name: one colour, or one for each of its
// classes.
HS.shading = (kind, key) => {
  if (kind === "labels" && HS.data.labels) return (name) =>
    HS.model.labels(name).map((label) => HS.data.labels.colours[label]);
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
HS.material = (name) => {
  const { tokens } = HS.data.effects, known = name in tokens ? ` (${HS.count(tokens[name])} tokens)` : "";
  return `${HS.materials[name] ?? name}${known}`;
};

HS.largeMeans = () => {
  const { pairings, floors, units, least_ratio: least } = HS.data.effects;
  const each = pairings.map((p) => `${floors[p]} ${units[p]} for ${p}`).join(", ");
  const inputs = HS.data.effects.materials.map(HS.material).join(" and ");
  return `At least ${each}, and ${least} times the effect of an output of the same length in a random direction; `
    + `measured on ${inputs}`;
};

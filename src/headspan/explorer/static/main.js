// Start: defaults, theme, navigation, and the parts in order.
"use strict";
(() => {
  const data = HS.data;
  const flow = data.pairings.filter((p) => p[0] === "O" && p !== "OO");
  const filled = data.pairings.filter((p) => data.edges[`${data.metrics[0].key}/${p}`]?.count);
  const favourite = flow.includes("OK") && filled.includes("OK") ? "OK" : filled[0] ?? data.pairings[0];
  HS.defaults = {
    metric: data.metrics[0].key, pairings: data.default_pairings.join(","), rule: "top",
    k: String(data.default_k), min: "", q: "0.05", null: data.nulls[0] ?? "random", shade: data.labels ? "labels"
      : "none", head: "", pair: "",
    heat: favourite, scatter: favourite, hubs: data.hub_pairings.includes("OK") ? "OK" : data.hub_pairings[0] ?? "",
    x: data.metrics[0].key, y: (data.metrics[1] ?? data.metrics[0]).key, theme: "", own: "", at: "", large: "",
      order: "", idle: "", pins: "", only: "", circuit: "", tour: "",
    token: "", task: "1", edges: "", hx: "layer", hy: HS.heads.keys()[1] ?? "layer",
  };

  // Ignore values in the address that do not exist.
  const sound = (state) => {
    const allowed = {
      metric: data.metrics.map((m) => m.key), x: data.metrics.map((m) => m.key), y: data.metrics.map((m) => m.key),
      rule: ["top", "top-per-target", "significance", "threshold"], q: HS.controls.QS, only: ["", "1"],
        null: ["reversed", "within", "random"],
      large: data.effects?.compared ? ["", "1"] : [""], order: ["", "number"],
        tour: ["", ...data.tour.map((_, i) => String(i + 1))], idle: ["", "1"], own: ["", "1"], hx: HS.heads.keys(),
        hy: HS.heads.keys(), heat: data.pairings, scatter: data.pairings, hubs: data.hub_pairings,
        theme: ["", "light", "dark"],
      task: ["1", ...data.tasks.map((_, i) => String(i + 1))],
      at: ["", "overview", "wiring", ...(data.tasks.length ? ["task"] : []), "heatmaps", "scatter", "distributions",
        "heads", "hubs", "evaluation", "glossary", "provenance"],
    };
    for (const [key, values] of Object.entries(allowed)) if (
      !values.includes(state[key])) state[key] = HS.defaults[key];
    if (!/^\d{1,5}$/.test(state.k)) state.k = HS.defaults.k;
    if (state.min !== "" && !Number.isFinite(Number(state.min))) state.min = "";
    state.pairings = state.pairings.split(",").filter((p) => data.pairings.includes(p)).join(",");
    state.pins = state.pins.split("|").filter((key) => HS.pairOf(key)).slice(0, 400).join("|");
    if (!/^\d{0,4}$/.test(state.edges)) state.edges = "";
    if (!/^\d{0,2}$/.test(state.token)) state.token = "";
    state.circuit = state.circuit.slice(0, 80);
    if (state.head && !HS.model.exists(state.head)) state.head = "";
    return state;
  };

  const dark = () => (HS.state.theme ? HS.state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const paint = (isDark = dark()) => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    HS.byId("theme").textContent = isDark ? "Light" : "Dark";
    HS.byId("theme").setAttribute("aria-pressed", String(isDark));
  };

  const navigate = () => {
    const titles = { wiring: "Wiring", ...(data.tasks.length ? { task: "Task" } : {}), overview: "Findings",
      heatmaps: "Heat maps", scatter: "Scatter", distributions: "Chance", heads: "Heads", hubs: "Hubs",
      evaluation: "Evaluation", glossary: "Glossary", provenance: "Provenance" };
    const links = Object.entries(titles).map(([id, text]) =>
      HS.el("a", { href: `#at=${id}`, text, "data-section": id, onclick: (event) => {
      event.preventDefault();
      HS.set({ at: id });
      HS.byId(id).scrollIntoView();
    } }));
    HS.byId("nav").append(...links);
    const visible = new Map();
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) visible.set(entry.target.id, entry.isIntersecting);
      const first = Object.keys(titles).find((id) => visible.get(id));
      for (const link of links) link.setAttribute("aria-current", String(link.dataset.section === first));
    }, { rootMargin: "-60px 0px -55% 0px" });
    for (const id of Object.keys(titles)) watch.observe(HS.byId(id));
  };

  HS.state = sound(HS.parse(location.hash));
  paint();
  navigate();
  HS.glossary.start();
  HS.headline.start();
  HS.controls.start();
  HS.tables.start();
  HS.zoom.listen();
  HS.circuit.start();
  HS.paths.start();
  HS.wiring.start();
  HS.watch.start();
  HS.inspector.start();
  HS.heatmap.start();
  HS.scatter.start();
  HS.distribution.start();
  HS.heads.start();
  HS.task.start();
  HS.find.start();
  HS.save.start();
  if (HS.state.at) HS.byId(HS.state.at).scrollIntoView();

  // Theme listeners draw with the page's colours, so apply the theme first.
  HS.listeners.unshift((changed) => { if (changed.has("theme")) paint(); });
  HS.byId("theme").addEventListener("click", () => HS.set({ theme: dark() ? "light" : "dark" }));
  HS.byId("share").addEventListener("click", () => HS.copy(location.href, HS.byId("share")));
  const follow = () => {
    const before = HS.state;
    HS.state = sound(HS.parse(location.hash));
    HS.announce(before);
    if (HS.state.at && HS.state.at !== before.at) HS.byId(HS.state.at).scrollIntoView();
  };
  // The link points to a place in the page and must not change the view.
  HS.byId("skip").addEventListener("click", (event) => { event.preventDefault(); HS.byId("wiring").scrollIntoView();
    HS.byId("wiring").focus(); });
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  document.addEventListener("keydown",
    (event) => { if (event.key === "Escape" && (HS.state.head || HS.state.pair)) HS.clear(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    paint();
    for (const listen of HS.listeners) listen(new Set(["theme"]));
  });
  let waiting = 0, drawn = HS.byId("diagram").clientWidth;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(HS.wiring.redraw, 120); };
  window.addEventListener("resize", later);
  // A notebook frame may get its width only after the page has been drawn.
  new ResizeObserver(([{ target }]) => { if (target.clientWidth !== drawn) { drawn = target.clientWidth; later();
    } }).observe(HS.byId("diagram"));

  // For printing: a light theme, and draw all parts.
  const repaint = (isDark) => { paint(isDark); HS.wiring.redraw(); for (const draw of HS.lazyParts) draw(); };
  window.addEventListener("beforeprint", () => { repaint(false); HS.zoom.whole(); });
  window.addEventListener("afterprint", () => repaint(dark()));
  document.documentElement.dataset.ready = "true";
})();

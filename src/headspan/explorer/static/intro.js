// The card before anything is selected: what an edge means, in one drawing and a few sentences, and the tour.
"use strict";
HS.intro = (() => {
  const t = (word, text) => HS.glossary.term(word, text);

  // Two planes through one point, and the angles between their directions.
  const drawing = () => {
    const s = HS.svg("svg", { class: "planes", viewBox: "0 0 330 172", role: "img",
      "aria-label": "Two subspaces drawn as planes, with a small first principal angle and a large second one" });
    s.append(HS.svg("path", { class: "plane one", d: "M26 128 L196 150 L304 96 L134 74 Z" }),
      HS.svg("path", { class: "plane two", d: "M96 34 L236 20 L258 132 L118 150 Z" }),
      HS.svg("path", { class: "ray one", d: "M172 112 L286 101" }),
      HS.svg("path", { class: "ray two", d: "M172 112 L252 96" }),
      HS.svg("path", { class: "ray one", d: "M172 112 L64 126" }),
      HS.svg("path", { class: "ray two", d: "M172 112 L160 34" }),
      HS.svg("path", { class: "arc", d: "M224 107 A52 52 0 0 0 221 102" }),
      HS.svg("path", { class: "arc", d: "M132 117 A40 40 0 0 1 166 72" }),
      HS.svg("circle", { cx: 172, cy: 112, r: 2.6 }),
      HS.svg("text", { class: "theta", x: 231, y: 108, text: "θ₁" }),
      HS.svg("text", { class: "theta", x: 122, y: 92, text: "θ₂" }),
      HS.svg("text", { class: "name one", x: 26, y: 160, text: "what one head writes" }),
      HS.svg("text", { class: "name two", x: 96, y: 16, text: "what a later head reads" }));
    return s;
  };

  const dots = () => (HS.data.effects?.compared
    ? ["A filled dot is a ", t("large effect"), ", measured by running the model: the larger the dot, the larger the "
      + "effect. A hollow dot is an effect that is not large."]
    : ["Only running the model shows whether a line has an effect."]);

  const welcome = () => [
    HS.el("h2", { id: "card-title", text: "What an edge means" }),
    drawing(),
    HS.el("p", { class: "hint", text: "θ₁ is small: the subspaces share a direction. θ₂ is large: there they have "
      + "nothing in common." }),
    HS.el("p", {}, "A head writes and reads only some directions of the ", t("residual stream"),
      ": each weight spans a ", t("subspace"), ". The ", t("Projection Kernel"),
      " (PK) measures how many dimensions two subspaces share: the sum of cos² over their ",
      t("principal angle", "principal angles"), "."),
    HS.el("p", {}, "A line means that what the left head writes overlaps with what the right head reads. It is found "
      + "from the weights alone. A coloured line has ", t("evidence"), " that this is more than ", t("chance"),
    "; a thin grey one has none, however large its score. ", ...dots()),
    HS.data.tour.length ? HS.el("button", { type: "button", id: "tour-start", class: "primary",
      text: "Take the tour: three steps", onclick: () => go(1) }) : null,
    HS.el("p", { class: "card-sub", text: "Select a head or a line to see its numbers here. Keyboard: Tab to the "
      + "diagram, arrow keys to move, e for the lines of a head, Enter to open, Escape to close." }),
  ];

  const go = (step) => {
    const stop = HS.data.tour[step - 1];
    HS.set(stop ? { head: "", pair: "", large: "", ...stop.view, tour: step } : { tour: "", head: "", pair: "" }, true);
  };

  // The current step, above the card that it describes.
  const tour = () => {
    const step = Number(HS.state.tour), stop = HS.data.tour[step - 1];
    if (!stop) return [];
    const last = step === HS.data.tour.length;
    return [HS.el("div", { class: "tour", role: "region", "aria-label": "Tour" },
      HS.el("p", { class: "tour-count", text: `Tour, ${step} of ${HS.data.tour.length}` }),
      HS.el("h2", { text: stop.title }), HS.el("p", { text: stop.text }),
      HS.el("div", { class: "tour-bar" }, step > 1
        ? HS.el("button", { type: "button", text: "Back", onclick: () => go(step - 1) }) : null,
        HS.el("button", { type: "button", class: "primary", id: "tour-next", text: last ? "Done" : "Next",
          onclick: () => go(last ? 0 : step + 1) }),
        last ? null : HS.el("button", { type: "button", class: "quiet", text: "Leave", onclick: () => go(0) })))];
  };
  return { welcome, tour };
})();

// Above the controls: the strongest finding with its evidence, and three more findings.
"use strict";
HS.headline = (() => {
  const MORE = 3;

  // A finding's view changes only the settings that it names, then scrolls there.
  const open = (view) => {
    HS.set({ head: "", pair: "", ...view }, true);
    HS.byId(view.at ?? "wiring").scrollIntoView();
  };

  const start = () => {
    const { headline: first, findings } = HS.data, there = Object.keys(first.view).length > 0;
    const cut = first.text.indexOf(";"),
      [finding, evidence] = [first.text.slice(0, cut + 1), first.text.slice(cut + 1)];
    const sentence = there
      ? HS.el("button", {
        type: "button", id: "headline-show", class: "headline", title: "Show this edge",
          onclick: () => open(first.view),
      }, finding, HS.el("span", { text: evidence.replaceAll("q = ", "q\u00a0=\u00a0") }))
      : HS.el("p", { class: "headline none", text: first.text });
    const others = findings.slice(1, 1 + MORE).map((finding) => HS.el("li", {},
      HS.el("button", { type: "button", text: finding.title, title: finding.text,
        onclick: () => open(finding.view) })));
    HS.byId("headline").append(...[sentence, others.length ? HS.el("ul", { class: "top-findings" }, ...others)
      : null].filter(Boolean));
  };
  return { start, open };
})();

// What is drawn and what is not: the line above the diagram.
"use strict";
HS.notes = (() => {
  const data = HS.data;

  const listed = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} or ${names.at(-1)}`);

  // k beyond what the page keeps is not silently cut.
  const limited = ({ rule, k, pairings, metric }) => {
    const most = HS.model.mostK(rule);
    if (!rule.startsWith("top") || k <= most) return "";
    if (rule === "top" && pairings.every((p) => (data.edges[`${metric}/${p}`]?.forward ?? 0) <= most)) return "";
    const kept = rule === "top" ? "pairs of each pairing" : "sources of each target";
    return `k = ${HS.count(k)} is more than this page holds: it draws the best ${HS.count(most)} ${kept}.`;
  };

  // Why no edge has such a small q, and at which q some would.
  const noQ = ({ pairings, metric, q, null: against }) => {
    const least = pairings.map((pairing) => [pairing, data.edges[`${metric}/${pairing}`]?.least_q?.[against]])
      .filter(([, value]) => value !== undefined && value !== null);
    if (!least.length) {
      const why = against === "within" ? "the layers have too few heads to compare, or the result has no reversed pairs"
        : against === "reversed" ? "they need the reversed pairings, which this result lacks: score all pairings"
          : "they are known for the Projection Kernel only";
      return [`Nothing is drawn: ${listed(pairings)} have no q-values against ${HS.controls.NULLS[against]} (${why}).`];
    }
    const smallest = Math.min(...least.map(([, value]) => value));
    const values = least.map(([pairing, value]) => `${pairing} ${HS.qvalue(value)}`).join(", ");
    const next = HS.controls.QS.map(Number).filter((one) => one >= smallest).sort((a, b) => a - b)[0];
    const text = `Nothing is drawn: no ${listed(pairings)} pair stands out from ${HS.controls.NULLS[against]} at `
      + `q ≤ ${q}. The smallest q is ${values}. `;
    return [text, next === undefined ? `Even at q ≤ ${HS.controls.QS[0]} none would be drawn.`
      : HS.el("button", { type: "button", class: "link", id: "wider-q", text: `Draw q ≤ ${next}`,
        onclick: () => HS.set({ q: next }) })];
  };

  const empty = (view) => {
    if (!view.pairings.length) return ["Choose at least one pairing."];
    if (view.rule === "significance") return noQ(view);
    if (view.large)
      return ["None of these edges has a large effect. Choose other pairings, or switch off “large effects only”."];
    if (view.rule === "threshold" || view.min > -Infinity)
      return ["No pair has so large a score. Lower the minimum score."];
    return [view.k ? "In these pairings no head writes to a later one." : "No edges were requested: k is 0."];
  };

  const show = (view, edges, cut) => {
    const parts = [];
    if (view.only) parts.push(`Circuit “${HS.state.circuit || "circuit"}” alone. `);
    if (edges.length) {
      parts.push(HS.evidence.counts(edges, view.metric, [...new Set(edges.map((e) => e.pairing))]));
      const said = view.only || view.metric !== data.metrics[0].key ? [] : view.pairings;
      parts.push(...said.filter((p) => data.disagreements[p]).map((p) => ` ${data.disagreements[p]}`));
      if (!data.effects) parts.push(" Effects were not measured: there are no dots.");
    } else parts.push(...empty(view));
    const most = data.limits.overall;
    if (cut.length) parts.push(` More pass in ${cut.join(", ")}; the page draws the best ${most} of each pairing.`);
    const short = view.only ? "" : limited(view);
    if (short) parts.push(` ${short}`);
    HS.byId("wiring-notes").replaceChildren(...parts);
    HS.byId("edge-list").firstElementChild.textContent = `Edges in this view (${HS.count(edges.length)})`;
  };
  return { show };
})();

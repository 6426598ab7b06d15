// Overview, edge table, hubs, evaluation and provenance: the parts made of text and tables.
"use strict";
HS.tables = (() => {
  const data = HS.data;
  const marks = [];
  const keep = (table) => { marks.push(table); return table; };
  const labelText = HS.classWords;

  const overview = () => {
    const m = data.model;
    const rows = [["Model", m.name], ["Architecture", m.architecture],
      ["Layers × heads", `${m.layers.length} × ${m.n_heads}${HS.model.shared ? `, ${m.n_kv_heads} KV` : ""}`],
      ["d_model", HS.count(m.d_model)], ["Norms", m.folding === "folded" ? "folded into the weights" : "not folded"],
      ["Similarities", data.metrics.map((x) => x.title).join(", ")],
        ["Pairings", data.pairings.length === 16 ? "all 16" : data.pairings.join(", ")],
      ["Pairs compared", HS.count(data.compared)],
      ["Large effects", data.effects?.compared
        ? Object.entries(data.effects.large).map(([pairing, n]) => `${HS.count(n)} ${pairing}`).join(", ") : ""]];
    HS.byId("facts").append(...rows.filter(([, value]) => value).map(([name, value]) =>
      HS.el("div", {}, HS.el("span", { text: name }), HS.el("b", { text: value }))));
    HS.byId("findings").append(...data.findings.map((f) =>
      HS.el("li", {}, HS.el("b", { text: f.title }), HS.el("p", { text: f.text }),
      Object.keys(f.view).length ? HS.el("button",
        { type: "button", class: "link", text: "Show", onclick: () => HS.headline.open(f.view) }) : null)));
    HS.byId("notes").append(...data.notes.map((text) => HS.el("p", { class: "note", text })));
  };

  const edges = (list) => {
    const metric = HS.state.metric;
    const hasZ = list.some((e) => e.z !== null);
    const columns = [
      { key: "pairing", title: "Pairing" }, { key: "rank", title: "Rank", number: true, text: (e) => HS.count(e.rank) },
      { key: "source", title: "Source", node: (e) => HS.headLink(e.source) },
        { key: "target", title: "Target", node: (e) => HS.headLink(e.target) },
      { key: "score", title: HS.model.metric(metric).short, number: true,
        node: (e) => HS.el("button", { type: "button", class: "link", text: HS.score(e.score, metric),
        title: "Open the pair card", onclick: () => HS.choosePair(e.pairing, e.source, e.target) }) },
    ];
    if (hasZ) columns.push({ key: "z", title: "z", number: true, text: (e) => HS.number(e.z, 1) });
    if (list.some((e) => e.q.reversed !== null)) columns.push({ key: "q_reversed", title: "q, reversed", number: true,
      value: (e) => e.q.reversed, text: (e) => HS.qvalue(e.q.reversed) });
    if (list.some((e) => e.q.within !== null)) columns.push({ key: "q_within", title: "q, within", number: true,
      value: (e) => e.q.within, text: (e) => HS.qvalue(e.q.within) });
    if (list.some((e) => e.effect !== null)) columns.push(
      { key: "effect", title: "Effect", number: true, text: (e) => HS.number(e.effect) },
      { key: "effect_unit", title: "Unit", value: (e) => (e.effect === null ? null : data.effects.units[e.pairing]),
        text: (e) => (e.effect === null ? "–" : data.effects.units[e.pairing]) },
      { key: "percentile_in_layers", title: "Percentile", number: true, value: (e) => e.percentile,
        text: (e) => HS.number(e.percentile, 1) },
      { key: "large_effect", title: "Large effect", value: (e) => e.large,
        text: (e) => (e.large === null ? "–" : e.large ? "yes" : "no") },
      { key: "random_write_ratio", title: "Ratio", number: true, value: (e) => e.ratio,
        text: (e) => (e.ratio === null ? "–" : HS.number(e.ratio, 1)) });
    const evidence = (e) => HS.evidence.kinds(e)?.join(" ") ?? null;
    columns.push({ key: "evidence", title: "Evidence", value: evidence, text: (e) => HS.evidence.short(e) });
    if (data.labels) columns.push({ key: "labels", title: "Labels",
      value: (e) => `${labelText(e.source)} → ${labelText(e.target)}`,
      text: (e) => [labelText(e.source) || "–", labelText(e.target) || "–"].join(" → ") });
    const table = HS.table(columns, list,
      { file: `edges-${metric}`, shown: 20, key: (e) => `${e.source}.${e.pairing[0]}-${e.target}.${e.pairing[1]}` });
    HS.byId("edge-table").replaceChildren(table);
    marks[0] = table;
  };

  const hubTable = (kind) => {
    const metric = HS.state.metric, pairing = HS.state.hubs;
    const hub = HS.model.hub(metric, pairing, kind);
    const corrected = HS.model.hub(metric, pairing, `${kind}_corrected`);
    if (!hub) return HS.empty(`There are no ${kind} values for ${metric} and ${pairing}.`);
    const rows = hub.order.filter((i) => !Number.isNaN(hub.values[i])).map((i) =>
      ({ rank: hub.ranks[i], head: hub.names[i], value: hub.values[i], corrected: corrected?.values[i] }));
    const columns = [
      { key: "rank", title: "#", number: true }, { key: "head", title: "Head", node: (r) => HS.headLink(r.head) },
      { key: "value", title: "Sum", number: true, text: (r) => HS.number(r.value, metric === "pk" ? 2 : 4) },
      { key: "corrected", title: "Corrected z", number: true, text: (r) => HS.number(r.corrected, 2) },
    ];
    if (data.labels) columns.push({ key: "labels", title: "Labels", value: (r) => labelText(r.head),
      text: (r) => labelText(r.head) });
    return HS.table(columns, rows,
      { caption: kind === "outlet" ? `Outlets: preferred sources, ${pairing}` : `Inlets: preferred targets, ${pairing}`,
      file: `${kind}-${metric}-${pairing}`, shown: 12, key: (r) => r.head });
  };

  const hubs = () => {
    const box = HS.byId("hub-tables");
    if (!data.hub_pairings.length) { box.replaceChildren(HS.empty(HS.noPairs()
      || "Hubs need the pairings OQ, OK or OV and heads in at least two layers.")); return; }
    const bands = ["outlet", "inlet"].map((kind) =>
      [kind, data.bands[`hub:${HS.state.metric}/${HS.state.hubs}/${kind}`]]).filter(([, band]) => band);
    HS.byId("hub-band").textContent = bands.length
      ? `If every head picked its partner at random, the largest corrected z would stay below `
        + `${bands.map(([kind, band]) => `${HS.number(band[1], 1)} (${kind}s)`).join(" and ")} in 95 % of models.` : "";
    const made = ["outlet", "inlet"].map(hubTable);
    made.forEach((table, i) => { marks[1 + i] = table; });
    box.replaceChildren(...made);
  };

  const evaluation = () => {
    const box = HS.byId("evaluation-body");
    const e = data.evaluation;
    if (!e) { box.append(HS.empty(data.missing.evaluation)); return; }
    const number = (key, title) => ({ key, title, number: true, text: (r) => HS.number(r[key], 3) });
    box.append(HS.el("p", { class: "lead",
      text: `Labels: ${data.labels.source}, ${HS.plural(data.labels.count, "head")} in `
        + `${HS.plural(Object.keys(data.labels.colours).length, "class", "classes")}.` }));
    for (const [title, note, file, rows] of [
      ["Detection",
        "Area under the precision-recall curve for finding labelled heads from the strongest forward pairs.",
        "detection", e.detection],
      ["Detection, average precision",
        "Average precision of the same ranking, which has no gap at the start of the curve. Chance is the mean over "
          + "random orders.", "detection-ap", e.average_precision],
      ["Classification, PR-AUC", "Pairs inside a class against all other pairs, mean over the same-type pairings.",
        "classification-pr", e.pr_auc],
      ["Classification, ROC-AUC", "The same, area under the ROC curve.", "classification-roc", e.roc_auc]]) {
      if (!rows?.length) continue;
      const keys = Object.keys(rows[0]).filter((key) => key !== "metric");
      box.append(HS.el("h3", { text: title }), HS.el("p", { class: "hint", text: note }),
        keep(HS.table([{ key: "metric", title: "Similarity" },
          ...keys.map((key) => number(key, data.labels.words[key]?.replace(/ head$/, "") ?? key.replaceAll("_", " ")))],
          rows, { file })));
    }
    if (e.note) box.append(HS.el("p", { class: "hint", text: e.note }));
  };

  const provenance = () => {
    HS.byId("provenance-list").append(...data.provenance.flatMap(([name, value]) =>
      [HS.el("dt", { text: name }), HS.el("dd",
      { class: /^[0-9a-f:]{40,}$/.test(value) ? "mono" : null, text: value })]));
    const copy = HS.el("button", { type: "button", text: "Copy", onclick: () => HS.copy(data.citation.bibtex, copy) });
    HS.byId("citation").append(HS.el("p", { text: data.citation.text }),
      HS.el("pre", { tabindex: "0", text: data.citation.bibtex }), copy);
  };

  const start = () => {
    overview();
    if (data.hub_pairings.length) HS.byId("hub-controls").append(HS.select("Pairing", "hubs",
      data.hub_pairings.map((p) => [p, p])));
    hubs();
    evaluation();
    provenance();
    HS.on(["hubs", "metric"], hubs);
    HS.on(["head", "pair"], () => { for (const table of marks) table?.mark?.(); });
  };
  return { start, edges };
})();

// Text about the diagram: tooltips, and a summary of the drawn edges.
"use strict";
HS.edgeTip = (edge) => {
  const about = HS.model.metric(edge.metric), total = HS.model.arrays(edge.metric, edge.pairing).count;
  const { chance } = HS.model.limits(edge.metric, edge.pairing, HS.model.place(edge.pairing[0], edge.source), HS.model.place(edge.pairing[1], edge.target));
  const rows = [`${edge.source}.${edge.pairing[0]} → ${edge.target}.${edge.pairing[1]}`,
    `${about.title} ${HS.score(edge.score, edge.metric)}, rank ${HS.count(edge.rank)} of ${HS.count(total)}${chance === null ? "" : `; by chance ${HS.number(chance, about.grows ? 2 : 4)}`}`];
  if (edge.z !== null) rows.push(`z ${HS.number(edge.z, 1)} against random subspaces`);
  if (edge.q.reversed !== null) rows.push(`q ${HS.qvalue(edge.q.reversed)} against reversed pairs`);
  if (edge.q.within !== null) rows.push(`q ${HS.qvalue(edge.q.within)} among heads of the same two layers`);
  if (edge.effect !== null) rows.push(`effect ${HS.number(edge.effect)} ${HS.data.effects.units[edge.pairing]}; large: ${HS.largeText(edge)}`);
  return rows.join("\n");
};

HS.headTip = (name, [out, into]) => {
  const rows = [name], kv = HS.model.kvOf(name);
  if (HS.model.about(name).index === null) rows.push(HS.model.about(name).kind);
  if (HS.model.labels(name).length) rows.push(HS.model.labels(name).map((label) => label.replaceAll("_", " ")).join(", "));
  if (kv !== name) rows.push(`reads through ${kv}`);
  rows.push(`${out} edges out, ${into} in`);
  for (const [title, scores] of Object.entries(HS.data.behaviour ?? {}))
    if (name in scores) rows.push(`${title.replaceAll("_", " ")} ${HS.number(scores[name], 3)}`);
  return rows.join("\n");
};

HS.wiringNotes = (view, edges, cut, heads, geometry) => {
  let text = `${HS.count(edges.length)} edges between ${HS.count(heads)} ${HS.data.nodes.length ? "heads and nodes" : "heads"}.`;
  if (edges.some((edge) => edge.large !== null)) text += ` ${HS.count(edges.filter((edge) => edge.large).length)} of them have a large effect, measured on ${HS.data.effects.materials.map(HS.material).join(" and ")}.`;
  if (!view.pairings.length) text = "Choose at least one pairing.";
  else if (!edges.length) text = view.rule === "significance" ? "No pair passes, or these pairings have no such q-values. Try another q, null or similarity." : view.large ? "No edge with a large effect passes. Choose other pairings, or switch off “large effects only”." : "No pair passes. Lower the minimum score or raise k.";
  if (cut.length) text += ` More pairs pass in ${cut.join(", ")}; the page draws the strongest ${HS.data.limits.overall} of each pairing.`;
  if (view.rule === "top-per-target" && view.k > HS.data.limits.per_head) text += ` The page keeps at least the best ${HS.data.limits.per_head} sources of every target.`;
  if (edges.length && Math.max(...edges.map((edge) => edge.strength)) < 0.12) text += " None of these edges is clearly above chance.";
  HS.byId("wiring-notes").textContent = text;
  HS.byId("wiring-crossings").textContent = edges.length ? `${HS.count(geometry.crossings)} crossings` : "";
  HS.byId("edge-list").firstElementChild.textContent = `Edges in this view (${HS.count(edges.length)})`;
};

// Text about the diagram: tooltips of edges and heads.
"use strict";
HS.edgeTip = (edge) => {
  const about = HS.model.metric(edge.metric), total = HS.model.arrays(edge.metric, edge.pairing).count;
  const { chance } = HS.model.limits(edge.metric, edge.pairing, HS.model.place(edge.pairing[0], edge.source),
    HS.model.place(edge.pairing[1], edge.target));
  const by = chance === null ? "" : `; by chance ${HS.number(chance, about.grows ? 2 : 4)}`;
  const rows = [`${edge.source}.${edge.pairing[0]} → ${edge.target}.${edge.pairing[1]}`,
    `${about.title} ${HS.score(edge.score, edge.metric)}, rank ${HS.count(edge.rank)} of ${HS.count(total)}${by}`];
  if (edge.z !== null) rows.push(`z ${HS.number(edge.z, 1)} against random subspaces`);
  if (edge.q.reversed !== null) rows.push(`q ${HS.qvalue(edge.q.reversed)} against reversed pairs`);
  if (edge.q.within !== null) rows.push(`q ${HS.qvalue(edge.q.within)} among heads of the same two layers`);
  if (edge.effect !== null) rows.push(`effect ${HS.evidence.effect(edge)}`);
  rows.push(`Evidence: ${HS.evidence.verdict(edge)}`);
  return rows.join("\n");
};

HS.edgeCounts = ([out, into]) => `${HS.plural(out, "edge")} out, ${into} in`;

HS.headTip = (name, [out, into]) => {
  const rows = [name], kv = HS.model.kvOf(name);
  if (HS.model.about(name).index === null) rows.push(HS.model.about(name).kind);
  if (HS.model.labels(name).length) rows.push(HS.classWords(name));
  if (kv !== name) rows.push(`reads through ${kv}`);
  rows.push(HS.edgeCounts([out, into]));
  for (const [title, scores] of Object.entries(HS.data.behaviour ?? {}))
    if (name in scores) rows.push(`${title.replaceAll("_", " ")} ${HS.number(scores[name], 3)}`);
  return rows.join("\n");
};

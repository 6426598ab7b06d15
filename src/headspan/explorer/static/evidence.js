// What an edge is known to be: which tests it passed, how it is drawn for that, and what the card says.
// The rule itself is headspan.statistics.evidence; the page only reads its result.
"use strict";
HS.evidence = (() => {
  const KINDS = ["reversed", "effect", "influence"];
  const data = HS.data;

  // null: nothing could be tested for this pairing, or the page does not store this pair.
  const kinds = (edge) => (edge.evidence === null ? null : KINDS.filter((_, i) => (edge.evidence >> i) & 1));
  const passes = (edge) => edge.evidence > 0;
  const width = (edge) => HS.routing.width(edge.strength, passes(edge));
  const tested = (metric, pairing) => data.edges[`${metric}/${pairing}`]?.tested ?? [];

  // The area of a dot is proportional to the effect. Filled: large; hollow: measured, but not large.
  const radius = (effect) => Math.min(data.looks.most_dot, data.looks.dot * Math.sqrt(Math.max(0, effect)));
  const dot = (edge) =>
    edge.effect === null || edge.large === null ? null
      : { large: edge.large, r: Math.max(edge.large ? 0 : 1.4, radius(edge.effect)) };

  // ---------------------------------------------------------------- counts
  const FOUND = {
    reversed: ["stands above reversed pairs", "stand above reversed pairs"],
    effect: ["has a large effect", "have large effects"],
    influence: ["has three times the expected influence", "have three times the expected influence"],
  };
  const says = (kind, n) => `${n ? HS.count(n) : "none"} ${FOUND[kind][n > 1 ? 1 : 0]}`;

  // "60 drawn: 20 stand above reversed pairs, 30 have large effects, 1 both, 11 neither"
  const counts = (edges, metric, pairings) => {
    const known = KINDS.filter((kind) => pairings.some((pairing) => tested(metric, pairing).includes(kind)));
    const drawn = `${HS.count(edges.length)} drawn`;
    if (!known.length)
      return `${drawn}; none could be tested: ${pairings.join(", ")} have no reversed pairs, effects or influence.`;
    const of = edges.map((edge) => kinds(edge) ?? []), count = (test) => of.filter(test).length;
    const several = count((list) => list.length > 1), nothing = count((list) => !list.length);
    const parts = known.map((kind) => says(kind, count((list) => list.includes(kind))));
    if (several) parts.push(`${HS.count(several)} ${known.length === 2 ? "both" : "more than one of these"}`);
    const not = known.length === 1 ? (nothing === 1 ? "does not" : "do not") : known.length === 2 ? "neither" : "none";
    if (nothing && nothing < edges.length) parts.push(`${HS.count(nothing)} ${not}`);
    return `${drawn}: ${parts.join(", ")}.`;
  };

  // ---------------------------------------------------------------- the card and tooltips
  const NAMES = { reversed: "above reversed", effect: "large effect", influence: "influence" };
  const short = (edge) => kinds(edge)?.map((kind) => NAMES[kind]).join(", ") || "–";
  const mark = (edge) => (dot(edge) ? (edge.large ? " ●" : " ○") : "");
  const verdict = (edge) => {
    const found = kinds(edge);
    if (found === null) return "not tested";
    if (!found.length) return "none above chance";
    return found.map((kind) => ({
      reversed: `above reversed pairs (q ${HS.qvalue(edge.q.reversed)})`, effect: "large effect",
      influence: "at least three times the influence expected without interaction",
    })[kind]).join("; ");
  };

  const tokens = () => Object.entries(data.effects.tokens).map(([name, n]) =>
    `${HS.count(n)} tokens of ${HS.materials[name] ?? name}`).join(" and ");

  // An effect in words: its size and unit, the floor, and how it compares with a random output.
  const effect = (edge) => {
    const { units, floors } = data.effects, unit = units[edge.pairing], floor = floors[edge.pairing];
    const size = `${HS.number(edge.effect)} ${unit}`;
    if (edge.large === null) return `${size}, not compared with random outputs`;
    if (edge.ratio === null) return `${size}: small on this input, below the floor of ${floor}`;
    const times = `${HS.number(edge.ratio, 1)} times that of a random output`;
    return `${size}: ${edge.large ? "large" : "not large"}, ${times}; floor ${floor}`;
  };

  return { KINDS, kinds, passes, width, radius, dot, counts, short, mark, verdict, effect, tokens, tested };
})();

// The card of the selected head or pair.
"use strict";
HS.inspector = (() => {
  const data = HS.data;
  const heading = (text) => HS.el("h3", { text });
  const fact = (name, value) => [HS.el("dt", { text: name }),
    HS.el("dd", {}, ...(Array.isArray(value) ? value : [value]))];
  const facts = (rows) => HS.el("dl", { class: "pairs" }, ...rows.flatMap(([name, value]) => fact(name, value)));
  const percent = (share) => `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  // A bar with a tick at the chance level.
  const meter = (share, chance = null) =>
    HS.el("div", { class: "meter" }, HS.el("i", { css: { width: percent(share) } }),
    chance === null ? null : HS.el("b", { class: "tick", title: "by chance", css: { left: percent(chance) } }));

  const head = (title, subtitle) => [
    HS.el("div", { class: "card-head" }, HS.el("h2", { id: "card-title", text: title }),
      HS.el("button", { type: "button", class: "quiet", "aria-label": "Close the card", text: "✕",
        onclick: HS.clear })),
    HS.el("p", { class: "card-sub" }, ...subtitle),
  ];

  // ---------------------------------------------------------------- head card
  const headCard = (name) => {
    const { layer, kv, index } = HS.model.parts(name);
    const labels = HS.model.labels(name);
    return [
      ...head(name, [`Layer ${layer}, ${kv ? "key/value head" : "head"} ${index}`, ...sharing(name)]),
      labels.length ? HS.el("div", { class: "chips" }, ...labels.map((label) =>
        HS.el("span", { class: "chip label", text: HS.classWord(label),
          css: { "border-left-color": data.labels.colours[label] } }))) : null,
      ...behaviour(name), ...hubRanks(name), ...partners(name), ...HS.paths.through(name), ...tokens(name),
        ...dimensions(name),
    ];
  };

  const sharing = (name) => {
    const kv = HS.model.kvOf(name), served = HS.model.kin(name).slice(1);
    if (kv !== name) return [", reads through ", HS.headLink(kv)];
    if (!served.length) return [];
    return [", serves ", ...served.flatMap((query, i) => [i ? ", " : "", HS.headLink(query)])];
  };

  const behaviour = (name) => {
    const rows = Object.entries(data.behaviour ?? {}).filter(([, scores]) => name in scores);
    if (!rows.length) return [];
    const cells = rows.flatMap(([title, scores]) => {
      const rank = 1 + Object.values(scores).filter((v) => v > scores[name]).length;
      return [HS.el("span", { text: title.replaceAll("_", " ") }), meter(scores[name]),
        HS.el("span", { text: `${HS.number(scores[name], 3)} · #${rank}`, "data-behaviour": title })];
    });
    return [heading("Head scores"), HS.el("div", { class: "bars" }, ...cells)];
  };

  const hubRanks = (name) => {
    const rows = [];
    for (const pairing of data.hub_pairings) for (const kind of ["outlet", "inlet"]) {
      const hub = HS.model.hub(HS.state.metric, pairing, kind);
      const i = hub ? hub.names.indexOf(name) : -1;
      if (i >= 0 && !Number.isNaN(hub.values[i])) rows.push({ pairing, kind, value: hub.values[i], rank: hub.ranks[i],
        corrected: HS.model.hub(HS.state.metric, pairing, `${kind}_corrected`)?.values[i] });
    }
    if (!rows.length) return [];
    return [heading("Hub ranks"), HS.table([
      { key: "pairing", title: "Pairing" }, { key: "kind", title: "Kind" },
      { key: "value", title: "Sum", number: true, text: (r) => HS.number(r.value, 2) },
      { key: "rank", title: "Rank", number: true },
      { key: "corrected", title: "z", number: true, text: (r) => HS.number(r.corrected, 1) },
    ], rows, { file: `${name}-hubs` })];
  };

  const partners = (name) => {
    const metric = HS.state.metric;
    // A query head reads through its key/value head, and a key/value head writes through its query heads: include both.
    const family = HS.model.kin(name);
    const side = (direction, pairings) =>
      pairings.flatMap((pairing) => family.flatMap((member) =>
      HS.model.partners(member, metric, pairing, direction, 3)).sort((a, b) => b.score - a.score).slice(0, 3))
      .sort((a, b) => HS.chance.above(b) - HS.chance.above(a) || b.score - a.score);
    const flow = data.pairings.filter((p) => "OW".includes(p[0]) && "QKVR".includes(p[1]));
    const rest = data.pairings.filter((p) => !flow.includes(p));
    const make = (edges, other, file) => (edges.length ? HS.table([
      { key: "pairing", title: "Pairing" },
      ...(family.length > 1 ? [{ key: other === "target" ? "source" : "target", title: "Of",
        text: (e) => e[other === "target" ? "source" : "target"] }] : []),
      { key: other, title: other === "target" ? "Target" : "Source", node: (e) => HS.headLink(e[other]) },
      { key: "score", title: HS.model.metric(metric).short, number: true,
        node: (e) => HS.el("button", { type: "button", class: "link", text: HS.score(e.score, metric),
          title: "Open the pair card", onclick: () => HS.choosePair(e.pairing, e.source, e.target) }) },
      { key: "rank", title: "Rank", number: true, text: (e) => HS.count(e.rank) },
      ...(edges.some((e) => e.effect !== null)
        ? [{ key: "effect", title: "Effect", number: true,
        text: (e) => (e.effect === null ? "–"
        : `${HS.number(e.effect, 3)} ${data.effects.short_units[e.pairing]}${HS.evidence.mark(e)}`) }] : []),
      { key: "pin", title: "Pin", value: () => "",
        node: (e) => HS.el("button", { type: "button", class: "pin", text: HS.circuit.has(e) ? "−" : "+",
        "data-pin": `${e.source}.${e.pairing[0]}-${e.target}.${e.pairing[1]}`,
        "aria-label": `${HS.circuit.has(e) ? "Unpin" : "Pin and follow"} ${e.source} → ${e.target} (${e.pairing})`,
          title: HS.circuit.has(e) ? "Remove from the circuit" : "Add to the circuit and continue from there",
        onclick: () => follow(e, other) }) },
    ], edges, { file: `${name}-${file}`, shown: 9 }) : HS.empty("The result has no such pairs."));
    const order = HS.el("p", { class: "hint", text: "Farthest above chance first, over all pairings." });
    const parts = [heading("Best targets: which heads read its output"), order,
      make(side("out", flow), "target", "targets"),
      heading("Best sources: whose output it reads"), make(side("in", flow), "source", "sources")];
    if (rest.length) parts.push(HS.el("details", {}, HS.el("summary", { text: `The other ${rest.length} pairings` }),
      make(side("out", rest), "target", "other-targets"), make(side("in", rest), "source", "other-sources")));
    return parts;
  };

  // One hop: pin the edge and move the card to its other end.
  const follow = (edge, other) => {
    HS.circuit.toggle(edge, HS.circuit.has(edge) ? {} : { head: edge[other], pair: "" });
  };

  const tokens = (name) => {
    if (!data.tokens) return [heading("Tokens"), HS.empty(data.missing.tokens)];
    const rows = HS.model.rolesOf(name).filter((role) => data.tokens[role]?.[name]);
    if (!rows.length) return HS.model.about(name).index === null ? []
      : [heading("Tokens"), HS.empty(
      "This page has tokens for the heads of the strongest edges only. For this head run"),
      HS.el("pre", { tabindex: "0", text: `headspan tokens ${data.model.reference} ${name}` })];
    return [heading("Tokens by role"), HS.el("div", { class: "role-tokens" }, ...rows.flatMap((role) => [
      HS.el("b", { text: role }), HS.el("div", { class: "chips" }, ...data.tokens[role][name].map(tokenChip))]))];
  };
  const tokenChip = (text) => HS.el("span", { class: "chip token", text });

  const dimensions = (name) => {
    const rows = HS.model.rolesOf(name).filter((role) => data.ranks[role]).map((role) =>
      `${role} ${data.ranks[role][HS.model.place(role, name)]}`);
    return [HS.el("p", { class: "hint", text: `Subspace dimensions: ${rows.join(", ")} of ${data.model.d_model}` })];
  };

  // ---------------------------------------------------------------- pair card
  const pairCard = ({ pairing, source, target, row, column }) => {
    const metric = HS.state.metric;
    const value = HS.model.value(metric, pairing, row, column);
    const about = HS.model.metric(metric);
    const all = HS.model.arrays(metric, pairing);
    const parts = head(`${source}.${pairing[0]} → ${target}.${pairing[1]}`,
      [HS.headLink(source), " to ", HS.headLink(target), `, pairing ${pairing}`]);
    if (Number.isNaN(value.score)) return [...parts,
      HS.empty("This pair is not in the result, or is not stored in this page.")];
    const { chance, start, most } = HS.model.limits(metric, pairing, row, column);
    parts.push(HS.el("div", { class: "big", "data-score": value.score },
      `${value.exact ? "" : "≈ "}${HS.score(value.score, metric)} `,
      HS.el("small", { text: about.sizes ? `${about.title} on ${about.input}`
        : `${about.title}, of at most ${most}` })), meter(value.score / most, chance === null ? null : chance / most));
    const rows = [];
    if (value.rank) rows.push(["Rank", `${HS.count(value.rank)} of ${HS.count(all.count)} ${pairing} pairs`]);
    if (about.sizes) rows.push(...influence(about, value.score, chance, pairing));
    else if (chance !== null) rows.push(["By chance", `${HS.number(chance, about.grows ? 3 : 4)} on average`],
      ["Above chance",
      `${HS.number(100 * Math.max(0, (value.score - start) / (most - start)), 1)} % of the way to the largest `
        + `possible`]);
    if (value.z !== null && value.z !== undefined) rows.push(["z",
      `${HS.number(value.z, 1)} against random subspaces`]);
    if (value.q?.random !== null && value.q) rows.push(["q, random", HS.qvalue(value.q.random)]);
    if (value.q?.reversed !== null && value.q) rows.push(["q, reversed", HS.qvalue(value.q.reversed)]);
    if (value.q?.within !== null && value.q) rows.push(["q, within", HS.qvalue(value.q.within)]);
    const kept = HS.model.findEdge(metric, pairing, row, column);
    if (kept && kept.evidence !== null) rows.unshift(["Evidence",
      HS.el("b", { "data-evidence": kept.evidence, text: HS.evidence.verdict(kept) })]);
    rows.push(...effect(pairing, row, column), ["Circuit", HS.circuit.button({ pairing, source, target })]);
    parts.push(facts(rows), ...HS.watch.part(pairing, source, target), ...angles(pairing, row, column, source, target),
      ...sharedTokens(pairing, row, column), ...others(source, target));
    return parts;
  };

  // The square of influence has a unit; the level without interaction is that of two heads as loud as these.
  const influence = (about, score, chance, pairing) => {
    const unit = about.units[pairing[1]],
      words = { nats: "Expected KL", share: "Share of variance", variance: "Variance" };
    return [[words[unit], `${HS.number(score * score, 3)}${unit === "nats" ? " nats" : ""} if the source is resampled`],
      ["Expected", `${HS.number(chance, 4)} without interaction`],
        ["Ratio", `${HS.number(score / chance, 1)} times that`]];
  };

  // Exact for a kept edge; otherwise with the precision of the stored matrix.
  const effect = (pairing, row, column) => {
    if (!data.effects?.pairings.includes(pairing)) return [];
    const edge = HS.model.findEdge(HS.state.metric, pairing, row, column);
    const found = edge?.effect ?? HS.model.value("effect", pairing, row, column).score;
    const unit = data.effects.units[pairing];
    if (edge === null || edge.effect === null)
      return [["Effect", Number.isNaN(found) ? "not measured"
        : `${HS.model.matrix("effect", pairing).step ? "≈ " : ""}${HS.number(found)} `
          + `${unit}${data.effects.compared ? ", not among the large effects" : ""}`]];
    return [["Effect", HS.el("span", { "data-effect": found, "data-verdict": String(edge.large), title: HS.largeMeans(),
      text: HS.evidence.effect(edge) })],
      ["Measured on", `${HS.evidence.tokens()}; percentile ${HS.number(edge.percentile, 1)} between these layers`]];
  };

  const details = (pairing, row, column) => data.details?.[pairing]?.[`${row}>${column}`];

  const angles = (pairing, row, column, source, target) => {
    const stored = details(pairing, row, column)?.angles;
    const title = heading("Principal angles");
    if (!stored) {
      const command = `headspan pair ${data.model.reference} ${source}.${pairing[0]} ${target}.${pairing[1]}`;
      return [title, HS.empty(data.details ? "This page has angles for the strongest pairs only. For this pair run"
        : data.missing.angles), HS.el("pre", { tabindex: "0", text: command })];
    }
    const degrees = Array.from(HS.decode(stored, Uint16Array), (v) => (v * 90) / 65535);
    const ranks = [data.ranks[pairing[0]][row], data.ranks[pairing[1]][column]].sort((a, b) => a - b);
    const chance = data.angles_by_chance[[...ranks, HS.model.dimension(pairing, row, column)].join(",")];
    const curve = chance ? Array.from(HS.decode(chance, Float32Array)) : null;
    return [title, drawAngles(degrees, curve), HS.el("p", { class: "hint",
      text: `Smallest ${HS.number(degrees[0], 2)}°, median ${HS.number(degrees[Math.floor(degrees.length / 2)], 1)}°; `
        + `${degrees.filter((a) => a < 30).length} of ${degrees.length} below 30°. Bars: cos² of each angle; their `
        + `sum is the Projection Kernel${curve ? ". Dashed: two random subspaces" : ""}.` })];
  };

  // Left: every angle as a ray from the axis of the first subspace. Right: cos² of each, largest first.
  const drawAngles = (degrees, chance) => {
    const W = 330, H = 132, R = 112, x0 = 8, y0 = 120, bx = 150, bw = 172, bh = 108;
    const picture = HS.svg("svg", { class: "angles", viewBox: `0 0 ${W} ${H}`, role: "img",
      "aria-label": `Principal angles from ${HS.number(degrees[0], 1)} to `
        + `${HS.number(degrees[degrees.length - 1], 1)} degrees` });
    picture.append(HS.svg("path", { d: `M${x0 + R} ${y0} A${R} ${R} 0 0 0 ${x0} ${y0 - R}`, class: "axis" }),
      HS.svg("path", { d: `M${x0} ${y0 - R} V${y0} H${x0 + R}`, class: "axis" }));
    for (const angle of degrees) {
      const t = (angle * Math.PI) / 180;
      picture.append(HS.svg("line", { class: "ray", x1: x0, y1: y0, x2: (x0 + R * Math.cos(t)).toFixed(2),
        y2: (y0 - R * Math.sin(t)).toFixed(2) }));
    }
    const step = bw / degrees.length;
    degrees.forEach((angle, i) => {
      const h = bh * Math.cos((angle * Math.PI) / 180) ** 2;
      picture.append(HS.svg("rect", { class: "bar-cos", x: (bx + i * step).toFixed(2), y: (y0 - h).toFixed(2),
        width: Math.max(0.6, step - 0.6).toFixed(2), height: h.toFixed(2) }));
    });
    picture.append(HS.svg("path", { class: "axis", d: `M${bx} ${y0 - bh} V${y0} H${bx + bw}` }),
      ...(chance ? [HS.svg("path", { class: "chance",
        d: chance.map((c, i) =>
        `${i ? "L" : "M"}${(bx + (i + 0.5) * step).toFixed(1)} ${(y0 - bh * c).toFixed(1)}`).join("") })] : []),
      HS.svg("text", { x: x0 + R - 2, y: y0 + 10, "text-anchor": "end", text: "0°" }),
        HS.svg("text", { x: x0 + 4, y: y0 - R + 9, text: "90°" }),
      HS.svg("text", { x: bx - 4, y: y0 - bh + 6, "text-anchor": "end", text: "1" }),
        HS.svg("text", { x: bx + bw, y: y0 + 10, "text-anchor": "end", text: `cos²θ, 1 to ${degrees.length}` }));
    return picture;
  };

  const sharedTokens = (pairing, row, column) => {
    const stored = (details(pairing, row, column)?.directions ?? []).filter((d) => d.writes || d.reads);
    if (!stored.length) return [];
    const side = (title, signed) =>
      (signed ? [HS.el("b", { text: title }),
      HS.el("div", { class: "chips" }, ...signed[0].map(tokenChip),
      HS.el("span", { class: "against", text: "against" }), ...signed[1].map(tokenChip))] : []);
    return [heading("Tokens along the directions they share"), ...stored.flatMap((d, i) => [
      HS.el("p", { class: "hint", text: `Direction ${i + 1}, ${HS.number(d.angle, 1)}° apart` }),
      HS.el("div", { class: "role-tokens wide" }, ...side("writes", d.writes), ...side("reads", d.reads))])];
  };

  const others = (source, target) => {
    const rows = [];
    for (const pairing of data.pairings) {
      const row = HS.model.place(pairing[0], source), column = HS.model.place(pairing[1], target);
      if (row < 0 || column < 0) continue;
      const line = { pairing };
      for (const m of data.metrics) Object.assign(line, { [m.key]: HS.model.value(m.key, pairing, row, column).score });
      if (data.metrics.some((m) => !Number.isNaN(line[m.key]))) rows.push(line);
    }
    const columns = data.metrics.map((m) =>
      ({ key: m.key, title: m.short, number: true, text: (r) => HS.score(r[m.key], m.key) }));
    const open = { key: "pairing", title: "Pairing",
      node: (r) => HS.el("button", { type: "button", class: "link", text: r.pairing,
      onclick: () => HS.choosePair(r.pairing, source, target) }) };
    return [heading("These two heads in every pairing"),
      HS.table([open, ...columns], rows, { file: `${source}-${target}`, shown: 16 })];
  };

  const show = () => {
    const box = HS.byId("inspector");
    const pair = HS.chosenPair();
    let parts;
    if (HS.state.head && HS.model.exists(HS.state.head)) parts = headCard(HS.state.head);
    else if (pair) parts = pairCard(pair);
    else parts = HS.intro.welcome();
    parts.unshift(...HS.intro.tour());
    box.replaceChildren(...parts.filter(Boolean));
    box.scrollTop = 0;
    document.documentElement.classList.toggle("carded", Boolean(HS.state.head || HS.state.pair || HS.state.tour));
    HS.byId("announce").textContent = `Card: ${HS.byId("card-title").textContent}`;
  };

  // On a narrow screen the card covers the lower part, so scroll the tapped element into view.
  const uncover = () => requestAnimationFrame(() => {
    if (getComputedStyle(HS.byId("inspector")).position !== "fixed") return;
    const marked = document.querySelector("#diagram .node.chosen, #diagram .edge.chosen")?.getBoundingClientRect();
    const over = marked ? marked.bottom + 16 - HS.byId("inspector").getBoundingClientRect().top : 0;
    if (over > 0) scrollBy(0, over);
  });

  const start = () => {
    show();
    if (HS.state.head || HS.state.pair) uncover();
    HS.on(["head", "pair", "metric", "pins", "tour"], show);
    HS.on(["head", "pair"], uncover);
  };
  return { start };
})();

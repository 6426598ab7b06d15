// An edge to watch, on the card of its pair: attention on one short sequence before and after the source is patched.
"use strict";
HS.watch = (() => {
  const sets = HS.data.examples;
  const LISTED = 3;
  let box = null, shown = null; // the part on the card, and the example that it shows

  const decoded = new Map();
  const arrays = (set) => {
    if (!decoded.has(set)) {
      const [before, after] = [set.before, set.after].map((text) => HS.decode(text, Uint16Array));
      decoded.set(set, { before, after, change: HS.decode(set.change, Float32Array) });
    }
    return decoded.get(set);
  };

  // The example of a pair: attention from a query before and after, or the change of the output at a token.
  const find = (pairing, source, target) => {
    for (const set of sets) {
      const edge = set.edges.find(([p, s, t]) => p === pairing && s === source && t === target);
      if (!edge) continue;
      const n = set.tokens.length, { before, after, change } = arrays(set);
      const [, , , head, own, place] = edge, causal = (n * (n + 1)) / 2;
      const cells = set.cells;
      const row = (values, i, query) => {
        const start = i * cells + (cells === causal ? (query * (query + 1)) / 2 : query * n);
        const here = cells === causal ? query + 1 : n;
        return Array.from({ length: n }, (_, key) => (key < here ? values[start + key] / 65535 : null));
      };
      const common = { set, pairing, source, target, head, tokens: set.tokens };
      if (own === null) return { ...common, changes: [...change.subarray(place * n, (place + 1) * n)] };
      return { ...common, before: (query) => row(before, own, query), after: (query) => row(after, place, query) };
    }
    return null;
  };

  // Total variation of two rows of attention.
  const moved = (one, query) => {
    const after = one.after(query);
    return one.before(query).reduce((sum, p, key) => sum + Math.abs((p ?? 0) - (after[key] ?? 0)), 0) / 2;
  };
  const sizes = (one) => one.changes ?? one.tokens.map((_, query) => moved(one, query));

  const quote = (text) => `“${text.trim() || text}”`;
  const shade = (share) => ({ "--share": `${Math.round(50 * Math.max(0, Math.min(1, share ?? 0)))}%` });
  const chosen = (one, all) => {
    const asked = HS.state.token === "" ? -1 : Number(HS.state.token);
    return asked >= 0 && asked < one.tokens.length ? asked : all.indexOf(Math.max(...all));
  };

  // The card is drawn again, so the focus has to follow.
  const choose = (i) => { HS.set({ token: i }); box.querySelector(`[data-token="${i}"]`).focus(); };

  // One token is in the tab order; arrow keys choose the next.
  const sentence = (one, query, values, label) => HS.el("div",
    { class: "sentence", role: "radiogroup", "aria-label": label },
    ...one.tokens.map((text, i) => HS.el("button", {
      type: "button", role: "radio", text, class: values[i] === null ? "token later" : "token", "data-token": i,
      css: shade(values[i]), "aria-checked": String(i === query), tabindex: i === query ? "0" : "-1",
      "aria-label": `${text.trim() || "space"}, token ${i + 1}` +
        (values[i] === null ? "" : `: ${HS.number(values[i], 2)}`),
      onclick: () => choose(i),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        const to = event.key === "Home" ? 0 : event.key === "End" ? one.tokens.length - 1 : step && i + step;
        if (to === undefined || to < 0 || to >= one.tokens.length) return;
        event.preventDefault();
        choose(to);
      },
    })));
  const plain = (one, query, values) => HS.el("div", { class: "sentence", "aria-hidden": "true" },
    ...one.tokens.map((text, i) => HS.el("span", {
      class: `token${values[i] === null ? " later" : ""}${i === query ? " query" : ""}`, text, css: shade(values[i]),
    })));

  const bar = (share) => HS.el("i", { css: { width: `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%` } });
  // Tokens that occur more than once come with their number.
  const line = (one, i, values) => [HS.el("span", { class: "token", text: one.tokens[i] },
    one.tokens.indexOf(one.tokens[i]) === one.tokens.lastIndexOf(one.tokens[i]) ? null : HS.el("sub", { text: i + 1 })),
    HS.el("span", { class: "pair-bars" }, ...values.map(bar)),
    HS.el("span", { class: "num", text: values.map((v) => HS.number(v, 2)).join(" → ") })];

  const attention = (one) => {
    const all = sizes(one), query = chosen(one, all), before = one.before(query), after = one.after(query);
    const order = [...one.tokens.keys()].filter((key) => before[key] !== null)
      .sort((a, b) => Math.abs(after[b] - before[b]) - Math.abs(after[a] - before[a])).slice(0, LISTED);
    const mean = all.reduce((sum, v) => sum + v, 0) / all.length;
    return [
      HS.el("p", { class: "watch-row", text: "Before the patch" }),
      sentence(one, query, before, `Token from which ${one.head} attends`),
      HS.el("p", { class: "watch-row", text: "After" }), plain(one, query, after),
      HS.el("div", { class: "watch-bars" },
        ...order.flatMap((key) => line(one, key, [before[key], after[key]]))),
      HS.el("p", { class: "hint", "data-moved": all[query], "data-query": query,
        text: `Shading: attention of ${one.head} from the outlined token, ${quote(one.tokens[query])}. The patch ` +
          `moves ${HS.number(all[query], 2)} of it (total variation), ${HS.number(mean, 2)} on average over all ` +
          "tokens. Choose another token to see its attention." }),
    ];
  };

  const output = (one) => {
    const all = one.changes, token = chosen(one, all);
    const order = [...all.keys()].sort((a, b) => all[b] - all[a]).slice(0, LISTED);
    return [
      sentence(one, token, all, `Token at which ${one.head} writes`),
      HS.el("div", { class: "watch-bars" }, ...order.flatMap((i) => line(one, i, [all[i]]))),
      HS.el("p", { class: "hint", "data-moved": all[token], "data-query": token,
        text: `Shading: length of the change of ${one.head}'s output, relative to the output. At ` +
          `${quote(one.tokens[token])} it is ${HS.number(all[token], 2)}. Attention stays as it is.` }),
    ];
  };

  const draw = () => {
    if (box && shown) box.replaceChildren(...(shown.changes ? output(shown) : attention(shown)));
  };

  // The part of a pair's card; empty for a model that was not run.
  const part = (pairing, source, target) => {
    shown = sets.length ? find(pairing, source, target) : null;
    if (!shown) {
      const most = Math.max(0, ...sets.map((set) => set.edges.filter((edge) => edge[0] === pairing).length));
      const why = `This page has examples for the ${most} best ${pairing} edges only.`;
      return most ? [HS.el("h3", { text: "Watch this edge" }), HS.empty(why)] : [];
    }
    const { set, head } = shown;
    const other = head === target ? "" : ` Of the heads that use ${target}, ${head} changes most and is shown.`;
    const what = `${set.sequence}. What ${source} writes, as seen by ${target}.${pairing[1]}, ${set.replaced}.${other}`;
    box = HS.el("div", { class: "watch" });
    draw();
    return [HS.el("h3", { text: "Watch this edge" }), HS.el("p", { class: "hint", text: what }), box];
  };

  const start = () => {
    HS.on(["token"], draw);
    HS.on(["pair"], (changed) => {
      if (HS.state.token !== "" && !changed.has("token")) HS.set({ token: "" }); // another pair, another token
    });
  };
  return { part, find, start };
})();

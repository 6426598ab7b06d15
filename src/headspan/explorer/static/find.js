// The search box: heads and nodes by name, classes by label, heads by the tokens they write or read.
"use strict";
HS.find = (() => {
  const MOST = 14;
  let input, list, options = [], active = -1;

  const tokenIndex = (() => { let made;
    return () => (made ??= Object.entries(HS.data.tokens ?? {}).flatMap(([role, heads]) =>
    Object.entries(heads).flatMap(([head, tokens]) =>
    tokens.map((token, i) => ({ head, role, token, place: i, low: token.toLowerCase() }))))); })();

  // "4.7", "L4H7", "l4 h7" and "4 7" all mean L4H7.
  const spelled = (text) => text.toUpperCase().replace(/[\s_]+/g, "").replace(/^L?(\d+)[.,:/](\d+)$/, "L$1H$2");

  const search = (text) => {
    const wanted = text.trim(), low = wanted.toLowerCase(), name = spelled(wanted);
    if (!wanted) return [];
    const every = [...HS.model.allHeads, ...HS.model.nodeNames];
    const heads = every.filter((n) => n.toUpperCase().startsWith(name)).sort((a, b) => a.length - b.length);
    const found = heads.slice(0, 8).map((n) => ({ head: n, text: n, more: HS.classWords(n) }));
    for (const label of Object.keys(HS.data.labels?.colours ?? {}))
      if (HS.classWord(label).toLowerCase().includes(low) || label.toLowerCase().includes(low))
        found.push(...every.filter((n) => HS.model.labels(n).includes(label)).slice(0,
          12).map((n) => ({ head: n, text: n, more: HS.classWord(label) })));
    const bare = low.replaceAll(" ", "_");
    const hits = tokenIndex().filter((t) => t.low.includes(bare) || t.low.includes(low)).sort((a, b) =>
      (b.low.replace(/^_/, "") === bare) - (a.low.replace(/^_/, "") === bare) || a.place - b.place);
    found.push(...hits.slice(0, 10).map((t) =>
      ({ head: t.head, text: `${t.head}.${t.role}`, more: `token ${t.token}` })));
    return found.slice(0, MOST);
  };

  const show = () => {
    options = search(input.value);
    active = options.length ? 0 : -1;
    const none = input.value.trim() && !options.length;
    list.replaceChildren(...options.map((o, i) =>
      HS.el("li", { role: "option", id: `find-${i}`, "aria-selected": String(i === active), "data-head": o.head,
      onmousedown: (event) => { event.preventDefault(); open(i); } }, HS.el("b", { text: o.text }),
      HS.el("span", { text: o.more }))),
      ...(none ? [HS.el("li", { class: "none", role: "option", "aria-selected": "false",
        text: HS.data.tokens ? "No matching head, label or token" : "No matching head or label" })] : []));
    list.hidden = !options.length && !none;
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark();
  };
  const mark = () => {
    options.forEach((_, i) => list.children[i].setAttribute("aria-selected", String(i === active)));
    if (active >= 0) input.setAttribute("aria-activedescendant", `find-${active}`);
    else input.removeAttribute("aria-activedescendant");
  };
  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant"); };
  const open = (i) => { if (!options[i]) return; HS.openHead(options[i].head); close();
    HS.byId("wiring").scrollIntoView(); };

  const start = () => {
    list = HS.el("ul", { id: "find-list", role: "listbox", "aria-label": "Found", hidden: true });
    input = HS.el("input", { type: "search", id: "find-input", placeholder: "Find a head, label, token",
      "aria-label": "Find a head, label or token", role: "combobox", "aria-expanded": "false",
      "aria-controls": "find-list", "aria-autocomplete": "list", autocomplete: "off", spellcheck: "false",
      oninput: show, onfocus: () => { if (input.value) show(); }, onblur: close, onkeydown: (event) => {
        if (event.key === "ArrowDown" || event.key === "ArrowUp") { active = options.length
          ? (active + (event.key === "ArrowDown" ? 1 : -1) + options.length) % options.length : -1; mark(); }
        else if (event.key === "Enter") open(Math.max(0, active));
        else if (event.key === "Escape" && !list.hidden) { close(); event.stopPropagation(); }
        else return;
        event.preventDefault();
      } });
    HS.byId("find").append(input, list);
    document.addEventListener("keydown",
      (event) => { if (event.key === "/"
      && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName ?? "")) { event.preventDefault(); input.focus();
      } });
  };
  return { start, search };
})();

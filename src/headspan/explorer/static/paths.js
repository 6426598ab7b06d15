// The strongest paths: chains of heads with the score of the whole composed map, which can be pinned as a circuit.
"use strict";
HS.paths = (() => {
  const all = () => HS.data.paths ?? [];

  // Every hop as an edge of the diagram: heads in between read with V, shared ones through their key/value head.
  const hops = ({ heads, pairing }) => heads.slice(1).map((target, i) => {
    const last = i === heads.length - 2, role = last ? pairing[1] : HS.model.about(target).index === null ? "R" : "V";
    const writes = HS.model.about(heads[i]).index === null ? "W" : "O", reader = HS.model.place(role, target) >= 0
      ? target : HS.model.kvOf(target);
    return `${heads[i]}.${writes}-${reader}.${role}`;
  });

  const show = (path) => {
    const keys = hops(path).filter((key) => HS.pairOf(key));
    HS.circuit.add(keys);
    HS.byId("wiring").scrollIntoView();
  };

  const table = (rows, file) => HS.table([
    { key: "path", title: "Path", value: (p) => `${p.heads.join(" → ")}.${p.pairing[1]}`,
      node: (p) => HS.el("span", { class: "way mono" },
      ...p.heads.flatMap((name, i) => [i ? " → " : "", HS.headLink(name)]), `.${p.pairing[1]}`) },
    { key: "score", title: "Score", number: true, text: (p) => HS.number(p.score, 3) },
    { key: "chance", title: "By chance", number: true, text: (p) => HS.number(p.chance, 3) },
    { key: "z", title: "z", number: true, text: (p) => HS.number(p.z, 1) },
    { key: "pin", title: "Pin", value: () => "",
      node: (p) => HS.el("button", { type: "button", class: "pin", text: "+",
      title: "Add all edges of this path to the circuit", "aria-label": `Pin ${p.heads.join(" → ")}`,
      onclick: () => show(p) }) },
  ], rows, { file, shown: 8 });

  // For the card of a head.
  const through = (name) => {
    const kin = HS.model.kin(name), rows = all().filter((p) => p.heads.some((head) => kin.includes(head)));
    return rows.length ? [HS.el("h3", {}, "Strongest ", HS.glossary.term("path", "paths"), " through it"),
      table(rows, `${name}-paths`)] : [];
  };

  const start = () => {
    const box = HS.byId("paths");
    if (!all().length) { box.remove(); return; }
    box.append(HS.el("summary",
      { text: `Strongest paths to the targets of the strongest edges (${HS.count(all().length)})` }),
      HS.el("p",
        { class: "hint",
        text: "What the first head writes passes through the values and outputs of the heads in between to what the "
          + "last head reads. The score belongs to the whole composed map; chance is its mean if every link were "
          + "rotated at random." }), table(all(), "paths"));
  };
  return { start, through, hops };
})();

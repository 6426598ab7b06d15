// Sortable tables that can be saved as CSV.
"use strict";
// columns: [{key, title, number?, text?(row) -> shown text, node?(row) -> element, value?(row) -> sort and CSV value}]
HS.table = (columns, rows, { caption = "", file = "table", shown = 15, key = null, sort = null } = {}) => {
  const wrap = HS.el("div", { class: "table-wrap" });
  const body = HS.el("tbody");
  const valueOf = (column, row) => (column.value ? column.value(row) : row[column.key]);
  let order = sort ?? { column: null, down: true };
  let all = false;

  const sorted = () => {
    if (!order.column) return rows;
    const column = columns.find((c) => c.key === order.column);
    const sign = order.down ? -1 : 1;
    return [...rows].sort((a, b) => sign * compare(valueOf(column, a), valueOf(column, b)));
  };
  const compare = (a, b) => {
    const blankA = a === null || a === undefined || Number.isNaN(a), blankB = b === null || b === undefined
      || Number.isNaN(b);
    if (blankA || blankB) return order.down ? blankB - blankA : blankA - blankB;
    return typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  };

  const cell = (column, row) => {
    const td = HS.el("td", { class: column.number ? "num" : undefined });
    if (column.node) td.append(column.node(row));
    else td.textContent = column.text ? column.text(row) : row[column.key];
    return td;
  };
  const fill = () => {
    const list = sorted();
    body.replaceChildren(...(all ? list : list.slice(0, shown)).map((row) => {
      const tr = HS.el("tr", key ? { "data-key": key(row) } : {}, ...columns.map((c) => cell(c, row)));
      return tr;
    }));
    for (const th of head.children) {
      const active = th.dataset.key === order.column;
      if (active) th.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    mark();
  };

  const head = HS.el("tr", {}, ...columns.map((column) =>
    HS.el("th", { scope: "col", class: column.number ? "num" : undefined, "data-key": column.key },
    HS.el("button", { type: "button", text: column.title, "data-term": HS.glossary?.columns[column.title],
      onclick: () => {
      order = { column: column.key, down: order.column === column.key ? !order.down : Boolean(column.number) };
      fill();
    } }))));
  const mark = () => {
    for (const tr of body.children) tr.classList.toggle("chosen",
      Boolean(tr.dataset.key) && (tr.dataset.key === HS.state.head || tr.dataset.key === HS.state.pair));
  };
  wrap.mark = mark;

  const table = HS.el("table", {}, caption ? HS.el("caption", { text: caption }) : null, HS.el("thead", {}, head),
    body);
  const more = HS.el("button", { type: "button", text: `Show all ${HS.count(rows.length)}`, onclick: () => {
    all = !all;
    more.textContent = all ? "Show fewer" : `Show all ${HS.count(rows.length)}`;
    fill();
  } });
  const save = HS.el("button", { type: "button", text: "Save CSV", "data-csv": file,
    onclick: () => HS.download(`${file}.csv`, HS.csv(columns, sorted(), valueOf)) });
  wrap.append(table, HS.el("div", { class: "table-tools" }, rows.length > shown ? more : null, save));
  fill();
  return wrap;
};

HS.csv = (columns, rows, valueOf) => {
  const quote = (value) => {
    let text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    // A spreadsheet would evaluate a token that looks like a formula.
    if (typeof value !== "number" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [columns.map((c) => quote(c.key)), ...rows.map((row) => columns.map((c) => quote(valueOf(c, row))))];
  return `${lines.map((line) => line.join(",")).join("\n")}\n`;
};

HS.download = (name, text, type = "text/csv") => {
  const address = URL.createObjectURL(text instanceof Blob ? text
    : new Blob([text], { type: `${type};charset=utf-8` }));
  const link = HS.el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
};

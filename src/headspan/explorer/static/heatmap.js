// Heat maps: a grid of small ones to choose from, and the selected one with axes.
"use strict";
HS.heatmap = (() => {
  const MARGIN = 44;
  let canvas, over, plot = null, cursor = null;

  const ramp = (() => {
    const stops = HS.data.palette.sequential.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    return Array.from({ length: 256 }, (_, i) => {
      const at = (i / 255) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
      return stops[low].map((v, c) => Math.round(v + (stops[low + 1][c] - v) * (at - low)));
    });
  })();

  // What is coloured: where every pair lies above chance, on one scale for all panels; or the scores of one panel from
  // its lowest to its 99.7 % point.
  const coloured = (metric, pairing) => {
    const m = HS.model.matrix(metric, pairing);
    if (!m) return null;
    if (HS.state.own) return { m, values: m.values, range: range(m), above: null };
    const above = HS.chance.matrix(metric, pairing);
    return { m, values: above.values, range: [0, HS.chance.end(metric)], above };
  };
  const ranges = new WeakMap();
  const range = ({ values }) => {
    if (!ranges.has(values)) {
      const sorted = values.filter((v) => !Number.isNaN(v)).sort();
      ranges.set(values, sorted.length ? [sorted[0], sorted[Math.floor(0.997 * (sorted.length - 1))]] : [0, 0]);
    }
    return ranges.get(values);
  };

  // One pixel per pair; the canvas then scales it up.
  const image = ({ m, values, range: [low, high] }) => {
    const picture = new ImageData(m.columns, m.rows);
    const factor = high > low ? 255 / (high - low) : 0;
    values.forEach((v, i) => {
      if (Number.isNaN(v)) return;
      const colour = ramp[Math.max(0, Math.min(255, Math.round((v - low) * factor)))];
      picture.data.set([colour[0], colour[1], colour[2], 255], 4 * i);
    });
    const small = document.createElement("canvas");
    small.width = m.columns;
    small.height = m.rows;
    small.getContext("2d").putImageData(picture, 0, 0);
    return small;
  };

  const thumbnails = () => {
    HS.byId("heat-grid").replaceChildren(...HS.data.pairings.map((pairing) => {
      const small = HS.el("canvas", { "aria-hidden": "true" });
      const shown = coloured(HS.state.metric, pairing);
      const context = HS.canvas(small, 50, 50);
      small.style.width = small.style.height = "";
      context.imageSmoothingEnabled = Boolean(shown) && Math.max(shown.m.rows, shown.m.columns) > 50;
      if (shown) context.drawImage(image(shown), 0, 0, 50, 50);
      return HS.el("button", { type: "button", class: "thumb", "data-pairing": pairing,
        "aria-pressed": String(pairing === HS.state.heat),
        "aria-label": `Heat map of ${pairing}`, onclick: () => HS.set({ heat: pairing }) }, small, pairing);
    }));
  };

  const draw = () => {
    const pairing = HS.state.heat, metric = HS.state.metric;
    const shown = coloured(metric, pairing), m = shown?.m;
    for (const button of HS.byId("heat-grid").children) button.setAttribute("aria-pressed",
      String(button.dataset.pairing === pairing));
    const box = HS.byId("heat-main");
    if (!m) { plot = null; box.replaceChildren(HS.empty(`This result has no ${metric} scores for ${pairing}.`)); return;
      }
    if (canvas.parentElement !== box) box.replaceChildren(canvas, over); // re-inserting it would lose the focus
    const size = Math.max(150, Math.min(620, box.clientWidth - MARGIN - 70));
    const wide = size / m.columns, tall = size / m.rows; // size of one pair; not square if K and V have fewer heads
    const width = size, height = size;
    const context = HS.canvas(canvas, MARGIN + width + 70, height + 34);
    context.imageSmoothingEnabled = Math.min(wide, tall) < 1;
    context.fillStyle = HS.color("hover");
    context.fillRect(MARGIN, 4, width, height);
    context.drawImage(image(shown), MARGIN, 4, width, height);
    const names = m.layers ? [null, null] : [HS.model.heads(pairing[0]), HS.model.heads(pairing[1])];
    plot = { m, pairing, wide, tall, width, height, names };
    axes(context, pairing, names);
    scale(context, shown, metric);
    if (cursor && (cursor[0] >= m.rows || cursor[1] >= m.columns)) cursor = null;
    HS.byId("heat-caption").textContent = cursor && document.activeElement === canvas ? spoken(cursor)
      : caption(shown, pairing, metric);
    highlight();
  };

  const caption = (shown, pairing, metric) => {
    const { m } = shown, title = `${HS.model.metric(metric).title}, ${pairing}. ${scaleText(shown, metric)}`;
    if (!shown.values.some((v) => !Number.isNaN(
      v))) return `${HS.model.metric(metric).title}, ${pairing}. ${HS.noPairs()}`;
    if (m.layers) return `${title} There are too many pairs to store; shown is the largest score between every two `
      + `layers.`;
    if (m.step) return `${title} Values in this map are rounded to within ${HS.number(m.step / 2, 4)}; edges and `
      + `cards of kept pairs are exact.`;
    return title;
  };

  // The scale in words and numbers.
  const scaleText = ({ range: [low, high], above }, metric) => {
    const text = (v) => HS.number(v, HS.model.metric(metric).max > 1 ? 2 : 4);
    if (!above) return `Colours run from the lowest score, ${text(low)}, to the 99.7 % point of this panel, `
      + `${text(high)}.`;
    const level = above.level, from = HS.chance.name(metric), share = (100 * above.over) / Math.max(1, above.count);
    const ends = level ? `${from} (${text(level.start)}) and end at ${text(HS.chance.score(high, level))}`
      : `${from} of each pair and end ${HS.number(100 * high, 1)} % of the way to its largest possible score`;
    return `Colours start at ${ends}, on one scale for all pairings; ${HS.number(share, 1)} % of these `
      + `${HS.count(above.count)} ${HS.model.matrix(metric, HS.state.heat).layers ? "values" : "pairs"} are above the `
      + `start.`;
  };

  // Layer numbers along both sides, and a thin line between layers.
  const axes = (context, pairing, names) => {
    const { wide, tall, width, height } = plot;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = HS.color("soft");
    context.strokeStyle = HS.color("panel");
    context.lineWidth = Math.min(wide, tall) > 2 ? 1 : 0.4;
    const layers = HS.data.model.layers;
    const starts = (list) => (list ? layers.map((layer) => list.findIndex((name) => HS.model.layer(name) === layer))
      : layers.map((_, i) => i));
    const side = (list, horizontal) => {
      const first = starts(list), cell = horizontal ? wide : tall;
      const every = Math.ceil((26 * layers.length) / (horizontal ? width : height));
      first.forEach((start, i) => {
        const at = cell * start;
        context.beginPath();
        if (horizontal) { context.moveTo(MARGIN + at, 4); context.lineTo(MARGIN + at, 4 + height); }
        else { context.moveTo(MARGIN, 4 + at); context.lineTo(MARGIN + width, 4 + at); }
        if (i) context.stroke();
        if (i % every) return;
        context.textAlign = horizontal ? "left" : "right";
        context.fillText(`L${layers[i]}`, horizontal ? MARGIN + at + 1 : MARGIN - 5, horizontal ? height + 17 : 13
          + at);
      });
    };
    side(names[1], true);
    side(names[0], false);
    context.textAlign = "left";
    context.fillText(`${pairing[1]} of the target →`, MARGIN, height + 31);
    context.save();
    context.translate(10, 4 + height);
    context.rotate(-Math.PI / 2);
    context.fillText(`${pairing[0]} of the source →`, 0, 0);
    context.restore();
  };

  const scale = (context, { range: [low, high], above }, metric) => {
    const x = MARGIN + plot.width + 14, height = Math.min(160, plot.height);
    for (let i = 0; i < height; i++) {
      context.fillStyle = `rgb(${ramp[255 - Math.round((255 * i) / height)].join(" ")})`;
      context.fillRect(x, 4 + i, 10, 1.5);
    }
    const text = (v) => HS.number(v, HS.model.metric(metric).max > 1 ? 1 : 3);
    const ends = !above ? [text(low), text(high)] : above.level
      ? [low, high].map((v) => text(HS.chance.score(v, above.level))) : ["0 %", `${HS.number(100 * high, 0)} %`];
    context.fillStyle = HS.color("soft");
    context.textAlign = "left";
    context.fillText(`≥ ${ends[1]}`, x + 14, 13);
    context.fillText(`${above ? "≤ " : ""}${ends[0]}`, x + 14, 4 + height);
    if (above) HS.chance.name(metric).split(" + ").forEach((part, i) =>
      context.fillText(i ? `+ ${part}` : part, x, 20 + height + 13 * i));
  };

  const highlight = () => {
    if (!plot || plot.m.layers) { HS.canvas(over, 1, 1); return; }
    const { wide, tall, width, height, pairing } = plot;
    const context = HS.canvas(over, MARGIN + width + 70, height + 34);
    context.strokeStyle = "#ff3b6b";
    context.lineWidth = 1.5;
    const mark = (row, column, h, w) => context.strokeRect(MARGIN + wide * column - 1, 4 + tall * row - 1, wide * w + 2,
      tall * h + 2);
    const pair = HS.chosenPair();
    if (pair?.pairing === pairing) mark(pair.row, pair.column, Math.max(1, 4 / tall), Math.max(1, 4 / wide));
    if (HS.state.head) {
      const row = HS.model.place(pairing[0], HS.state.head), column = HS.model.place(pairing[1], HS.state.head);
      if (row >= 0) mark(row, 0, 1, plot.m.columns);
      if (column >= 0) mark(0, column, plot.m.rows, 1);
    }
    if (cursor && document.activeElement === canvas) { context.setLineDash([3, 2]); mark(cursor[0], cursor[1], 1, 1); }
  };

  const at = (event) => {
    if (!plot) return null;
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - MARGIN) / plot.wide),
      row = Math.floor((event.clientY - box.top - 4) / plot.tall);
    return row >= 0 && column >= 0 && row < plot.m.rows && column < plot.m.columns ? [row, column] : null;
  };

  const describe = ([row, column]) => {
    const { m, pairing, names } = plot;
    const metric = HS.state.metric;
    const v = m.layers ? { score: m.values[row * m.columns + column], exact: true }
      : HS.model.value(metric, pairing, row, column);
    if (Number.isNaN(v.score)) return "";
    const layers = HS.data.model.layers;
    const title = m.layers ? `L${layers[row]} → L${layers[column]}, largest`
      : `${names[0][row]}.${pairing[0]} → ${names[1][column]}.${pairing[1]}`;
    return `${title}\n${HS.model.metric(metric).title} ${v.exact ? "" : "≈ "}${HS.score(v.score, metric)}`;
  };

  const spoken = (cell) => describe(cell).replace("\n", ": ") || "No pair here.";

  const open = ([row, column]) => {
    const { m, pairing, names } = plot;
    if (!m.layers && !Number.isNaN(m.values[row * m.columns + column])) HS.choosePair(pairing, names[0][row],
      names[1][column]);
  };

  const listen = () => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    canvas.addEventListener("mousemove", (event) => { const cell = at(event); HS.tip(cell ? describe(cell) : "", event);
      });
    canvas.addEventListener("mouseleave", (event) => HS.tip("", event));
    canvas.addEventListener("click", (event) => { const cell = at(event); if (cell) open(cell); });
    canvas.addEventListener("keydown", (event) => {
      if (!plot) return;
      if (steps[event.key]) {
        const [row, column] = cursor ?? [0, 0];
        cursor = [Math.max(0, Math.min(plot.m.rows - 1, row + steps[event.key][0])),
          Math.max(0, Math.min(plot.m.columns - 1, column + steps[event.key][1]))];
        HS.byId("heat-caption").textContent = spoken(cursor);
        highlight();
      } else if (event.key === "Enter" && cursor) open(cursor);
      else return;
      event.preventDefault();
    });
  };

  const start = () => {
    canvas = HS.el("canvas", { id: "heat-canvas", tabindex: "0", role: "img",
      "aria-label": "Heat map; arrow keys move over the pairs, Enter opens one" });
    over = HS.el("canvas", { "aria-hidden": "true" });
    listen();
    const all = HS.lazy(HS.byId("heatmaps"), () => { thumbnails(); draw(); });
    const main = HS.lazy(HS.byId("heat-main"), draw);
    HS.on(["metric", "theme", "own"], all);
    HS.on(["heat"], main);
    HS.on(["head", "pair"], () => requestAnimationFrame(highlight));
    const common = HS.byId("heat-common"), sync = () => { common.checked = !HS.state.own; };
    common.addEventListener("change", () => HS.set({ own: common.checked ? "" : "1" }));
    HS.on(["own"], sync);
    sync();
    window.addEventListener("resize", main);
  };
  return { start };
})();

// Save the diagram as shown, with its legend and a caption: as a standalone SVG, or as a PNG made from it.
"use strict";
HS.save = (() => {
  const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity",
    "display", "visibility", "font-family", "font-size", "font-weight", "text-anchor"];
  const LINE = 18, NARROW = 640;

  // What is drawn, in words that are true for this view.
  const caption = () => {
    const v = HS.wiring.view(), { model, generator } = HS.data, { head, pair, circuit } = HS.state;
    const rules = {
      top: `best ${Math.min(v.k, HS.model.mostK("top"))} per pairing`, threshold: "all above the minimum",
      "top-per-target": `best ${Math.min(v.k, HS.model.mostK("top-per-target"))} per target`,
      significance: `q ≤ ${v.q} against ${HS.controls.NULLS[v.null]}`,
    };
    const pinned = HS.circuit.keys().length;
    const chosen = v.only ? [`circuit “${circuit || "circuit"}”`, `${pinned} edges chosen by hand`]
      : [v.pairings.join(", "), rules[v.rule], v.min > -Infinity ? `score ≥ ${v.min}` : "", v.large
        ? "large effects only" : "",
        pinned ? `and ${pinned} pinned edges${circuit ? ` of the circuit “${circuit}”` : ""}` : ""];
    const focus = head ? `only the edges of ${head}` : pair ? `${pair.replace("-", " → ")} selected` : "";
    const first = [HS.model.metric(v.metric).title, ...chosen, focus].filter(Boolean).join(" · ");
    const measured = HS.data.effects?.compared ? ` Effects: ${HS.evidence.tokens()}.` : "";
    const lines = v.only ? "Line width: score above chance." : "Line width: score above chance; grey: no evidence.";
    return [`${model.name}: ${first}`, `${lines}${measured} Made with ${generator.name} ${generator.version}.`];
  };

  // Text cut into lines that fit.
  const wrapped = (text, wide) => {
    const most = Math.floor((wide - 24) / 6.9), found = [""];
    for (const word of text.split(" ")) {
      if (found.at(-1).length + word.length + 1 > most && found.at(-1)) found.push(word);
      else found.push(`${found.pop()} ${word}`.trim());
    }
    return found;
  };

  // A copy of the whole diagram at its natural size, with the page's styles inlined.
  const diagram = () => {
    const from = HS.byId("wiring-svg"), to = from.cloneNode(true);
    const originals = [from, ...from.querySelectorAll("*")], copies = [to, ...to.querySelectorAll("*")];
    originals.forEach((node, i) => {
      const style = getComputedStyle(node);
      for (const name of KEPT) copies[i].setAttribute(name, style.getPropertyValue(name));
      copies[i].removeAttribute("style");
    });
    for (const node of to.querySelectorAll(".edge-hit, .header-ground")) node.remove();
    to.querySelector(".world").setAttribute("transform", "translate(0 0)");
    for (const text of to.querySelectorAll(".header text")) {
      text.setAttribute("x", text.dataset.x);
      text.setAttribute("visibility", "visible");
    }
    return to;
  };

  const picture = () => {
    const to = diagram(), { width, total } = HS.wiring.geometry(), wide = Math.ceil(Math.max(width, NARROW));
    const key = HS.legend.drawn(wide), [first, second] = caption();
    const rows = [...wrapped(first, wide).map((text) => [text, 600]),
      ...wrapped(second, wide).map((text) => [text, 400])];
    const high = Math.ceil(total + 6 + key.height + rows.length * LINE + 8);
    key.picture.setAttribute("transform", `translate(0 ${total + 6})`);
    const lines = rows.map(([text, weight], i) => HS.svg("text", {
      x: 12, y: total + 6 + key.height + LINE * (i + 0.75), fill: HS.color("text"), "font-family": "sans-serif",
      "font-size": 12, "font-weight": weight, text,
    }));
    const size = { width: wide, height: high, viewBox: `0 0 ${wide} ${high}` };
    for (const [name, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", ...size })) to.setAttribute(name,
      value);
    to.prepend(HS.svg("rect", { width: "100%", height: "100%", fill: HS.color("panel") }));
    to.append(key.picture, ...lines);
    return { text: new XMLSerializer().serializeToString(to), width: wide, height: high };
  };

  const name = (ending) => {
    const circuit = HS.wiring.view().only ? `-${HS.state.circuit || "circuit"}` : "-wiring";
    return `${`${HS.data.model.name}${circuit}`.replace(/[^\w.-]+/g, "-").slice(0, 80)}.${ending}`;
  };
  const svg = () => HS.download(name("svg"), picture().text, "image/svg+xml");
  const png = () => {
    const { text, width, height } = picture(), image = new Image(), ratio = Math.min(2, 8000 / Math.max(width, height));
    image.onload = () => {
      const canvas = HS.el("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => HS.download(name("png"), blob), "image/png");
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  };

  const start = () => HS.byId("save").append(
    HS.el("button", { type: "button", id: "save-svg", text: "Save SVG", onclick: svg }),
    HS.el("button", { type: "button", id: "save-png", text: "Save PNG", onclick: png }));
  return { start, picture };
})();

// Save the diagram as shown, with a caption: as a standalone SVG, or as a PNG made from it.
"use strict";
HS.save = (() => {
  const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity", "display", "visibility", "font-family", "font-size", "font-weight", "text-anchor"];
  const CAPTION = 46;

  const caption = () => {
    const v = HS.wiring.view(), rule = { top: `best ${v.k} per pairing`, "top-per-target": `best ${v.k} per target`, significance: `q ≤ ${v.q}, ${v.null} null`, threshold: "all above the minimum" }[v.rule];
    const about = [HS.model.metric(v.metric).title, v.pairings.join(", "), rule, v.min > -Infinity ? `score ≥ ${v.min}` : "", v.large ? "large effects only" : ""].filter(Boolean).join(" · ");
    const roles = { Q: "queries", K: "keys", V: "values", O: "outputs", R: "nodes" }, shown = [...new Set(v.pairings.map((p) => p[1]))];
    return [`${HS.data.model.name}: ${about}`, `Lines: read by ${shown.map((r) => roles[r]).join(", ")}; strength: excess over chance. Made with ${HS.data.generator.name} ${HS.data.generator.version}.`, shown];
  };

  // A copy of the whole diagram at its natural size, with the page's styles inlined.
  const picture = () => {
    const from = HS.byId("wiring-svg"), to = from.cloneNode(true);
    const { width, total: height } = HS.wiring.geometry();
    const originals = [from, ...from.querySelectorAll("*")], copies = [to, ...to.querySelectorAll("*")];
    originals.forEach((node, i) => {
      const style = getComputedStyle(node);
      for (const name of KEPT) copies[i].setAttribute(name, style.getPropertyValue(name));
      copies[i].removeAttribute("style");
    });
    for (const node of to.querySelectorAll(".edge-hit, .header-ground")) node.remove();
    to.querySelector(".world").setAttribute("transform", "translate(0 0)");
    for (const text of to.querySelectorAll(".header text")) { text.setAttribute("x", text.dataset.x); text.setAttribute("visibility", "visible"); }
    const [first, second, roles] = caption(), wide = Math.max(width, 560);
    for (const [name, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", width: wide, height: height + CAPTION, viewBox: `0 0 ${wide} ${height + CAPTION}` })) to.setAttribute(name, value);
    to.prepend(HS.svg("rect", { width: "100%", height: "100%", fill: HS.color("panel") }));
    const line = (text, y, weight) => HS.svg("text", { x: 12, y, fill: HS.color("text"), "font-family": "sans-serif", "font-size": 12, "font-weight": weight, text });
    to.append(line(first, height + 17, 600), line(second, height + 35, 400));
    roles.forEach((role, i) => to.append(HS.svg("rect", { x: wide - 22 * (roles.length - i), y: height + 24, width: 14, height: 12, rx: 3, fill: HS.color(`role-${role}`) })));
    return { text: new XMLSerializer().serializeToString(to), width: wide, height: height + CAPTION };
  };

  const name = (ending) => `${HS.data.model.name.replace(/[^\w.-]+/g, "-").slice(0, 60) || "wiring"}-wiring.${ending}`;
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

  const start = () => HS.byId("save").append(HS.el("button", { type: "button", id: "save-svg", text: "Save SVG", onclick: svg }), HS.el("button", { type: "button", id: "save-png", text: "Save PNG", onclick: png }));
  return { start };
})();

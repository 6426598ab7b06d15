// Zooming and panning the diagram: buttons, keys, drag, Ctrl and wheel, pinch. The column names stay visible.
"use strict";
HS.zoom = (() => {
  const LEAST = 0.12, MOST = 4, READABLE = 0.62, SMALL = 0.45; // SMALL: still worth seeing whole
  let at = { x: 0, y: 0, s: 1 }, content = { width: 1, height: 1 }, window_ = { width: 1, height: 1 };
  let parts = null, moved = false, chosen = false; // chosen: the reader has moved or scaled the diagram
  const fingers = new Map();

  // The room below the controls when the page is at its top, but for the buttons under the diagram.
  const tallest = () => {
    const above = HS.byId("diagram").getBoundingClientRect().top + scrollY;
    return Math.max(320, Math.min(900, innerHeight - above - 16));
  };

  // Show the whole diagram if it stays legible, otherwise its upper left corner.
  const fit = (svg, world, header, size) => {
    const same = parts && content.width === size.width && content.height === size.height;
    const box = HS.byId("diagram");
    content = size;
    const wide = box.clientWidth, whole = Math.min(1, wide / size.width);
    const height = Math.min(size.height * Math.max(whole, READABLE), tallest()) || 200;
    window_ = { width: wide, height: Math.max(150, height) };
    parts = { svg, world, header };
    svg.setAttribute("width", wide);
    svg.setAttribute("height", window_.height);
    svg.setAttribute("viewBox", `0 0 ${wide} ${window_.height}`); // paper is narrower than the window
    if (same && chosen) apply(); else reset();
  };

  const reset = () => {
    const all = Math.min(window_.width / content.width, window_.height / content.height);
    const s = Math.min(1, all >= SMALL ? all : READABLE);
    at = { s, x: Math.max(0, (window_.width - content.width * s) / 2), y: 0 };
    chosen = false;
    apply();
  };
  const whole = () => {
    at = { s: Math.min(1, window_.width / content.width, window_.height / content.height), x: 0, y: 0 };
    chosen = true;
    apply();
  };

  const apply = () => {
    const wide = content.width * at.s, high = content.height * at.s;
    at.x = wide <= window_.width ? (window_.width - wide) / 2 : Math.min(0, Math.max(window_.width - wide, at.x));
    at.y = high <= window_.height ? 0 : Math.min(0, Math.max(window_.height - high, at.y));
    parts.world.setAttribute("transform", `translate(${at.x.toFixed(2)} ${at.y.toFixed(2)}) scale(${at.s.toFixed(4)})`);
    let free = -Infinity;
    for (const text of parts.header.children) {
      const x = at.x + at.s * Number(text.dataset.x), half = 4 * text.textContent.length + 2;
      text.setAttribute("x", x.toFixed(1));
      const fits = x - half > free;
      text.setAttribute("visibility", fits ? "visible" : "hidden");
      if (fits) free = x + half;
    }
    const box = HS.byId("diagram").parentElement;
    for (const [side, more] of [["left", at.x < -1], ["right", at.x + wide > window_.width + 1], ["up", at.y < -1],
      ["down", at.y + high > window_.height + 1]]) box.classList.toggle(`more-${side}`, more);
    HS.byId("zoom-level").textContent = `${Math.round(100 * at.s)} %`;
  };

  const scale = (factor, cx = window_.width / 2, cy = window_.height / 2) => {
    const s = Math.max(LEAST, Math.min(MOST, at.s * factor));
    at = { s, x: cx - ((cx - at.x) * s) / at.s, y: cy - ((cy - at.y) * s) / at.s };
    chosen = true;
    apply();
  };
  const pan = (dx, dy) => {
    at.x += dx;
    at.y += dy;
    chosen = true;
    apply();
  };

  const reveal = (x, y) => {
    const sx = at.x + at.s * x, sy = at.y + at.s * y, m = 50;
    pan(sx < m ? m - sx : sx > window_.width - m ? window_.width - m - sx : 0,
      sy < m ? m - sy : sy > window_.height - m ? window_.height - m - sy : 0);
  };

  const key = (name) => {
    if (name === "+" || name === "=") scale(1.25);
    else if (name === "-") scale(0.8);
    else if (name === "0") reset();
    else return false;
    return true;
  };

  const listen = () => {
    const box = HS.byId("diagram");
    const place = (event) => { const r = box.getBoundingClientRect();
      return [event.clientX - r.left, event.clientY - r.top]; };
    box.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) scale(Math.exp(-event.deltaY / 300), ...place(event));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)
        && content.width * at.s > window_.width) pan(-event.deltaX, 0);
      else return;
      event.preventDefault();
    }, { passive: false });
    box.addEventListener("pointerdown",
      (event) => { if (event.button === 0) { fingers.set(event.pointerId, place(event)); moved = false; } });
    box.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId), now = place(event);
      if (!before) return;
      const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
      if (!moved && !other && Math.hypot(now[0] - before[0], now[1] - before[1]) < 5) return;
      if (!moved) { moved = true; box.setPointerCapture?.(event.pointerId); }
      if (other) {
        const span = (p) => Math.max(10, Math.hypot(p[0] - other[0], p[1] - other[1]));
        scale(span(now) / span(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
      } else pan(now[0] - before[0], now[1] - before[1]);
      fingers.set(event.pointerId, now);
    });
    const up = (event) => fingers.delete(event.pointerId);
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) box.addEventListener(name, up);
    const button = (text, label, onclick) =>
      HS.el("button", { type: "button", text, "aria-label": label, title: label, onclick });
    HS.byId("zoom").append(button("−", "Smaller", () => scale(0.8)), HS.el("span", { id: "zoom-level" }),
      button("+", "Larger", () => scale(1.25)), button("Fit", "Show the whole diagram", whole));
  };

  // Ignore the click that ends a drag.
  const dragged = () => { const was = moved; moved = false; return was; };
  return { fit, whole, reveal, key, listen, dragged };
})();

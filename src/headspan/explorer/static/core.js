// Shared by all parts: creating elements (data is only ever inserted as text), numbers, state in the URL fragment,
// tooltip.
"use strict";
const HS = {};

HS.el = (tag, properties = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

HS.svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};

HS.byId = (id) => document.getElementById(id);
HS.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ---------------------------------------------------------------- numbers
HS.decode = (text, Type) => {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Type(bytes.buffer);
};

HS.number = (value, digits = 4) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1");
};

// Scores between 0 and 1 need more digits than kernels up to 64.
HS.score = (value, metric) => HS.number(value, HS.model.metric(metric).max > 1 ? 3 : 4);
HS.count = (value) => value.toLocaleString("en");
HS.plural = (count, one, many = `${one}s`) => `${HS.count(count)} ${count === 1 ? one : many}`;
HS.qvalue = (q) => (q === null || Number.isNaN(q) ? "–" : q < 1e-30 ? "< 1e-30" : HS.number(q, 4));

// ---------------------------------------------------------------- state
// One flat object. Whatever differs from the default goes into the fragment, so that an address describes a view.
HS.state = {};
HS.defaults = {};
HS.listeners = [];

HS.parse = (fragment) => {
  const found = { ...HS.defaults };
  for (const [key, value] of new URLSearchParams(fragment.replace(/^#/, ""))) if (key in found) found[key] = value;
  return found;
};

HS.fragment = () => {
  const parts = new URLSearchParams();
  for (const [key, value] of Object.entries(HS.state)) if (value !== HS.defaults[key]) parts.set(key, value);
  return parts.toString().replaceAll("%2C", ",");
};

HS.set = (changes, remember = false) => {
  const before = HS.state;
  HS.state = { ...before };
  for (const [key, value] of Object.entries(changes)) HS.state[key] = String(value);
  const address = `#${HS.fragment()}`;
  try {
    if (remember) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  } catch {
    // A page inside a notebook cell has no address of its own: the view works but cannot be shared.
  }
  HS.announce(before);
};

HS.announce = (before) => {
  const changed = new Set(Object.keys(HS.state).filter((key) => HS.state[key] !== before[key]));
  if (changed.size) for (const listen of HS.listeners) listen(changed);
};

HS.on = (keys, handler) => {
  HS.listeners.push((changed) => { if (keys.some((key) => changed.has(key))) handler(changed); });
};

HS.chooseHead = (name) => HS.set({ head: HS.state.head === name ? "" : name, pair: "" }, true);
HS.openHead = (name) => HS.set({ head: name, pair: "" }, true);
HS.choosePair = (pairing, source, target) =>
  HS.set({ pair: `${source}.${pairing[0]}-${target}.${pairing[1]}`, head: "" }, true);
HS.clear = () => HS.set({ head: "", pair: "" }, true);

HS.chosenPair = () => HS.pairOf(HS.state.pair);
HS.pairOf = (key) => {
  const match = /^(.+)\.([QKVORW])-(.+)\.([QKVORW])$/.exec(key);
  if (!match) return null;
  const pairing = match[2] + match[4];
  const row = HS.model.place(match[2], match[1]);
  const column = HS.model.place(match[4], match[3]);
  if (row < 0 || column < 0 || !HS.data.pairings.includes(pairing)) return null;
  return { pairing, source: match[1], target: match[3], row, column };
};

// ---------------------------------------------------------------- tooltip and small parts
HS.tip = (text, event) => {
  const tip = HS.byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 14;
  const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
};

HS.headLink = (name) =>
  HS.el("button", { type: "button", class: "link", text: name, "data-head": name, onclick: () => HS.openHead(name) });

HS.pairLink = (pairing, source, target) =>
  HS.el("button", {
    type: "button", class: "link", text: `${source} → ${target}`, title: `Open the ${pairing} pair card`,
    onclick: () => HS.choosePair(pairing, source, target),
  });

HS.select = (label, key, options) => {
  const box = HS.el("select", { id: `control-${key}`, onchange: (event) => HS.set({ [key]: event.target.value }) });
  for (const [value, text] of options) box.append(HS.el("option", { value, text }));
  const sync = () => { box.value = HS.state[key]; };
  HS.on([key], sync);
  sync();
  return HS.el("label", { class: "field" }, HS.el("span", { text: label }), box);
};

HS.empty = (text) => HS.el("p", { class: "empty", text });

// Copy text and say so on the button.
HS.copy = async (text, button) => {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Cannot copy here";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
};

// A canvas as sharp as the screen, with its drawing context in CSS pixels.
HS.canvas = (canvas, width, height) => {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
};

// Draw a part only while it is near the window, so that a click at the top does not wait for a heat map far below.
HS.lazy = (element, draw) => {
  let near = false;
  let stale = true;
  const run = () => { if (near && stale) { stale = false; draw(); } };
  new IntersectionObserver((entries) => {
    near = entries[entries.length - 1].isIntersecting;
    run();
  }, { rootMargin: "300px" }).observe(element);
  HS.lazyParts.push(() => { near = true; stale = true; run(); });
  return () => { stale = true; requestAnimationFrame(run); };
};
HS.lazyParts = [];

// Lines of every diagram: how wide they are, where they leave and enter their boxes, the way between, and arrowheads.
"use strict";
HS.routing = (() => {
  const RUN = 12, BEND = 0.48; // most pixels that a line is level beside a box; how soon a bow turns
  const ROLES = ["Q", "K", "V", "O", "R"], REST = "rest";
  const looks = () => HS.data.looks;

  // The width of a line in pixels: linear in the score above chance for a line with evidence, thin for any other.
  const width = (strength, passes = true) =>
    passes ? looks().least + (looks().most - looks().least) * strength : looks().rest;

  // Arrowheads of three sizes for thin, middling and thick lines; their tips touch the box.
  const SIZES = [8, 10, 12];
  const size = (wide) => (wide < 2.5 ? 0 : wide < 4 ? 1 : 2);
  const arrowheads = (id) => HS.svg("defs", {}, ...[...ROLES, REST].flatMap((role) => SIZES.map((side, i) =>
    HS.svg("marker", {
      id: `${id}-${role}-${i}`, class: `arrow ${role === REST ? REST : `to-${role}`}`, viewBox: "0 0 8 8",
      refX: 0.5, refY: 4, markerWidth: side, markerHeight: side, markerUnits: "userSpaceOnUse", orient: "auto",
    }, HS.svg("path", { d: "M0 .8 L8 4 L0 7.2 Z" })))));

  // One line as two SVG paths: what is seen, and a wider invisible one for the pointer.
  const line = (id, way, { source, target, pairing }, wide, passes, more = "") => {
    const role = passes ? pairing[1] : REST, kind = passes ? "" : " rest";
    const classes = `edge from-${pairing[0]} to-${pairing[1]}${kind}`;
    return {
      path: HS.svg("path", {
        class: `${classes} ${more}`.trim(), d: way, "stroke-width": wide.toFixed(2),
        "marker-end": `url(#${id}-${role}-${size(wide)})`,
      }),
      hit: HS.svg("path", {
        class: "edge-hit", d: way, "data-pair": `${source}.${pairing[0]}-${target}.${pairing[1]}`,
      }),
    };
  };

  // Every line leaves and enters a box at its own height, ordered by the other end.
  // made: [{a, b, via, key}] with boxes {x, y, tall} and the heights of the lanes between; sets y1 and y2.
  const spread = (made) => {
    const side = (end, height, next) => {
      const by = new Map();
      for (const r of made) { if (!by.has(r[end])) by.set(r[end], []); by.get(r[end]).push(r); }
      for (const [box, list] of by) {
        const step = Math.min(4, (box.tall - 6) / Math.max(1, list.length - 1));
        list.sort((p, q) => next(p) - next(q) || p.key.localeCompare(q.key));
        list.forEach((r, i) => { r[height] = box.y + (i - (list.length - 1) / 2) * step; });
      }
    };
    side("a", "y1", (r) => r.via[0] ?? r.b.y);
    side("b", "y2", (r) => r.via.at(-1) ?? r.a.y);
  };

  // How far a level part reaches from the middle of a box: no more than half the gap between two columns leaves.
  const reach = (half, column) => half + Math.max(3, Math.min(RUN, (column / 2 - half) / 2));

  // The way of a line through its lanes, as a path and as the last bow before the target.
  // xs: the middle of every column; half: half the width of a box; column: the width of a column.
  const route = (r, xs, half, column, wide) => {
    const out = reach(half, column), head = SIZES[size(wide)], into = half + Math.min(head, column / 2 - half - 1);
    const beside = ("QKVOR".indexOf(r.pairing[1]) - 1) * 1.6; // two pairings of the same two heads share a lane
    const bow = (x1, y1, x2, y2) => {
      const bend = (x2 - x1) * BEND;
      return `C${[x1 + bend, y1, x2 - bend, y2, x2, y2].map((v) => v.toFixed(1)).join(" ")}`;
    };
    let x = r.a.x + out, y = r.y1, way = `M${(r.a.x + half).toFixed(1)} ${y.toFixed(1)} H${x.toFixed(1)} `;
    r.via.forEach((lane, i) => {
      const at = xs[r.a.column + 1 + i];
      way += `${bow(x, y, at - out, lane + beside)} H${(at + out).toFixed(1)} `;
      [x, y] = [at + out, lane + beside];
    });
    const end = r.b.x - Math.max(out, into + 1);
    way += `${bow(x, y, end, r.y2)} H${(r.b.x - into).toFixed(1)}`;
    return { way, last: { x1: x, y1: y, x2: end, y2: r.y2 }, edge: r.b.x - into };
  };

  // The point of a route at this x, which may lie on its last bow or on the level part after it.
  const pointAt = ({ last }, x) => {
    if (x >= last.x2) return { x, y: last.y2 };
    const cubic = (t, a, b, c, d) => a * (1 - t) ** 3 + 3 * b * t * (1 - t) ** 2 + 3 * c * t * t * (1 - t) + d * t ** 3;
    let low = 0, high = 1;
    for (let i = 0; i < 20; i++) {
      const t = (low + high) / 2;
      if (cubic(t, 0, BEND, 1 - BEND, 1) * (last.x2 - last.x1) + last.x1 < x) low = t; else high = t;
    }
    return { x, y: cubic(low, last.y1, last.y1, last.y2, last.y2) };
  };

  // Places for dots of these radii, one on each route, near its target but clear of each other, the largest first.
  // dots: [{route, r}]; returns their centres.
  const STEP = 4, TRIES = 30;
  const placeDots = (dots) => {
    const taken = new Map(), cell = (x) => Math.floor(x / 40), places = [];
    const clearance = ({ x, y }, r) => {
      let least = Infinity;
      for (const side of [-1, 0, 1])
        for (const other of taken.get(cell(x) + side) ?? [])
          least = Math.min(least, Math.hypot(other.x - x, other.y - y) - other.r - r);
      return least;
    };
    for (const i of dots.map((_, at) => at).sort((a, b) => dots[b].r - dots[a].r)) {
      const { route: way, r } = dots[i];
      let best = null, room = -Infinity;
      for (let tries = 0, x = way.edge - r - 1; tries < TRIES && room < 0.5; tries++, x -= STEP) {
        if (tries && x < way.last.x1 + r) break;
        const here = pointAt(way, x), free = clearance(here, r);
        if (free > room) [best, room] = [here, free];
      }
      places[i] = best;
      if (!taken.has(cell(best.x))) taken.set(cell(best.x), []);
      taken.get(cell(best.x)).push({ ...best, r });
    }
    return places;
  };

  return { width, arrowheads, line, spread, route, placeDots };
})();

// The layout of the wiring diagram. Columns are positions of the residual stream. Boxes that belong together
// (a key/value head and its query heads) form one item of a column. A line that passes a column gets its own lane
// there, so that no line runs through a box. Barycentre passes and sifting order the items to reduce crossings.
"use strict";
HS.layout = (() => {
  const ROW = 27, LANE = 7, BESIDE = 9, GAP = 9, FRAME = 7, SWEEPS = 16;
  const CROWDED = 900, MANY = 2500; // with more items one start must do, and beyond that no sifting

  const newRow = (name, item) => ({ name, item, at: 0, left: [], right: [] });
  const newItem = (column, names, frame, lane) => {
    const item = { column, frame, lane, y: 0, middle: 0, number: 0, rows: [], left: [], right: [] };
    item.rows = names.map((name) => newRow(name, item));
    return item;
  };
  const connect = (a, b) => { a.right.push(b); b.left.push(a); };

  // groups: [{column, members: [names], frame}] in the order of their numbers;
  // links: [{source, target}], columns apart.
  const arrange = ({ columns, groups, links, numeric }) => {
    const items = groups.map((g) => newItem(g.column, g.members, g.frame, false));
    items.forEach((item, i) => { item.number = i; });
    const where = new Map(items.flatMap((item) => item.rows.map((row) => [row.name, row])));
    const chains = links.map(({ source, target }) => {
      const chain = [where.get(source)], last = where.get(target);
      for (let c = chain[0].item.column + 1; c < last.item.column; c++) {
        items.push(newItem(c, [""], false, true));
        chain.push(items.at(-1).rows[0]);
      }
      chain.push(last);
      for (let i = 1; i < chain.length; i++) connect(chain[i - 1], chain[i]);
      return { source, target, chain };
    });
    const stacks = columns.map(() => []);
    for (const item of items) stacks[item.column].push(item);
    begin(stacks, chains);
    const crossings = untangle(stacks, items.length, numeric);
    place(stacks, items.length);
    return { stacks, chains, crossings, height: settle(stacks) };
  };

  // The initial order: heads by number, and lanes at a height between the two ends of their line.
  const begin = (stacks, chains) => {
    const rank = new Map();
    for (const stack of stacks) stack.filter((i) => !i.lane).forEach((item, i, all) =>
      rank.set(item, i - all.length / 2));
    for (const { chain } of chains) chain.forEach(({ item }, i) => {
      const [first, last] = [rank.get(chain[0].item), rank.get(chain.at(-1).item)];
      if (item.lane) rank.set(item, first + ((last - first) * i) / (chain.length - 1) + 0.25);
    });
    for (const stack of stacks) { stack.sort((a, b) => rank.get(a) - rank.get(b)); count(stack); }
  };

  // The index of every row, counted from the top of its column.
  const count = (stack) => {
    let next = 0;
    for (const item of stack) {
      for (const row of item.rows) row.at = next++;
      item.middle = next - (item.rows.length + 1) / 2;
    }
  };

  // ---------------------------------------------------------------- order
  // The best of several starts: numerical order, then perturbations of the best so far (deterministic).
  const untangle = (stacks, items, numeric) => {
    const tries = items > CROWDED ? 1 : Math.max(2, Math.min(24, Math.round(6000 / items)));
    let best = total(stacks), kept = remember(stacks), random = 12345;
    const lot = () => { random = (random * 1103515245 + 12345) % 2147483648; return random / 2147483648 - 0.5; };
    for (let attempt = 0; attempt < tries && best; attempt++) {
      const stir = (item) => item.middle + (2 + (attempt % 9)) * lot();
      if (attempt) for (const stack of stacks) sortBy(stack, stir, numeric);
      for (let sweep = 0, idle = 0, least = Infinity; sweep < SWEEPS && idle < 2; sweep++) {
        const down = sweep % 2 === 0;
        for (const stack of down ? stacks : [...stacks].reverse()) {
          if (!numeric) for (const item of stack) if (item.rows.length > 1) item.rows.sort((a, b) =>
            pull([a], down, a.at) - pull([b], down, b.at));
          sortBy(stack, (item) => pull(item.rows, down, item.middle), numeric);
        }
        if (items <= MANY) sift(stacks, numeric);
        const now = total(stacks);
        idle = now < least ? 0 : idle + 1;
        least = Math.min(least, now);
        if (now < best) { best = now; kept = remember(stacks); }
      }
      restore(stacks, kept);
    }
    return best;
  };
  const remember = (stacks) => stacks.map((stack) => stack.map((item) => [item, [...item.rows]]));
  const restore = (stacks, kept) => stacks.forEach((stack, c) => {
    kept[c].forEach(([item, rows], i) => { item.rows = [...rows]; stack[i] = item; });
    count(stack);
  });

  const sortBy = (stack, keyOf, numeric) => {
    for (const item of stack) item.key = keyOf(item);
    stack.sort((a, b) => a.key - b.key);
    if (numeric) {
      const heads = stack.filter((item) => !item.lane).sort((a, b) => a.number - b.number);
      stack.forEach((item, i) => { if (!item.lane) stack[i] = heads.shift(); });
    }
    count(stack);
  };

  // The mean index of the neighbours in the column before (or after); of both if there are none.
  const pull = (rows, down, otherwise) => {
    for (const sides of down ? [["left"], ["right"]] : [["right"], ["left"]]) {
      let sum = 0, n = 0;
      for (const row of rows) for (const side of sides) for (const other of row[side]) { sum += other.at; n += 1; }
      if (n) return sum / n;
    }
    return otherwise;
  };

  // Sifting: move each item to the place in its column with the fewest crossings, until nothing improves.
  const sift = (stacks, numeric) => {
    for (let round = 0, better = true; better && round < 5; round++) {
      better = false;
      for (const stack of stacks) {
        for (const item of stack) for (const side of ["left", "right"]) item[side] = item.rows.flatMap((row) =>
          row[side].map((other) => other.at));
        for (const item of [...stack]) better = moveBest(stack, item, numeric) || better;
        if (!numeric) for (const item of stack) if (item.rows.length > 1) better = swapRows(item) || better;
        count(stack);
      }
    }
  };

  const above = (first, second) => {
    let n = 0;
    for (const a of first) for (const b of second) n += a > b;
    return n;
  };
  const tangled = (first, second) => above(first.left, second.left) + above(first.right, second.right);

  const moveBest = (stack, item, numeric) => {
    const here = stack.indexOf(item), reach = stack.length > 120 ? 6 : stack.length;
    let best = 0, goal = here;
    for (const step of [1, -1]) {
      let gain = 0;
      for (let i = here + step; i >= 0 && i < stack.length && Math.abs(i - here) <= reach; i += step) {
        const other = stack[i];
        if (numeric && !item.lane && !other.lane) break;
        gain += step * (tangled(other, item) - tangled(item, other));
        if (gain < best) { best = gain; goal = i; }
      }
    }
    if (goal === here) return false;
    stack.splice(here, 1);
    stack.splice(goal, 0, item);
    return true;
  };

  const swapRows = (item) => {
    let better = false;
    const places = (row) => ({ left: row.left.map((o) => o.at), right: row.right.map((o) => o.at) });
    for (let i = 0; i + 1 < item.rows.length; i++) {
      const [a, b] = [places(item.rows[i]), places(item.rows[i + 1])];
      if (tangled(b, a) < tangled(a, b)) {
        [item.rows[i], item.rows[i + 1]] = [item.rows[i + 1], item.rows[i]];
        better = true;
      }
    }
    return better;
  };

  // Crossings between neighbouring columns: pairs of lines whose ends are in opposite order.
  const total = (stacks) => {
    let n = 0;
    for (const stack of stacks) {
      const ends = [];
      for (const item of stack) for (const row of item.rows)
        ends.push(...row.right.map((other) => other.at).sort((a, b) => a - b));
      n += inversions(ends);
    }
    return n;
  };

  const inversions = (list) => {
    if (list.length < 24) {
      let n = 0;
      for (let i = 1; i < list.length; i++) { // insertion sort, counting inversions
        const v = list[i];
        let j = i - 1;
        for (; j >= 0 && list[j] > v; j--) list[j + 1] = list[j];
        list[j + 1] = v;
        n += i - 1 - j;
      }
      return n;
    }
    const half = list.length >> 1, low = list.slice(0, half), high = list.slice(half);
    let n = inversions(low) + inversions(high), i = 0, j = 0;
    for (let k = 0; k < list.length; k++) {
      if (j >= high.length || (i < low.length && low[i] <= high[j])) list[k] = low[i++];
      else { list[k] = high[j++]; n += low.length - i; }
    }
    return n;
  };

  // ---------------------------------------------------------------- heights
  const size = (item) => (item.lane ? 0 : item.rows.length * ROW - 4 + (item.frame ? 2 * FRAME : 0));
  const apart = (a, b) => (size(a) + size(b)) / 2 + (a.lane && b.lane ? LANE : a.lane || b.lane ? BESIDE : GAP);
  const shift = (row) => (row.item.lane ? 0 : (row.item.rows.indexOf(row) - (row.item.rows.length - 1) / 2) * ROW);
  const rowY = (row) => row.item.y + row.shift;

  // To straighten lines, move every item towards the mean of its neighbours as far as the order allows.
  const place = (stacks, items) => {
    for (const stack of stacks) {
      let y = 0;
      stack.forEach((item, i) => {
        y += i ? apart(stack[i - 1], item) : 0;
        item.y = y;
        for (const row of item.rows) row.shift = shift(row);
      });
      for (const item of stack) item.y -= y / 2;
    }
    for (let round = 0; round < (items > MANY ? 6 : 20); round++)
      for (const stack of round % 2 ? [...stacks].reverse() : stacks) fit(stack, stack.map(wanted));
  };

  const wanted = (item) => {
    let sum = 0, weight = 0;
    for (const row of item.rows) for (const side of [row.left, row.right]) for (const other of side) {
      const w = item.lane && other.item.lane ? 6 : 1;
      sum += w * (rowY(other) - row.shift);
      weight += w;
    }
    return { y: weight ? sum / weight : item.y, weight: item.lane ? 3 : 0.5 + weight };
  };

  // Least squares subject to the order: neighbours that would come too close move together.
  const fit = (stack, goals) => {
    let offset = 0;
    const blocks = [];
    stack.forEach((item, i) => {
      offset += i ? apart(stack[i - 1], item) : 0;
      let block = { sum: (goals[i].y - offset) * goals[i].weight, weight: goals[i].weight, items: [[item, offset]] };
      while (blocks.length && blocks.at(-1).sum / blocks.at(-1).weight > block.sum / block.weight) {
        const before = blocks.pop();
        block = { sum: before.sum + block.sum, weight: before.weight + block.weight,
          items: before.items.concat(block.items) };
      }
      blocks.push(block);
    });
    for (const block of blocks) for (const [item, by] of block.items) item.y = block.sum / block.weight + by;
  };

  // Shift the top to 0, and return the total height.
  const settle = (stacks) => {
    let low = Infinity, high = -Infinity;
    for (const item of stacks.flat()) {
      low = Math.min(low, item.y - size(item) / 2);
      high = Math.max(high, item.y + size(item) / 2);
    }
    for (const item of stacks.flat()) item.y -= low;
    return high > low ? high - low : 0;
  };

  return { arrange, rowY, size };
})();

// A squarified treemap: rectangles whose areas are in proportion to sizes, as nearly square as possible.

// The rectangles of items with a `size`, the largest first, in the rectangle that they fill.
function squarify(items, { x, y, width, height }) {
  const placed = [];
  let rest = items.filter((item) => item.size > 0).sort((a, b) => b.size - a.size);
  let scale = (width * height) / rest.reduce((sum, item) => sum + item.size, 0);
  while (rest.length) {
    const short = Math.min(width, height);
    let count = 1;
    while (count < rest.length && worst(rest.slice(0, count + 1), scale, short) <= worst(rest.slice(0, count), scale, short)) count++;
    const row = rest.slice(0, count);
    const across = (row.reduce((sum, item) => sum + item.size, 0) * scale) / short; // the row's thickness
    let along = 0;
    for (const item of row) {
      const length = (item.size * scale) / across;
      placed.push(
        width >= height
          ? { item, x, y: y + along, width: across, height: length }
          : { item, x: x + along, y, width: length, height: across },
      );
      along += length;
    }
    if (width >= height) [x, width] = [x + across, width - across];
    else [y, height] = [y + across, height - across];
    rest = rest.slice(count);
  }
  return placed;
}

// The longest side of a row's rectangles in units of its shortest.
function worst(row, scale, short) {
  const across = (row.reduce((sum, item) => sum + item.size, 0) * scale) / short;
  return Math.max(...row.map(({ size }) => Math.max((size * scale) / across ** 2, across ** 2 / (size * scale))));
}

// The tensors of each category lie together, so that each colour is one area.
function layOut(items, width, height) {
  const groups = new Map();
  for (const item of items) {
    if (!groups.has(item.category)) groups.set(item.category, { size: 0, items: [] });
    const group = groups.get(item.category);
    group.size += Math.max(item.size, 0);
    group.items.push(item);
  }
  return squarify([...groups.values()], { x: 0, y: 0, width, height }).flatMap((area) => squarify(area.item.items, area));
}

// Black or white, whichever is read better on a colour like "#0072B2" (WCAG's relative luminance).
function inkOn(colour) {
  const level = (n) => {
    const value = parseInt(colour.slice(n, n + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  return 0.2126 * level(1) + 0.7152 * level(3) + 0.0722 * level(5) > 0.179 ? "#000" : "#fff";
}

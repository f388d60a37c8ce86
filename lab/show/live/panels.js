// A panel for each rank, on one canvas with the same axes. Lengths are CSS pixels of `ratio` device pixels.
const STRIP = 18; // the height of the names of the phases, above the highest peak
const LANE_GAP = 8;
const LANES = ["host", "disk"]; // the memories below the device's, where there is something in them

// The places of the panels of the shown ranks, and the ends of their axes, which hidden ranks count for too. The
// axis of bytes reaches at least `highest`.
function arrange(store, width, height, hidden, highest) {
  const visible = store.ranks.map((rank, number) => ({ rank, number })).filter(({ number }) => !hidden.has(number));
  const count = visible.length;
  const most = store.stacked ? 1 : Math.floor(width / 190);
  const columns = Math.max(1, Math.min(count <= 3 ? count : Math.ceil(count / 2), most));
  const rows = Math.ceil(count / columns);
  const [left, right, axis, title, gap] = [56, 14, 20, 22, 18];
  const across = (width - left - right - gap * (columns - 1)) / columns;
  const down = (height - axis - LANE_GAP * (rows - 1)) / rows;
  const lanes = LANES.map((memory) => ({ memory, most: largest(store, (row) => row[memory]) })).filter(({ most }) => most > 0);
  const lane = Math.max(14, Math.round(0.17 * (down - title)));
  const below = lanes.length * (lane + LANE_GAP);
  const panels = visible.map(({ rank, number }, n) => ({
    rank,
    number,
    ended: store.recorded,
    name: rank.name ?? `rank ${number}`,
    x: Math.round(left + (n % columns) * (across + gap)),
    y: Math.round(Math.floor(n / columns) * (down + LANE_GAP) + title),
    width: Math.floor(across),
    height: Math.floor(down - title - below),
    lane,
    below,
    leftmost: n % columns === 0,
    lowest: n + columns >= count,
  }));
  const last = largest(store, (row) => row.seconds) || 1;
  // While ranks run the axis ends at a round number, so that it changes seldom.
  const scale = { seconds: store.recorded ? last : roundUp(last), over: store.over, bytes: Math.max(highestPeak(store), highest) || 1, lanes };
  return { panels, scale };
}

function drawPanel(pen, panel, scale, look, names, ratio) {
  const { x, y, width, height, rank } = panel;
  const floor = y + height;
  const up = (bytes) => floor - (bytes / scale.bytes) * (height - STRIP);
  panel.columns = byColumn(rank.rows, scale.seconds, Math.round(width * ratio));
  const runs = phaseRuns(panel.columns, ratio);
  drawTitle(pen, panel, scale.lanes);
  for (const run of runs) drawPhase(pen, panel, run, names[run.phase], look.tints[names[run.phase]]);
  drawByteTicks(pen, panel, scale.bytes, up, ratio);
  // From the whole stack down to its lowest part, each painted over the one before, so that no gaps are seen.
  for (let parts = look.categories.length; parts > 0; parts--) {
    fillArea(pen, panel, floor, (row) => up(row.tops[parts - 1]), look.categories[parts - 1][1], ratio);
  }
  runs.forEach((run, n) => {
    if (n === 0 || run.step === runs[n - 1].step) return;
    for (let at = y; at < floor; at += 5) fill(pen, 0.5, x + run.start, at, 1 / ratio, 2.5);
  });
  fill(pen, 0.5, x, floor - 0.5, width, 1);
  if (rank.planned?.at.length) drawPlanned(pen, panel, scale, up);
  if (rank.peak) ring(pen, x + (rank.peak.seconds / scale.seconds) * width, up(rank.peak.total));
  scale.lanes.forEach(({ memory, most }, n) => {
    const bottom = floor + (n + 1) * (LANE_GAP + panel.lane);
    fillArea(pen, panel, bottom, (row) => bottom - (row[memory] / most) * panel.lane, look[memory], ratio);
    fill(pen, 0.5, x, bottom - 0.5, width, 1);
    if (panel.leftmost) write(pen, 0.7, "right", memory, x - 8, bottom - panel.lane / 2);
  });
  if (panel.lowest) drawSecondTicks(pen, panel, scale);
}

// The intervals of columns in one phase of one step.
function phaseRuns(columns, ratio) {
  const runs = [];
  columns.forEach((row, column) => {
    const run = runs.at(-1);
    if (!row) return;
    if (run && run.phase === row.phase && run.step === row.step) run.end = (column + 1) / ratio;
    else runs.push({ phase: row.phase, step: row.step, start: column / ratio, end: (column + 1) / ratio });
  });
  return runs;
}

function drawTitle(pen, panel, lanes) {
  const { x, y, width, rank } = panel;
  pen.font = pen.font.replace(/^/, "600 ");
  write(pen, 1, "left", panel.name, x, y - 10);
  const after = panel.name && pen.measureText(`${panel.name}  `).width;
  pen.font = pen.font.replace(/^600 /, "");
  if (!rank.peak) return;
  const peak = `peak ${formatBytes(rank.peak.total)}`;
  const now = panel.ended ? "" : `now ${formatBytes(rank.rows.at(-1).total)}`;
  const most = (memory) => rank.rows.reduce((top, row) => Math.max(top, row[memory]), 0);
  const held = (memory) => formatBytes(panel.ended ? most(memory) : rank.rows.at(-1)[memory]);
  const below = lanes.map(({ memory }) => `${memory} ${held(memory)}`);
  const texts = [[now, peak, ...below], [now, peak], [peak]].map((parts) => parts.filter(Boolean).join(" · "));
  const fits = texts.find((text) => after + pen.measureText(text).width <= width) ?? "";
  write(pen, 0.75, "left", fits, x + after, y - 10);
}

function drawPhase(pen, panel, run, name, tint) {
  if (!tint) return;
  const ink = pen.fillStyle;
  pen.fillStyle = "#767676"; // a grey that is visible on white and on black
  fill(pen, tint, panel.x + run.start, panel.y, run.end - run.start, panel.height);
  pen.fillStyle = ink;
  if (pen.measureText(name).width + 8 > run.end - run.start) return;
  write(pen, 0.65, "center", name, panel.x + (run.start + run.end) / 2, panel.y + 8);
}

function drawByteTicks(pen, panel, top, up, ratio) {
  const [unit, size] = unitFor(top);
  ticks(top / size, 4).forEach((tick, n, all) => {
    const at = Math.round(up(tick * size) * ratio) / ratio;
    if (n > 0) fill(pen, 0.14, panel.x, at, panel.width, 1 / ratio);
    const text = n === all.length - 1 ? `${+tick.toFixed(3)} ${unit}` : `${+tick.toFixed(3)}`;
    if (panel.leftmost) write(pen, 0.7, "right", text, panel.x - 8, at);
  });
}

// The bytes of a plan as a line over the areas, dark with a light edge.
function drawPlanned(pen, panel, scale, up) {
  const { at, bytes } = panel.rank.planned;
  pen.save();
  pen.beginPath();
  at.forEach((position, n) => {
    const x = panel.x + (position / scale.seconds) * panel.width;
    if (n > 0) pen.lineTo(x, up(bytes[n - 1]));
    pen.lineTo(x, up(bytes[n]));
  });
  for (const [colour, width] of [["#fff", 3], ["#000", 1.2]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.stroke();
  }
  pen.restore();
}

function drawSecondTicks(pen, panel, { seconds, over }) {
  const bottom = panel.y + panel.height + panel.below;
  const [name, size] = over === "seconds" ? timeUnitFor(seconds) : [over, 1];
  ticks(seconds / size, Math.min(6, panel.width / 50)).forEach((tick, n, all) => {
    const text = n === all.length - 1 ? `${+tick.toFixed(3)} ${name}` : `${+tick.toFixed(3)}`;
    const part = (tick * size) / seconds;
    const align = n === 0 ? "left" : part > 0.93 ? "right" : "center"; // so that it does not reach the next panel
    write(pen, 0.7, align, text, panel.x + part * panel.width, bottom + 11);
  });
}

function fillArea(pen, panel, floor, height, colour, ratio) {
  pen.save();
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(panel.x, floor);
  let at = floor;
  panel.columns.forEach((row, column) => {
    const next = row ? height(row) : floor;
    if (next === at) return;
    pen.lineTo(panel.x + column / ratio, at);
    pen.lineTo(panel.x + column / ratio, next);
    at = next;
  });
  pen.lineTo(panel.x + panel.columns.length / ratio, at);
  pen.lineTo(panel.x + panel.columns.length / ratio, floor);
  pen.fill();
  pen.restore();
}

function ring(pen, x, y) {
  pen.globalAlpha = 0.8;
  pen.beginPath();
  pen.arc(x, y, 3.5, 0, 2 * Math.PI);
  pen.stroke();
  pen.globalAlpha = 1;
}

function fill(pen, alpha, x, y, width, height) {
  pen.globalAlpha = alpha;
  pen.fillRect(x, y, width, height);
  pen.globalAlpha = 1;
}

function write(pen, alpha, align, text, x, y) {
  pen.globalAlpha = alpha;
  pen.textAlign = align;
  pen.fillText(text, x, y);
  pen.globalAlpha = 1;
}

// The drawing of one frame: boxes on shelves for each rank, what moves between them, and the memory curve.
// page.js comes before this file in one module.

const LABELS = 104; // pixels at the left, for the names of the ranks
const SHELF = 26;
const LANE_GAP = 12;
const TOP = 20;
const CURVE = 64;

function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((n) => parseInt(colour.slice(n, n + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
}

// Where things are, in pixels, for a canvas of this width.
class Plan {
  constructor(content, width) {
    this.content = content;
    this.gap = content.hostWidth ? 14 : 0;
    this.scale = (width - LABELS - this.gap - 4) / (content.width + content.hostWidth);
    this.host = LABELS + content.width * this.scale + this.gap;
    this.right = this.host + content.hostWidth * this.scale;
    this.laneHeight = content.shelves * SHELF;
    this.lanesHeight = content.lanes.length * (this.laneHeight + LANE_GAP);
    this.curveTop = TOP + this.lanesHeight + 8;
    this.height = this.curveTop + CURVE + 4;
  }

  laneTop(lane) {
    return TOP + lane * (this.laneHeight + LANE_GAP);
  }

  // The left edge, the upper edge and the width of a part of a box.
  place(lane, box, start = 0, length = 1) {
    const [, , category, size, , , shelf, left] = box;
    // The last two categories are the host's and the disk's.
    const origin = category >= this.content.categories.length - 2 ? this.host : LABELS;
    return [origin + (left + start * size) * this.scale, this.laneTop(lane) + shelf * SHELF, length * size * this.scale];
  }

  boxesOf(lane) {
    return this.content.ranks[this.content.lanes[lane]].boxes;
  }

  frameOf(lane, number) {
    return this.content.ranks[this.content.lanes[lane]].frames[number];
  }
}

// `progress` is how far moving parts have come, from 0 to 1.
function drawStage(pen, plan, number, progress, paper) {
  const { content } = plan;
  const ink = pen.fillStyle;
  const moving = content.flights[number] ?? [];
  const arriving = new Set(progress < 1 ? (content.arrivals[number] ?? []).map(String) : []);
  drawHead(pen, plan, ink);
  content.lanes.forEach((_, lane) => {
    const frame = plan.frameOf(lane, number);
    drawRoom(pen, plan, lane, frame, ink);
    const boxes = plan.boxesOf(lane);
    if (number > 0) {
      for (const n of plan.frameOf(lane, number - 1).boxes) {
        if (!frame.boxes.includes(n)) drawFreed(pen, plan, lane, boxes[n], ink);
      }
    }
    for (const n of frame.boxes) {
      const isNew = boxes[n][4] === number && number > 0;
      drawBox(pen, plan, lane, boxes[n], { isNew, empty: arriving.has(`${lane},${n}`), ink, paper });
    }
  });
  if (progress < 1) for (const flight of moving) drawFlight(pen, plan, flight, progress, ink, paper);
}

function drawHead(pen, plan, ink) {
  pen.fillStyle = ink;
  pen.textAlign = "left";
  pen.fillText("device", LABELS, TOP / 2);
  if (plan.content.hostWidth) pen.fillText("host", plan.host, TOP / 2);
  // The size of one A.
  const [right, width] = [plan.host - plan.gap, plan.scale];
  pen.fillRect(right - width, TOP - 5, width, 1.5);
  pen.fillRect(right - width, TOP - 8, 1.5, 6);
  pen.fillRect(right - 1.5, TOP - 8, 1.5, 6);
  pen.textAlign = "right";
  pen.fillText(`1 A = ${plan.content.unit}`, right - width - 6, TOP / 2);
  pen.textAlign = "left";
}

function drawRoom(pen, plan, lane, frame, ink) {
  const { content } = plan;
  const top = plan.laneTop(lane);
  fill(pen, ink, 0.08, LABELS, top, content.width * plan.scale, plan.laneHeight);
  if (content.hostWidth) fill(pen, ink, 0.08, plan.host, top, content.hostWidth * plan.scale, plan.laneHeight);
  pen.fillStyle = ink;
  pen.font = pen.font.replace(/^(bold )?/, "bold ");
  pen.fillText(`rank ${lane}`, 0, top + 8);
  pen.font = pen.font.replace("bold ", "");
  const held = frame.held.reduce((sum, size) => sum + size, 0);
  const lines = [`layer ${inA(held - frame.outside)}`, `all else ${inA(frame.outside)}`];
  lines.forEach((line, n) => {
    if (22 + 14 * n < plan.laneHeight) pen.fillText(line, 0, top + 22 + 14 * n);
  });
  if (frame.small[0] && plan.laneHeight > 60) pen.fillText(`${frame.small[0]} small ${inA(frame.small[1])}`, 0, top + 50);
}

function inA(size) {
  return `${size >= 100 ? size.toFixed(0) : size >= 10 ? size.toFixed(1) : size.toFixed(2)} A`;
}

function fill(pen, colour, alpha, ...box) {
  pen.globalAlpha = alpha;
  pen.fillStyle = colour;
  pen.fillRect(...box);
  pen.globalAlpha = 1;
}

function drawBox(pen, plan, lane, box, { isNew, empty, ink, paper }) {
  const [left, top, width] = plan.place(lane, box);
  const colour = plan.content.categories[box[2]][1];
  fill(pen, colour, empty ? 0.25 : 1, left + 0.5, top + 1, Math.max(width - 1, 1), SHELF - 2);
  pen.strokeStyle = isNew ? ink : paper;
  pen.lineWidth = isNew ? 2 : 0.5;
  pen.setLineDash(empty ? [4, 3] : []);
  pen.strokeRect(left + 1, top + 2, Math.max(width - 2, 0.5), SHELF - 4);
  pen.setLineDash([]);
  if (!empty) label(pen, box[0], left, top, width, inkOn(colour));
}

function drawFreed(pen, plan, lane, box, ink) {
  const [left, top, width] = plan.place(lane, box);
  pen.strokeStyle = ink;
  pen.globalAlpha = 0.45;
  pen.lineWidth = 1;
  pen.setLineDash([2, 3]);
  pen.strokeRect(left + 1, top + 2, Math.max(width - 2, 0.5), SHELF - 4);
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

// A name in one line, or in two smaller ones, or not at all.
function label(pen, text, left, top, width, colour) {
  const font = pen.font;
  const [first, last] = [text.indexOf(" "), text.lastIndexOf(" ")];
  const splits = first < 0 ? [] : [first, last].map((at) => [text.slice(0, at), text.slice(at + 1)]);
  for (const lines of [[text], ...splits]) {
    pen.font = lines.length > 1 ? font.replace("11px", "9px") : font;
    if (lines.some((line) => pen.measureText(line).width > width - 4)) continue;
    pen.fillStyle = colour;
    pen.textAlign = "center";
    const offset = lines.length > 1 ? -5 : 0;
    lines.forEach((line, n) => pen.fillText(line, left + width / 2, top + SHELF / 2 + offset + 10 * n));
    pen.textAlign = "left";
    break;
  }
  pen.font = font;
}

function drawFlight(pen, plan, [source, target], progress, ink, paper) {
  const [lane, number] = target;
  const from = plan.place(source[0], plan.boxesOf(source[0])[source[1]], source[2], source[3]);
  const box = plan.boxesOf(lane)[number];
  const to = plan.place(lane, box, target[2], target[3]);
  const [x, y, width] = from.map((start, n) => start + (to[n] - start) * progress);
  pen.strokeStyle = ink;
  pen.globalAlpha = 0.35;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(from[0] + from[2] / 2, from[1] + SHELF / 2);
  pen.lineTo(to[0] + to[2] / 2, to[1] + SHELF / 2);
  pen.stroke();
  const colour = plan.content.categories[box[2]][1];
  fill(pen, colour, 1, x, y + 6, Math.max(width, 5), SHELF - 12);
  pen.strokeStyle = ink;
  pen.lineWidth = 1.5;
  pen.strokeRect(x, y + 6, Math.max(width, 5), SHELF - 12);
}

// The device bytes of the first rank by category over the frames, with a line at a frame.
function drawCurve(pen, plan, number, ink) {
  const { content } = plan;
  const frames = content.ranks[content.lanes[0]].frames;
  const totals = frames.map((frame) => frame.held.reduce((sum, size) => sum + size, 0));
  const top = Math.max(...totals);
  const step = (plan.right - LABELS) / frames.length;
  const bottom = plan.curveTop + CURVE;
  frames.forEach((frame, n) => {
    let y = bottom;
    frame.held.forEach((size, category) => {
      const height = (size / top) * (CURVE - 12);
      y -= height;
      fill(pen, content.categories[category][1], 1, LABELS + n * step, y, step + 0.5, height);
    });
  });
  pen.fillStyle = ink;
  pen.fillText(inA(top), 0, bottom - CURVE + 14);
  pen.fillText("rank 0", 0, bottom - CURVE + 28);
  pen.fillText("forward", LABELS, plan.curveTop + 4);
  const back = LABELS + content.backward * step;
  pen.fillText("backward", back + 4, plan.curveTop + 4);
  fill(pen, ink, 0.6, back, plan.curveTop, 1, CURVE);
  fill(pen, ink, 1, LABELS + (number + 0.5) * step - 1, plan.curveTop, 2, CURVE);
}

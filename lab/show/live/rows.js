// The rows of each rank, and functions of them. In a message, a row is: seconds, the bytes of each category, the
// bytes on the host and on the disk, the numbers of its phase, module and operator, and its step.
const CATEGORIES = 8;
const WIDTH = CATEGORIES + 7;
const MOST_ROWS = 3000; // of a rank; more rows are reduced to a third of this number
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

function timeUnitFor(top) {
  return TIMES.find(([, size]) => top >= size) ?? TIMES[2];
}

function formatSeconds(seconds) {
  const [name, size] = timeUnitFor(seconds);
  return seconds === 0 ? "0 s" : `${(seconds / size).toPrecision(seconds / size >= 1000 ? 4 : 3)} ${name}`;
}

function ticks(top, count) {
  const raw = top / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw);
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, n) => n * step);
}

// The end of an axis is a round number, so that the axis changes seldom while the values grow.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= value);
}

function newStore() {
  const nothing = { title: "", recorded: false, stacked: false, addable: false, job: false, replaced: false };
  const reader = { selected: null, asked: null, answer: null, error: null, freed: null, drawn: null };
  return { names: [], ranks: [], step: 0, steps: 0, loss: null, over: "seconds", views: new Set(), ...nothing, ...reader };
}

function receive(store, message, buffer) {
  message.names.forEach((name, n) => (store.names[message.known + n] = name));
  for (let rank = store.ranks.length; rank < message.ranks; rank++) store.ranks.push({ rows: [], peak: null });
  store.step = Math.max(store.step, Math.min(message.step + 1, message.steps));
  store.steps = message.steps;
  store.loss = message.loss ?? store.loss;
  const rank = store.ranks[message.rank];
  addRows(rank, numbersOf(buffer, Float32Array));
  if (rank.rows.length > MOST_ROWS) rank.rows = thin(rank.rows, MOST_ROWS / 6);
}

// A timeline that has ended. It takes the place of the rows that were sent while the ranks ran, whose categories were
// provisional; each row has its number in the whole timeline.
function receiveRecorded(store, message, [rows, rowNumbers, plannedAt, plannedBytes]) {
  if (message.rank === 0) store.ranks = [];
  message.names.forEach((name, n) => (store.names[message.known + n] = name));
  const rank = { rows: [], peak: null, name: message.name, count: message.count };
  addRows(rank, numbersOf(rows, Float32Array));
  numbersOf(rowNumbers, Uint32Array).forEach((number, n) => (rank.rows[n].number = number));
  rank.planned = { at: numbersOf(plannedAt, Float32Array), bytes: numbersOf(plannedBytes, Float32Array) };
  store.ranks.push(rank);
  const { title, over, addable, stacked, job } = message;
  Object.assign(store, { title, over, addable, stacked, job, recorded: store.ranks.length === message.ranks });
}

function numbersOf(buffer, Numbers) {
  return new Numbers(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength));
}

function addRows(rank, numbers) {
  for (let start = 0; start < numbers.length; start += WIDTH) {
    const sizes = numbers.subarray(start + 1, start + 1 + CATEGORIES);
    const seconds = numbers[start];
    const [host, disk, phase, module, op, step] = numbers.subarray(start + 1 + CATEGORIES, start + WIDTH);
    let total = 0;
    const tops = Array.from(sizes, (size) => (total += size)); // of the categories stacked on each other
    const row = { seconds, sizes, tops, total, host, disk, phase, module, op, step };
    if (!rank.peak || row.total > rank.peak.total) rank.peak = row;
    rank.rows.push(row);
  }
}

// Each interval of time keeps its highest row and its last row.
function thin(rows, intervals) {
  const interval = (row) => Math.floor((row.seconds / (rows.at(-1).seconds || 1)) * intervals);
  const selected = [];
  let highest = null;
  rows.forEach((row, n) => {
    if (!highest || row.total > highest.total) highest = row;
    if (n + 1 < rows.length && interval(rows[n + 1]) === interval(row)) return;
    if (highest !== row) selected.push(highest);
    selected.push(row);
    highest = null;
  });
  return selected;
}

function largest(store, value) {
  return Math.max(0, ...store.ranks.map((rank) => rank.rows.reduce((top, row) => Math.max(top, value(row)), 0)));
}

function highestPeak(store) {
  return Math.max(0, ...store.ranks.map((rank) => Math.max(rank.peak?.total ?? 0, ...(rank.planned?.bytes ?? []))));
}

// The row that each of `count` pixel columns shows: its highest row, or the last row before it.
function byColumn(rows, seconds, count) {
  const columns = [];
  let last = null;
  let n = 0;
  for (let column = 0; column < count && n < rows.length; column++) {
    let highest = last;
    const end = ((column + 1) / count) * seconds;
    for (; n < rows.length && rows[n].seconds <= end; n++) {
      last = rows[n];
      if (!highest || last.total > highest.total) highest = last;
    }
    columns.push(highest);
  }
  return columns;
}

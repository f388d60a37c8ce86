// Who holds the bytes at an instant: a treemap, a table, and what would free some. Below the canvas of a timeline.
const UNNAMED = "#767676"; // of tensors of several categories together

class HoldersPanel {
  constructor(parent, look, act) {
    this.colours = Object.fromEntries([...look.categories, ["host", look.host], ["disk", look.disk], ["", UNNAMED]]);
    this.act = act;
    this.order = { key: "bytes", down: true };
    this.root = add(parent, "div", "lab-holders");
    this.root.hidden = true;
    const head = add(this.root, "div", "lab-holders-head");
    this.name = add(head, "span", "lab-holders-name");
    this.when = add(head, "span", "lab-holders-when");
    this.when.setAttribute("aria-live", "polite");
    const buttons = add(head, "span", "lab-holders-buttons");
    this.every = button(buttons, "all ranks", "Add up what all ranks hold at this time", () => act.all());
    button(buttons, "‹", "One operator earlier (left arrow)", () => act.move(-1));
    button(buttons, "›", "One operator later (right arrow)", () => act.move(1));
    button(buttons, "×", "Close (Escape)", () => act.shut());
    this.ranks = add(this.root, "div", "lab-holders-ranks");
    this.map = add(this.root, "div", "lab-holders-map");
    this.map.setAttribute("aria-hidden", "true"); // the table says the same
    this.offerFreeing();
    this.table = add(add(this.root, "div", "lab-holders-table"), "table");
    this.resized = new ResizeObserver(() => this.drawMap());
    this.resized.observe(this.map);
  }

  offerFreeing() {
    this.form = add(this.root, "form", "lab-holders-free");
    const label = add(this.form, "label");
    label.append("Free ");
    this.size = add(label, "input");
    this.size.placeholder = "4 GiB";
    this.size.size = 9;
    this.size.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take Enter for a cell
    const submit = add(this.form, "button");
    submit.textContent = "Find knobs";
    submit.title = "Find the cheapest set of knobs that makes the peak smaller by so much";
    this.freed = add(this.form, "output");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.size.value.trim()) this.act.free(this.size.value);
    });
  }

  // Everything as the store has it: the answer of the kernel, or why there is none.
  draw({ selected, answer, error, freed, job, addable, waitingForKernel }) {
    this.root.hidden = !selected;
    if (!selected) return;
    this.form.hidden = !job;
    this.every.hidden = !addable;
    this.every.setAttribute("aria-pressed", selected.all);
    this.freed.textContent = freed?.text ?? "";
    this.root.classList.toggle("lab-holders-stale", waitingForKernel);
    this.answer = error ? null : answer;
    const what = { device: "", host: " in host memory", disk: " on the disk" }[selected.memory];
    const total = answer ? `${formatBytes(answer.total)}${what}` : "";
    this.name.textContent = error ? "" : answer ? [answer.name, total].filter(Boolean).join(" · ") : "";
    this.when.textContent = error ?? (waitingForKernel || !answer ? "asking the kernel …" : answer.when);
    if (answer && answer !== this.drawn) this.items = answer.items.map((item) => ({ ...item, size: item.bytes }));
    this.drawn = answer;
    const knobs = freed?.knobs ?? [];
    for (const item of this.items ?? []) item.marked = knobs.some((knob) => item.knob.includes(knob));
    this.drawRanks();
    this.drawMap();
    this.drawTable();
  }

  drawRanks() {
    this.ranks.replaceChildren();
    if (!this.answer?.all) return;
    for (const { rank, name, row, total } of this.answer.ranks) {
      button(this.ranks, `${name} · ${formatBytes(total)}`, `Only what ${name} holds`, () => this.act.select({ rank, row, all: false }));
    }
  }

  drawMap() {
    this.map.replaceChildren();
    this.map.hidden = !this.answer;
    if (!this.answer || !this.map.clientWidth) return;
    for (const { item, x, y, width, height } of layOut(this.items, this.map.clientWidth, this.map.clientHeight)) {
      const box = add(this.map, "div", `lab-holders-box${item.marked ? " lab-holders-marked" : ""}`);
      Object.assign(box.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
      box.style.background = this.colours[item.category];
      box.style.color = inkOn(this.colours[item.category]);
      box.dataset.bytes = item.bytes;
      box.title = describe(item);
      box.addEventListener("pointerenter", () => this.point(item, true));
      box.addEventListener("pointerleave", () => this.point(item, false));
      box.addEventListener("click", () => item.line?.scrollIntoView({ block: "nearest" }));
      if (width < 44 || height < 17) continue;
      const lines = [shortPlace(item.place), formatSigned(item.bytes), item.tensor].filter(Boolean);
      for (const text of lines.slice(0, Math.floor((height - 3) / 15))) add(box, "div").textContent = text;
    }
  }

  drawTable() {
    this.table.replaceChildren();
    this.table.parentElement.hidden = !this.answer;
    if (!this.answer) return;
    const unit = "bytes in units of A, those of one hidden state on the rank";
    const header = add(add(this.table, "thead"), "tr");
    for (const [key, title] of COLUMNS) {
      const cell = add(header, "th", NUMBERS.has(key) ? "lab-holders-number" : "");
      const sorted = this.order.key === key;
      cell.setAttribute("aria-sort", sorted ? (this.order.down ? "descending" : "ascending") : "none");
      const arrow = sorted ? (this.order.down ? " ↓" : " ↑") : "";
      button(cell, `${title}${arrow}`, `Sort by ${key === "units" ? unit : title}`, () => {
        this.order = { key, down: sorted ? !this.order.down : NUMBERS.has(key) };
        this.drawTable();
        this.table.querySelector(`th[aria-sort$="ending"] button`)?.focus();
      });
    }
    const body = add(this.table, "tbody");
    for (const item of sortedBy(this.items, this.order)) {
      item.line = add(body, "tr", item.marked ? "lab-holders-marked" : "");
      for (const [key, , text] of COLUMNS) {
        const cell = add(item.line, "td", NUMBERS.has(key) ? "lab-holders-number" : "");
        if (key === "category" && item.category) swatch(cell, item.category, this.colours[item.category]);
        else cell.textContent = text ? text(item) : item[key];
      }
    }
  }

  // The box under the pointer and its line in the table.
  point(item, over) {
    item.line?.classList.toggle("lab-holders-pointed", over);
  }

  close() {
    this.resized.disconnect();
  }
}

const COLUMNS = [
  ["bytes", "bytes", (item) => formatSigned(item.bytes)],
  ["units", "A", (item) => (item.units === null ? "" : item.units.toFixed(2))],
  ["count", "tensors", (item) => item.count],
  ["category", "category"],
  ["tensor", "tensor"],
  ["op", "made by"],
  ["place", "where"],
  ["knob", "less with"],
  ["made", "made in", (item) => item.phase],
  ["freed", "held", heldText],
];
const NUMBERS = new Set(["bytes", "units", "count"]);

function heldText({ made, freed }) {
  if (made === null) return "";
  return `${formatSeconds(made)} to ${freed === null ? "the end" : formatSeconds(freed)}`;
}

function sortedBy(items, { key, down }) {
  const value = (item) => item[key] ?? (NUMBERS.has(key) ? 0 : Infinity);
  const compare = (a, b) => (typeof a === "string" && typeof b === "string" ? a.localeCompare(b) : a - b);
  return [...items].sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b)) || 0);
}

// A box has space for the end of a path; a tensor made outside of all modules has none.
function shortPlace(place) {
  return place === "-" ? "" : place.replace(/^model\.(layers\.[\d*]+\.(?=\w))?/, "");
}

function describe(item) {
  const count = item.count > 1 ? `${item.count} tensors` : "";
  const knob = item.knob && `less with: ${item.knob}`;
  return [item.place, formatSigned(item.bytes), count, item.category, item.tensor, item.op, knob].filter(Boolean).join(" · ");
}

function formatSigned(bytes) {
  return bytes < 0 ? `−${formatBytes(-bytes)}` : formatBytes(bytes);
}

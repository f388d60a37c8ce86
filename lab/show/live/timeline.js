// The widget: it receives messages, draws when there are new rows, describes the row under the pointer, and asks the
// kernel what is held at the instant of a click. The other files come before this one in one module.

class View {
  constructor(store, look, el, send) {
    this.store = store;
    this.look = look;
    this.send = send;
    this.root = add(el, "div", "lab-widget lab-live");
    const head = add(this.root, "div", "lab-live-head");
    this.status = add(head, "span", "lab-live-status");
    const end = () => {
      this.stop.disabled = true;
      this.stop.textContent = "Stopping";
      send({ stop: true });
    };
    this.stop = button(head, "Stop", "End the run here; what was measured is kept", end, "lab-live-stop");
    this.chips = add(head, "span", "lab-live-ranks");
    this.hidden = new Set();
    const legend = add(head, "span", "lab-legend");
    for (const [name, colour] of look.categories) swatch(add(legend, "span"), name, colour);
    this.canvas = add(this.root, "canvas");
    this.canvas.style.height = `${look.height}px`;
    this.canvas.setAttribute("role", "img");
    this.copy = document.createElement("canvas"); // of the panels, without what the pointer marks
    this.readout = add(this.root, "div", "lab-live-readout lab-readout");
    this.holders = new HoldersPanel(this.root, look, this);
    this.pointer = null;
    this.canvas.addEventListener("pointermove", (event) => this.point([event.offsetX, event.offsetY]));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    // A click has whole pixels; the pointer has parts of them, and the row that was read out is meant.
    this.canvas.addEventListener("click", (event) => this.click(this.pointer ?? [event.offsetX, event.offsetY]));
    this.root.addEventListener("keydown", (event) => this.press(event));
    this.root.addEventListener("transitionend", () => this.schedule());
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.canvas);
  }

  close() {
    this.resized.disconnect();
    this.holders.close();
    cancelAnimationFrame(this.frame);
  }

  // A moving pointer leaves the panels as they are: they are drawn from a copy.
  point(pointer) {
    this.pointer = pointer;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  schedule() {
    this.stale = true;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  // ---- what the reader does: click, arrow keys, and the buttons of the panel of holders ------------------------

  click(pointer) {
    const found = this.store.recorded && this.under(pointer);
    this.canvas.focus({ preventScroll: true });
    if (found) this.select({ rank: found.panel.number, row: found.row.number, memory: found.memory });
  }

  select(instant) {
    const { store } = this;
    store.selected = { rank: 0, row: 0, memory: "device", all: false, ...store.selected, ...instant };
    ask(store, this.send);
  }

  move(by) {
    const { selected, ranks } = this.store;
    const visible = ranks.findIndex((_, number) => !this.hidden.has(number));
    if (!selected) return this.select({ rank: visible, row: ranks[visible].peak.number });
    const row = selected.row + by;
    if (row >= 0 && row < ranks[selected.rank].count) this.select({ row });
  }

  all() {
    this.select({ all: !this.store.selected.all });
  }

  free(size) {
    this.store.freed = { text: "searching …" };
    this.send({ free: size });
    redraw(this.store);
  }

  shut() {
    Object.assign(this.store, { selected: null, answer: null, error: null });
    redraw(this.store);
    this.canvas.focus({ preventScroll: true });
  }

  press(event) {
    if (!this.store.recorded) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const typing = event.target.tagName === "INPUT";
    // The notebook would move the focus to its cell, or run it.
    if (!event.ctrlKey && !event.metaKey && event.target !== this.canvas) event.stopPropagation();
    if (event.key === "Escape" && this.store.selected) this.shut();
    else if (by && !typing) this.move(by);
    else if (event.key === "Enter" && event.target === this.canvas && !this.store.selected) this.move(0);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // ---- drawing --------------------------------------------------------------------------------------------------

  // A button for each rank, if there are several. A rank that is switched off leaves its space to the others.
  offerRanks() {
    const count = this.store.ranks.length;
    if (count < 2) return;
    for (let rank = this.chips.children.length; rank < count; rank++) {
      const { name } = this.store.ranks[rank];
      const text = rank === 0 || this.store.stacked ? (name ?? "rank 0") : rank;
      const toggle = () => {
        if (!this.hidden.delete(rank)) this.hidden.add(rank);
        this.schedule();
      };
      button(this.chips, text, `Show or hide ${name ?? `rank ${rank}`}`, toggle, "lab-live-chip");
    }
    [...this.chips.children].forEach((chip, rank) => {
      chip.setAttribute("aria-pressed", !this.hidden.has(rank));
      chip.disabled = !this.hidden.has(rank) && this.hidden.size === count - 1; // the last one stays
    });
  }

  draw() {
    const [width, height, ratio] = [this.canvas.clientWidth, this.look.height, window.devicePixelRatio || 1];
    if (!width || !penOf(this.canvas)) return;
    if (this.stale || this.ratio !== ratio) this.drawPanels(width, height, ratio);
    const pen = penOn(this.canvas, width, height, ratio, getComputedStyle(this.root));
    pen.drawImage(this.copy, 0, 0, width, height);
    this.markSelected(pen);
    this.readOut(pen);
  }

  drawPanels(width, height, ratio) {
    this.offerRanks();
    const { store } = this;
    const pen = penOn(this.copy, width, height, ratio, getComputedStyle(this.root));
    const { panels, scale } = arrange(store, width, height, this.hidden, this.look.highest);
    Object.assign(this, { panels, scale, ratio, stale: false });
    for (const panel of panels) drawPanel(pen, panel, scale, this.look, store.names, ratio);
    this.status.textContent = statusText(store, this.look);
    this.stop.hidden = store.recorded || !(store.steps || this.look.waiting);
    this.canvas.tabIndex = store.recorded ? 0 : -1;
    this.canvas.style.cursor = store.recorded ? "crosshair" : "";
    this.canvas.title = store.recorded && !store.selected ? "Click: who holds these bytes?" : "";
    const peaks = panels.map(({ name, rank }) => `${name} peak ${formatBytes(rank.peak?.total ?? 0)}`.trim());
    const keys = store.recorded ? ". Arrow keys choose an instant, whose tensors are listed" : "";
    this.canvas.setAttribute("aria-label", `Memory by category over ${store.over}: ${peaks.join(", ")}${keys}`);
    if (store.drawn !== this.drawn) this.holders.draw(store);
    this.drawn = store.drawn;
    this.place = placeOf(this.root) ?? this.place;
    // The script may be loaded when the run has ended: it asks for the rows, and says whether it can stay on the page.
    if (!this.ready) this.send({ ready: true, stays: Boolean(this.place) });
    this.ready = true;
  }

  // The panel under the pointer, the row that it shows there, and the memory: the device's, or that of a lane below.
  under([x, y]) {
    const panel = this.panels?.find((p) => x >= p.x && x < p.x + p.width && y >= p.y - 20 && y < p.y + p.height + p.below);
    const row = panel?.columns[Math.floor((x - panel.x) * this.ratio)];
    if (!row) return row;
    const lane = Math.floor((y - panel.y - panel.height - LANE_GAP / 2) / (panel.lane + LANE_GAP));
    return { panel, row, memory: this.scale.lanes[lane]?.memory ?? "device" };
  }

  markSelected(pen) {
    const { answer, selected } = this.store;
    if (!selected || !answer) return;
    for (const panel of this.panels) {
      const asked = answer.all || panel.number === answer.rank;
      const x = panel.x + (answer.position / this.scale.seconds) * panel.width;
      fill(pen, asked ? 1 : 0.35, x - (asked ? 1 : 0.5), panel.y, asked ? 2 : 1, panel.height + panel.below);
    }
  }

  readOut(pen) {
    this.readout.hidden = true;
    const found = this.pointer && this.under(this.pointer);
    if (!found) return;
    const { panel: under, row } = found;
    const [x, y] = this.pointer;
    for (const panel of this.panels) fill(pen, 0.6, panel.x + x - under.x, panel.y, 1 / this.ratio, panel.height);
    const { names, over } = this.store;
    const name = (number) => names[number] ?? "";
    this.readout.replaceChildren();
    const title = [under.name, `step ${row.step + 1}`].filter(Boolean).join(" · ");
    line(this.readout, title, over === "seconds" ? formatSeconds(row.seconds) : "", "lab-live-total");
    for (const text of [`${name(row.phase)}: ${name(row.op)}`, name(row.module)]) {
      if (text) add(this.readout, "div").textContent = text;
    }
    this.look.categories.forEach(([category, colour], n) => {
      swatch(line(this.readout, "", formatBytes(row.sizes[n])), category, colour);
    });
    line(this.readout, "device", formatBytes(row.total), "lab-live-total");
    for (const { memory } of this.scale.lanes) {
      swatch(line(this.readout, "", formatBytes(row[memory])), memory, this.look[memory]);
    }
    this.readout.hidden = false;
    const fits = this.canvas.clientWidth - x > this.readout.offsetWidth + 24;
    const top = this.canvas.offsetTop + Math.min(y, this.look.height - this.readout.offsetHeight);
    // In a narrow window it fits on neither side, and begins at the left edge.
    this.readout.style.left = `${fits ? x + 14 : Math.max(0, x - this.readout.offsetWidth - 14)}px`;
    this.readout.style.top = `${Math.max(0, top)}px`;
  }
}

function statusText({ step, steps, loss, recorded, title }, { waiting }) {
  if (recorded) return title;
  if (!steps) return waiting;
  return `step ${step} of ${steps}` + (loss === null ? "" : ` · loss ${Number(loss).toFixed(4)}`);
}

function line(parent, left, right, name = "") {
  const row = add(parent, "div", `lab-live-row ${name}`);
  const start = add(row, "span");
  start.textContent = left;
  add(row, "span").textContent = right;
  return start;
}

// Ask the kernel what is held at the selected instant. One question at a time: while an arrow key is held down, the
// instants between are skipped.
function ask(store, send) {
  store.error = null;
  if (!store.asked) {
    store.asked = store.selected;
    send(store.selected);
    // An answer takes milliseconds, unless the kernel is busy.
    setTimeout(() => {
      store.waitingForKernel = Boolean(store.asked);
      redraw(store);
    }, 300);
  }
  redraw(store);
}

function answered(store, message, send) {
  const asked = store.asked;
  store.asked = null;
  store.waitingForKernel = false;
  if (!store.selected) return;
  if (asked !== store.selected) ask(store, send);
  else if (message.kind === "error") store.error = message.text;
  if (message.kind === "holders") store.answer = message;
}

function redraw(store) {
  store.drawn = {}; // told from the one before by identity
  for (const view of store.views) view.schedule();
}

// ---- the place on the page ------------------------------------------------------------------------------------------

// The list of outputs that an element of the page is in, and which of them; of pages other than JupyterLab's, null.
function placeOf(element) {
  const output = element.closest(".jp-OutputArea-child");
  const area = output?.parentElement;
  return area ? { area, index: [...area.children].indexOf(output) } : null;
}

// The output of a view has become a picture, for the stored notebook: the view takes the picture's place on this page.
function takePlace(view, tries = 40) {
  const output = view.place?.area.children[view.place.index];
  const picture = output?.querySelector("img");
  if (picture && !output.contains(view.root)) {
    picture.style.display = "none";
    picture.after(view.root);
    view.schedule();
  } else if (tries) setTimeout(() => takePlace(view, tries - 1), 50);
}

// One store of rows for each widget; a widget may have several views, which draw the same rows.
export default () => {
  const store = newStore();
  return {
    initialize({ model }) {
      const send = (content) => model.send(content);
      model.on("msg:custom", (message, buffers) => {
        if (message.kind === "rows") receive(store, message, buffers[0]);
        else if (message.kind === "recorded") receiveRecorded(store, message, buffers);
        else if (message.kind === "replaced") {
          store.replaced = true;
          for (const view of store.views) if (view.removed) takePlace(view);
        } else if (message.of === "free" || message.kind === "freed") store.freed = message;
        else answered(store, message, send);
        redraw(store);
      });
    },
    render({ model, el }) {
      const view = new View(store, model.get("look"), el, (content) => model.send(content));
      store.views.add(view);
      return () => {
        view.removed = true;
        if (store.replaced) takePlace(view);
        else if (!store.recorded) setTimeout(() => store.replaced || (view.close(), store.views.delete(view)), 5000);
      };
    },
  };
};

// The bars for the card and the host: used by us, by others, free, and the budget as a line.
import { make, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { budgetLine, usageOf } from "./state.js";
import { isNumber, sizeText } from "./units.js";

/**
 * The bars of a state: `[{key, total, us, core, others, free, budget}]`, in bytes; `total` is null
 * where nobody knows. On a CPU both are one memory.
 */
export function barsOf(state) {
  const usage = usageOf(state);
  const { device, host } = state;
  const bars = [];
  if (device.type !== "cpu") {
    const budget = budgetLine(state.models, "device");
    bars.push(bar("card", device.total_bytes, device.free_bytes, usage.device, usage.coreDevice, budget));
  }
  const isCpu = device.type === "cpu";
  const us = usage.host + (isCpu ? usage.device : 0);
  const core = isCpu ? usage.coreDevice + usage.coreHost : 0;
  const budget = isCpu ? bothBudgets(state.models) : budgetLine(state.models, "host");
  const total = isNumber(host.limit_bytes) ? Math.min(host.limit_bytes, host.total_bytes) : host.total_bytes;
  bars.push(bar(isCpu ? "cpu" : "host", total, host.available_bytes, us, core, budget));
  return bars;
}

/** Of the one memory that a CPU has, both budgets are parts. */
function bothBudgets(models) {
  const [device, host] = [budgetLine(models, "device"), budgetLine(models, "host")];
  return device === null || host === null ? null : device + host;
}

function bar(key, total, free, us, core, budget) {
  if (!isNumber(total) || !isNumber(free) || total <= 0) {
    return { key, total: null, us, core, others: null, free: null, budget };
  }
  const used = Math.max(0, total - free);
  const ours = Math.min(us, total);
  // What the driver counts and nobody of this ComfyUI holds.
  const others = Math.max(0, used - ours - core);
  return { key, total, us: ours, core, others, free: Math.max(0, total - ours - core - others), budget };
}

export class MachineView {
  constructor(t) {
    this.t = t;
    this.rows = [0, 1].map(() => makeBar());
    this.element = make("div", "courier-machine", {}, ...this.rows.map((row) => row.element));
  }

  update(state) {
    const bars = barsOf(state);
    this.rows.forEach((row, index) => {
      setHidden(row.element, bars[index] === undefined);
      if (bars[index] !== undefined) {
        this.show(row, bars[index]);
      }
    });
  }

  show(row, { key, total, us, core, others, free, budget }) {
    const t = this.t;
    const name = t(`machine.${key}`);
    setText(row.name, name);
    setText(row.help, key === "cpu" ? t("machine.cpu.help") : "");
    setHidden(row.help, key !== "cpu");
    setHidden(row.track, total === null);
    setHidden(row.key, total === null);
    if (total === null) {
      setText(row.figures, t("machine.unknown"));
      return;
    }
    const values = { us, core, others };
    for (const [part, element] of Object.entries(row.parts)) {
      setStyle(element, "width", `${((values[part] / total) * 100).toFixed(2)}%`);
    }
    const hasLine = budget !== null && budget < total;
    setHidden(row.line, !hasLine);
    if (hasLine) {
      setStyle(row.line, "left", `${((budget / total) * 100).toFixed(2)}%`);
    }
    setText(row.figures, `${sizeText(free)} ${t("machine.free")} / ${sizeText(total)}`);
    const parts = [[us, "us"], [core, "core"], [others, "others"]].filter(([bytes]) => bytes > 0);
    row.keys.forEach((item, index) => {
      setHidden(item.element, parts[index] === undefined);
      if (parts[index] !== undefined) {
        const [bytes, part] = parts[index];
        setAttribute(item.swatch, "class", `courier-swatch courier-of-${part}`);
        setText(item.text, `${t(`machine.${part}`)} ${sizeText(bytes)}`);
      }
    });
    setHidden(row.budget.element, budget === null);
    setText(row.budget.text, budget === null ? "" : `${t("machine.budget")} ${sizeText(budget)}`);
    this.label(row, { name, us, others: others + core, free, total, budget });
  }

  label(row, { name, us, others, free, total, budget }) {
    const values = { name, us: sizeText(us), others: sizeText(others), free: sizeText(free) };
    const label = this.t("machine.label", { ...values, total: sizeText(total) });
    const full = { label, budget: sizeText(budget) };
    setAttribute(row.track, "aria-label", budget === null ? label : this.t("machine.label.budget", full));
  }
}

function makeBar() {
  const parts = {
    us: make("span", "courier-bar-part courier-of-us"),
    core: make("span", "courier-bar-part courier-of-core"),
    others: make("span", "courier-bar-part courier-of-others"),
  };
  const line = make("span", "courier-bar-line");
  const track = make("div", "courier-bar", { role: "img" }, ...Object.values(parts), line);
  const name = make("span", "courier-bar-name");
  const figures = make("span", "courier-bar-figures");
  const head = make("div", "courier-bar-head", {}, name, figures);
  const keys = [0, 1, 2].map(() => makeKey("courier-swatch"));
  const budget = makeKey("courier-swatch courier-of-line");
  const key = make("div", "courier-bar-key", {}, ...[...keys, budget].map((item) => item.element));
  const help = make("p", "courier-help");
  const element = make("div", "courier-bar-row", {}, head, track, key, help);
  return { element, help, name, figures, track, parts, line, key, keys, budget };
}

function makeKey(className) {
  const swatch = make("span", className);
  const text = make("span");
  return { element: make("span", "courier-key", {}, swatch, text), swatch, text };
}

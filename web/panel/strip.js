// One cell a layer. Colour, and a pattern for who does not see colours; a text for each cell.
import { freshId, make, setAttribute, setClass, setHidden, setStyle, setText } from "./dom.js";
import { layerText } from "./layers.js";
import { isInFlight, placementOf } from "./state.js";

const FEW = 12;
const MOVES = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

export class Strip {
  /** `t` makes words; `label` names the whole strip. */
  constructor(t) {
    this.t = t;
    this.layers = [];
    this.cells = [];
    this.shown = [];
    this.active = -1;
    this.hovered = -1;
    this.marked = -1;
    this.list = make("div", "courier-strip", { role: "listbox", tabindex: "0", id: freshId("strip") });
    this.list.setAttribute("aria-orientation", "horizontal");
    this.detail = make("p", "courier-detail", { "aria-hidden": "true" });
    this.element = make("div", "courier-strip-frame", {}, this.list, this.detail);
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.list.addEventListener("focus", () => this.activate(Math.max(0, this.active)));
    this.list.addEventListener("blur", () => this.mark(-1));
    this.list.addEventListener("pointerover", (event) => this.hover(event.target));
    this.list.addEventListener("pointerleave", () => this.hover(null));
    this.list.addEventListener("click", (event) => this.activate(this.cells.indexOf(event.target)));
  }

  /**
   * Show these layers. `changed` says by index which cells to mark.
   */
  update({ label, layers, placements, activity, changed = [] }) {
    setAttribute(this.list, "aria-label", label);
    if (layers.length !== this.cells.length) {
      this.build(layers.length);
    }
    const isSame = layers === this.layers;
    this.layers = layers;
    layers.forEach((layer, index) => {
      const letters = placements[index] + (activity[index] ?? ".") + (changed[index] ? "!" : "");
      if (!isSame || this.shown[index] !== letters) {
        this.shown[index] = letters;
        this.show(index);
      }
    });
    this.say();
  }

  build(count) {
    const cells = Array.from({ length: count }, (_, index) => {
      const cell = make("div", "courier-cell", { role: "option", "aria-selected": "false" });
      cell.id = `${this.list.id}-${index}`;
      return cell;
    });
    this.cells = cells;
    this.shown = new Array(count).fill("");
    this.list.replaceChildren(...cells);
    this.list.classList.toggle("courier-is-few", count <= FEW);
    this.mark(-1);
    this.active = -1;
    this.hovered = -1;
  }

  show(index) {
    const cell = this.cells[index];
    const layer = this.layers[index];
    const [placement, activity, differs] = this.shown[index];
    const flight = isInFlight(placement, activity) ? " courier-is-flight" : "";
    const news = differs ? " courier-is-new" : "";
    const active = index === this.marked ? " courier-is-active" : "";
    setClass(cell, `courier-cell courier-is-${placementOf(placement)}${flight}${news}${active}`);
    const share = placement === "r" || !layer.bytes ? 0 : layer.resident / layer.bytes;
    setStyle(cell, "--courier-part", `${Math.round(share * 100)}%`);
    setAttribute(cell, "aria-label", layerText(this.t, layer, placement, activity));
  }

  onKey(event) {
    const move = MOVES[event.key] ?? { ArrowDown: this.columns(), ArrowUp: -this.columns() }[event.key];
    if (move === undefined || event.ctrlKey || event.altKey || event.metaKey) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    this.activate(Math.min(this.cells.length - 1, Math.max(0, this.active + move)));
  }

  /** How many cells stand in the first row. */
  columns() {
    const top = this.cells[0]?.offsetTop;
    const below = this.cells.findIndex((cell) => cell.offsetTop !== top);
    return below === -1 ? this.cells.length : below;
  }

  activate(index) {
    if (index < 0 || index >= this.cells.length) {
      return;
    }
    this.active = index;
    this.mark(index);
    this.say();
  }

  /** Which cell has the ring and is read aloud; -1: none. */
  mark(index) {
    const before = this.cells[this.marked];
    before?.classList.remove("courier-is-active");
    before?.setAttribute("aria-selected", "false");
    this.marked = index;
    const cell = this.cells[index];
    cell?.classList.add("courier-is-active");
    cell?.setAttribute("aria-selected", "true");
    setAttribute(this.list, "aria-activedescendant", cell ? cell.id : null);
    this.say();
  }

  hover(target) {
    const index = target === null ? -1 : this.cells.indexOf(target);
    if (index !== this.hovered) {
      this.hovered = index;
      this.say();
    }
  }

  say() {
    const index = this.hovered >= 0 ? this.hovered : this.marked;
    const layer = this.layers[index];
    const shown = this.shown[index];
    setHidden(this.detail, !(layer && shown));
    setText(this.detail, layer && shown ? layerText(this.t, layer, shown[0], shown[1]) : "");
  }
}

// The layers as a table: searched, sorted, and changed in place.
import { freshId, make, makeButton, setAttribute, setHidden, setText } from "./dom.js";
import { COLUMNS, chooseRows, placementText, sharedPrefix } from "./layers.js";
import { percentText, sizeText } from "./units.js";

export class LayerTable {
  constructor(t) {
    this.t = t;
    this.column = "name";
    this.direction = 1;
    this.model = null;
    this.rows = [];
    this.order = "";
    this.prefix = "";
    const id = freshId("search");
    this.search = make("input", "courier-input", { type: "search", id, autocomplete: "off" });
    this.search.spellcheck = false;
    this.searchLabel = make("label", "courier-label", { for: id });
    this.count = make("p", "courier-count", { role: "status" });
    this.body = make("tbody");
    this.heads = Object.fromEntries(COLUMNS.map((column) => [column, this.makeHead(column)]));
    const cells = COLUMNS.map((column) => this.heads[column].cell);
    const head = make("thead", "", {}, make("tr", "", {}, ...cells));
    const table = make("table", "courier-table", {}, head, this.body);
    this.scroller = make("div", "courier-table-frame", { tabindex: "0", role: "region" }, table);
    const find = make("div", "courier-search", {}, this.searchLabel, this.search);
    this.element = make("div", "courier-table-view", {}, find, this.scroller, this.count);
    this.search.addEventListener("input", () => this.refresh());
    // ComfyUI's own keys would act on what is typed.
    this.search.addEventListener("keydown", (event) => event.stopPropagation());
  }

  makeHead(column) {
    const button = makeButton("courier-sort", () => this.sortBy(column));
    return { button, cell: make("th", `courier-of-${column}`, { scope: "col" }, button) };
  }

  sortBy(column) {
    this.direction = this.column === column ? -this.direction : 1;
    this.column = column;
    this.refresh();
  }

  update(model) {
    const t = this.t;
    if (this.model === null) {
      setText(this.searchLabel, t("table.search"));
      for (const column of COLUMNS) {
        setText(this.heads[column].button, t(`table.${column}`));
      }
    }
    setAttribute(this.scroller, "aria-label", t("table.label", { name: model.name }));
    const before = this.model;
    this.model = model;
    const prefix = model.layers === before?.layers ? this.prefix : sharedPrefix(model.layers);
    const isPrefixSame = prefix === this.prefix;
    this.prefix = prefix;
    if (before === null || before.layers.length !== model.layers.length) {
      this.rows = model.layers.map(() => makeRow());
      this.order = "";
    }
    model.layers.forEach((layer, index) => {
      const letters = model.placements[index] + model.activity[index];
      const row = this.rows[index];
      if (row.layer !== layer || row.letters !== letters || !isPrefixSame) {
        fillRow(row, t, layer, letters, prefix);
      }
    });
    this.refresh();
  }

  refresh() {
    const { layers, placements } = this.model;
    const chosen = chooseRows(layers, placements, this.search.value, this.column, this.direction);
    const order = chosen.join();
    if (order !== this.order) {
      this.order = order;
      this.body.replaceChildren(...chosen.map((index) => this.rows[index].element));
    }
    const count = { shown: chosen.length, all: layers.length };
    setText(this.count, chosen.length ? this.t("table.count", count) : this.t("table.none"));
    setHidden(this.scroller, chosen.length === 0);
    for (const column of COLUMNS) {
      const sorted = this.direction === 1 ? "ascending" : "descending";
      setAttribute(this.heads[column].cell, "aria-sort", column === this.column ? sorted : null);
    }
  }
}

/**
 * Where the panel is narrow, some columns are not there; what they hold stands below the name and the
 * placement instead.
 */
function makeRow() {
  const cells = COLUMNS.map((column) =>
    make(column === "name" ? "th" : "td", `courier-of-${column}`, column === "name" ? { scope: "row" } : {}),
  );
  const texts = cells.map((cell) => cell);
  const below = ["size", "dtype", "reason"].map((column) => make("span", `courier-below courier-below-${column}`));
  for (const [column, parts] of [["name", below.slice(0, 2)], ["placement", below.slice(2)]]) {
    const index = COLUMNS.indexOf(column);
    texts[index] = make("span");
    cells[index].append(texts[index], ...parts);
  }
  const element = make("tr", "", {}, ...cells);
  return { element, name: cells[0], texts: [...texts, ...below], layer: null, letters: "" };
}

function fillRow(row, t, layer, letters, prefix) {
  const [size, dtypes] = [sizeText(layer.bytes), layer.dtypes.join(" + ")];
  const texts = [
    layer.name.startsWith(prefix) ? layer.name.slice(prefix.length) : layer.name,
    size,
    letters[0] === "r" ? "100 %" : percentText(layer.resident, layer.bytes),
    placementText(t, layer, letters[0], letters[1]),
    dtypes,
    layer.reason,
    size,
    dtypes,
    layer.reason,
  ];
  texts.forEach((text, index) => setText(row.texts[index], text));
  setAttribute(row.name, "title", layer.name);
  row.layer = layer;
  row.letters = letters;
}

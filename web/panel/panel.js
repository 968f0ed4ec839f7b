// The whole panel in one element: mounted, updated, and taken away without a trace.
import { ModelCard } from "./card.js";
import { make, setAttribute, setHidden, setText } from "./dom.js";
import { MachineView } from "./machine.js";
import { Fallbacks, Notices } from "./notices.js";
import { CSS } from "./style.js";
import { OrderView, Toolbar } from "./toolbar.js";

const PLACES = ["resident", "pinned", "mapped", "pageable", "flight"];

export class Panel {
  /**
   * `actions`, see actions.js; `clock`; `retry()` reads anew; `reload()` the page;
   * `acknowledge()` a restart.
   */
  constructor(root, t, { actions, clock, retry, reload, acknowledge }) {
    Object.assign(this, { root, t, actions, clock });
    this.cards = new Map();
    this.wasThere = false;
    this.notices = new Notices(t, { retry, reload, acknowledge });
    this.fallbacks = new Fallbacks(t);
    this.machine = new MachineView(t);
    this.toolbar = new Toolbar(t, actions);
    this.order = new OrderView(t, actions);
    this.legend = make("ul", "courier-legend", { "aria-label": t("legend.title") }, ...this.makeLegend());
    this.list = make("div", "courier-cards");
    this.empty = make("div", "courier-empty", {}, ...this.makeEmpty());
    this.loading = make("p", "courier-loading", {}, t("link.loading"));
    this.live = make("p", "courier-aloud", { role: "status", "aria-live": "polite" });
    const views = [this.notices, this.machine, this.toolbar, this.order, this.fallbacks];
    const [notices, ...others] = views.map((view) => view.element);
    const body = [notices, this.loading, ...others, this.legend, this.list, this.empty, this.live];
    this.element = make("section", "courier-panel", { "aria-label": t("panel.title") }, ...body);
    root.replaceChildren(make("style", "", {}, CSS), this.element);
  }

  makeLegend() {
    return PLACES.map((place) => {
      const swatch = make("span", `courier-cell courier-is-${place === "flight" ? "mapped courier-is-flight" : place}`);
      const text = make("span", "", {}, this.t(`place.${place}`));
      return make("li", "courier-key", { title: this.t(`place.${place}.help`) }, swatch, text);
    });
  }

  makeEmpty() {
    const title = make("h3", "courier-name", {}, this.t("empty.title"));
    return [title, make("p", "courier-about", {}, this.t("empty.text"))];
  }

  /** Show this state. Only what differs is touched. */
  update(state) {
    setAttribute(this.element, "data-link", state.link);
    setAttribute(this.element, "aria-busy", state.link === "loading" ? "true" : null);
    this.notices.update(state);
    setHidden(this.loading, state.link !== "loading");
    setHidden(this.machine.element, !state.hasRead);
    if (state.hasRead) {
      this.machine.update(state);
    }
    this.toolbar.update(state);
    this.order.update(state);
    this.fallbacks.update(state);
    setHidden(this.legend, !state.models.some((model) => model.layers.length));
    setHidden(this.empty, !state.hasRead || state.models.length > 0);
    this.updateCards(state);
    setText(this.live, this.actions.said);
  }

  updateCards(state) {
    const ids = state.models.map((model) => model.id);
    for (const [id, card] of this.cards) {
      if (!ids.includes(id)) {
        card.destroy();
        card.element.remove();
        this.cards.delete(id);
      }
    }
    state.models.forEach((model, index) => {
      const card = this.cards.get(model.id) ?? this.makeCard(model.id);
      if (this.list.children[index] !== card.element) {
        this.list.insertBefore(card.element, this.list.children[index] ?? null);
      }
      card.update(state, model);
    });
  }

  makeCard(id) {
    const card = new ModelCard(this.t, this.actions, this.clock, this.toolbar.whyId);
    this.cards.set(id, card);
    return card;
  }

  isIn(root) {
    return this.element.parentNode === root;
  }

  destroy() {
    for (const card of this.cards.values()) {
      card.destroy();
    }
    this.cards.clear();
    this.root.replaceChildren();
  }
}

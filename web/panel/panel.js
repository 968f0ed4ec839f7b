// The whole panel in one element: mounted, updated, and taken away without a trace.
import { ModelCard } from "./card.js";
import { freshId, make, makeButton, setAttribute, setButton, setClass, setHidden, setText } from "./dom.js";
import { MachineView } from "./machine.js";
import { whyNoSleepOfAll, whyNoWakeOfAll, wordOnOrders } from "./rules.js";
import { fallbacksOf, isOutdated } from "./state.js";
import { CSS } from "./style.js";
import { wordOr } from "./text.js";
import { VERSION } from "./version.js";

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
    this.link = makeNotice(makeButton("courier-is-quiet", retry), t("link.retry"));
    this.restart = makeNotice(makeButton("courier-is-quiet", acknowledge), t("link.dismiss"));
    this.version = makeNotice(makeButton("courier-is-quiet", reload), t("link.reload"));
    this.fallbacks = make("section", "courier-notice courier-on-warn");
    this.fallbacks.setAttribute("aria-label", t("fallback.title"));
    this.machine = new MachineView(t);
    this.toolbar = this.makeToolbar();
    this.order = this.makeOrder();
    this.legend = make("ul", "courier-legend", { "aria-label": t("legend.title") }, ...this.makeLegend());
    this.list = make("div", "courier-cards");
    this.empty = make("div", "courier-empty", {}, ...this.makeEmpty());
    this.loading = make("p", "courier-loading", {}, t("link.loading"));
    this.live = make("p", "courier-aloud", { role: "status", "aria-live": "polite" });
    this.alarm = make("div", "courier-notices", { role: "status" });
    this.alarm.append(this.link.element, this.restart.element, this.version.element);
    const parts = [this.alarm, this.loading, this.machine.element, this.toolbar, this.order.element];
    const body = [...parts, this.fallbacks, this.legend, this.list, this.empty, this.live];
    this.element = make("section", "courier-panel", { "aria-label": t("panel.title") }, ...body);
    root.replaceChildren(make("style", "", {}, CSS), this.element);
  }

  makeToolbar() {
    const t = this.t;
    this.sleepAll = makeButton("", () => this.actions.sleep(null));
    this.wakeAll = makeButton("", () => this.actions.wake(null));
    this.allWhy = make("p", "courier-why", { id: freshId("why") });
    const options = [1, 2].map((level) => make("option", "", { value: level }, t(`action.level${level}`)));
    this.level = make("select", "courier-input", { "aria-label": t("action.level") }, ...options);
    this.level.addEventListener("change", () => {
      this.actions.level = Number(this.level.value);
      this.actions.refresh();
    });
    const row = make("div", "courier-buttons", {}, this.sleepAll, this.wakeAll, this.level);
    return make("div", "courier-toolbar", {}, row, this.allWhy);
  }

  makeOrder() {
    const text = make("p", "courier-order-text", { role: "status" });
    const bar = make("progress", "courier-progress", { "aria-label": this.t("legend.title") });
    const cancel = makeButton("courier-is-quiet", () => this.actions.cancel());
    setButton(cancel, this.t("action.cancel"));
    return { element: make("div", "courier-order", {}, text, bar, cancel), text, bar, cancel };
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
    this.updateNotices(state);
    setHidden(this.loading, state.link !== "loading");
    setHidden(this.machine.element, !state.hasRead);
    if (state.hasRead) {
      this.machine.update(state);
    }
    this.updateToolbar(state);
    this.updateOrder(state);
    this.updateFallbacks(state);
    setHidden(this.legend, !state.models.some((model) => model.layers.length));
    setHidden(this.empty, !state.hasRead || state.models.length > 0);
    this.updateCards(state);
    setText(this.live, this.actions.said);
  }

  updateNotices(state) {
    const t = this.t;
    const isWell = state.link === "live" || state.link === "loading";
    const problem = this.problemText(state);
    setHidden(this.link.element, isWell && !state.isOld);
    setText(this.link.text, problem);
    setClass(this.link.element, `courier-notice courier-on-${isWell ? "info" : "bad"}`);
    setHidden(this.restart.element, !state.wasRestarted);
    setText(this.restart.text, t("link.restarted"));
    setHidden(this.version.element, !isOutdated(state) || state.isOld);
    setText(this.version.text, t("link.version", { page: VERSION, server: state.version }));
  }

  problemText(state) {
    const { link, hasRead, isOld, problem: message } = state;
    if (link === "offline") {
      return this.t(hasRead ? "link.offline" : "link.offline.empty");
    }
    if (link === "garbage" || link === "failed") {
      return this.t(`link.${link}`, { message });
    }
    return link === "absent" ? this.t("link.absent") : isOld ? this.t("link.old") : "";
  }

  updateToolbar(state) {
    const t = this.t;
    setHidden(this.toolbar, state.models.length === 0);
    const [whySleep, whyWake] = [whyNoSleepOfAll(state), whyNoWakeOfAll(state)];
    const why = wordOnOrders(state) || (whySleep && whyWake ? whySleep : "");
    setText(this.allWhy, why ? t(why) : "");
    setHidden(this.allWhy, !why);
    setButton(this.sleepAll, t("action.sleepAll"), whySleep && t(whySleep));
    setButton(this.wakeAll, t("action.wakeAll"), whyWake && t(whyWake));
    setAttribute(this.sleepAll, "aria-describedby", whySleep && why ? this.allWhy.id : null);
    setAttribute(this.wakeAll, "aria-describedby", whyWake && why ? this.allWhy.id : null);
    if (this.level.value !== String(this.actions.level)) {
      this.level.value = String(this.actions.level);
    }
  }

  updateOrder(state) {
    const [order] = state.orders;
    const { element, text, bar } = this.order;
    setHidden(element, order === undefined);
    if (order === undefined) {
      return;
    }
    setText(text, this.orderText(order));
    setAttribute(bar, "aria-label", text.textContent);
    const isKnown = order.total > 0;
    setAttribute(bar, "max", isKnown ? order.total : null);
    setAttribute(bar, "value", isKnown ? order.done : null);
    setAttribute(this.order.cancel, "aria-disabled", order.cancelled ? "true" : null);
  }

  orderText(order) {
    if (order.cancelled) {
      return this.t("order.cancelled");
    }
    if (order.waits) {
      return wordOr(this.t, "order.waits", order.action);
    }
    return order.isSent ? this.t("order.sent") : this.t(`order.does.${order.action}`, order);
  }

  updateFallbacks(state) {
    const texts = fallbacksOf(state).map(({ kind, name, text }) => {
      const reason = text;
      return kind === "note" ? (name ? `${name}: ${text}` : text) : this.t(`fallback.${kind}`, { name, reason });
    });
    setHidden(this.fallbacks, texts.length === 0);
    const key = JSON.stringify(texts);
    if (key !== this.fallbackKey) {
      this.fallbackKey = key;
      const title = make("h3", "courier-subtitle", {}, this.t("fallback.title"));
      const items = texts.map((text) => make("li", "", {}, text));
      this.fallbacks.replaceChildren(title, make("ul", "courier-reasons", {}, ...items));
    }
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
    const card = new ModelCard(this.t, this.actions, this.clock, this.allWhy.id);
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

function makeNotice(button, label) {
  setButton(button, label);
  const text = make("p", "courier-notice-text");
  return { element: make("div", "courier-notice courier-on-info", {}, text, button), text };
}

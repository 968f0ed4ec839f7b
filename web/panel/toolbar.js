// Orders to all models, why there are none, and the order that is under way.
import { freshId, make, makeButton, setAttribute, setButton, setHidden, setText } from "./dom.js";
import { whyNoSleepOfAll, whyNoWakeOfAll, wordOnOrders } from "./rules.js";
import { wordOr } from "./text.js";

export class Toolbar {
  constructor(t, actions) {
    Object.assign(this, { t, actions });
    this.sleepAll = makeButton("", () => actions.sleep(null));
    this.wakeAll = makeButton("", () => actions.wake(null));
    this.why = make("p", "courier-why", { id: freshId("why") });
    const options = [1, 2].map((level) => make("option", "", { value: level }, t(`action.level${level}`)));
    this.level = make("select", "courier-input", { "aria-label": t("action.level") }, ...options);
    this.level.addEventListener("change", () => {
      actions.level = Number(this.level.value);
      actions.refresh();
    });
    const row = make("div", "courier-buttons", {}, this.sleepAll, this.wakeAll, this.level);
    this.element = make("div", "courier-toolbar", {}, row, this.why);
  }

  /** The element that says what is true of all orders. */
  get whyId() {
    return this.why.id;
  }

  update(state) {
    const t = this.t;
    setHidden(this.element, state.models.length === 0);
    const [whySleep, whyWake] = [whyNoSleepOfAll(state), whyNoWakeOfAll(state)];
    const why = wordOnOrders(state) || (whySleep && whyWake ? whySleep : "");
    setText(this.why, why ? t(why) : "");
    setHidden(this.why, !why);
    const later = state.busy ? ".later" : "";
    setButton(this.sleepAll, t(`action.sleepAll${later}`), whySleep && t(whySleep));
    setButton(this.wakeAll, t(`action.wakeAll${later}`), whyWake && t(whyWake));
    setAttribute(this.sleepAll, "aria-describedby", whySleep && why ? this.why.id : null);
    setAttribute(this.wakeAll, "aria-describedby", whyWake && why ? this.why.id : null);
    if (this.level.value !== String(this.actions.level)) {
      this.level.value = String(this.actions.level);
    }
  }
}

export class OrderView {
  constructor(t, actions) {
    this.t = t;
    this.text = make("p", "courier-order-text", { role: "status" });
    this.bar = make("progress", "courier-progress");
    this.cancel = makeButton("courier-is-quiet", () => actions.cancel());
    this.element = make("div", "courier-order", {}, this.text, this.bar, this.cancel);
  }

  update({ orders: [order] }) {
    setHidden(this.element, order === undefined);
    if (order === undefined) {
      return;
    }
    const text = orderText(this.t, order);
    setText(this.text, text);
    setAttribute(this.bar, "aria-label", text);
    const isKnown = order.total > 0;
    setAttribute(this.bar, "max", isKnown ? order.total : null);
    setAttribute(this.bar, "value", isKnown ? order.done : null);
    // Of an order that waits nothing was done, so that there is nothing to undo.
    setText(this.cancel, this.t(order.waits ? "action.withdraw" : "action.cancel"));
    setAttribute(this.cancel, "aria-disabled", order.cancelled ? "true" : null);
  }
}

function orderText(t, order) {
  if (order.cancelled) {
    return t(order.waits ? "order.withdrawn" : "order.cancelled");
  }
  if (order.waits) {
    return wordOr(t, "order.waits", order.action);
  }
  return order.isSent ? t("order.sent") : t(`order.does.${order.action}`, order);
}

// What may be done now, and why not. Pure: keys of the words "why.*", or "" where it may.
import { isAsleep, stateOf } from "./state.js";

const MOVING = new Set(["falling", "waking"]);
const ORDERS = new Set(["why.order", "why.waits"]);

/** Whether orders reach the server at all. */
export function whyNoOrders(state) {
  if (state.link !== "live") {
    return "why.offline";
  }
  if (state.isOld) {
    return "why.old";
  }
  if (!state.orders.length) {
    return "";
  }
  return state.orders.every((order) => order.waits) ? "why.waits" : "why.order";
}

/** What to say about all orders: why there are none, or what they wait for. */
export function wordOnOrders(state) {
  const why = whyNoOrders(state);
  return why || (state.busy && state.models.length ? "why.busy" : "");
}

/** A budget may be tried while orders wait, and while a prompt runs. */
export function whyNoBudget(state) {
  const why = whyNoOrders(state);
  return ORDERS.has(why) ? "" : why;
}

export function whyNoSleep(state, model) {
  const why = whyNoOrders(state);
  if (why) {
    return why;
  }
  if (MOVING.has(stateOf(model))) {
    return "why.order";
  }
  if (isAsleep(model)) {
    return model.level >= 2 ? "why.deepest" : "";
  }
  return model.held.device > 0 || model.measured?.device > 0 || stateOf(model) === "failed" || state.busy
    ? ""
    : "why.unloaded";
}

export function whyNoWake(state, model) {
  return whyNoOrders(state) || (MOVING.has(stateOf(model)) ? "why.order" : "");
}

export function whyNoSleepOfAll(state) {
  const may = state.models.some((model) => !isAsleep(model) && whyNoSleep(state, model) === "");
  return whyNoOrders(state) || (may ? "" : "why.noneAwake");
}

export function whyNoWakeOfAll(state) {
  const may = state.models.some((model) => isAsleep(model) || stateOf(model) === "failed");
  return whyNoOrders(state) || (may ? "" : "why.noneAsleep");
}

/** The number that the tab's icon carries, "!" for a fallback, "" for nothing to say. */
export function badgeOf(state, fallbacks) {
  const asleep = state.models.filter(isAsleep).length;
  if (asleep) {
    return String(asleep);
  }
  return fallbacks.length ? "!" : "";
}

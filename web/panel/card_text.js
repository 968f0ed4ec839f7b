// The sentences on a model's card. Pure.
import { isAsleep } from "./state.js";
import { wordOr } from "./text.js";
import { rateText, sizeText } from "./units.js";

/** Where it stands, and how deeply it sleeps. */
export function stateText(t, model, word) {
  const text = wordOr(t, "state", word);
  return model.level ? `${text}, ${t("state.level", { level: model.level })}` : text;
}

/** What it is. */
export function aboutText(t, model) {
  const parts = [wordOr(t, "kind", model.kind)];
  if (model.ours) {
    const count = model.streamable;
    const key = count === 1 ? "card.layers.one" : "card.layers.many";
    parts.push(t(key, { count }));
  }
  if (model.onUse && isAsleep(model)) {
    parts.push(t(model.onUse === "wake" ? "state.wakes" : "state.refuses"));
  }
  return parts.join(" · ");
}

/** What is taken of a budget. */
export function againstText(t, used, budget) {
  const key = budget === null ? "card.auto" : "card.of";
  return t(key, { used: sizeText(used), budget: sizeText(budget) });
}

/** What of the card: now, of how much, at most, and beside it. */
export function deviceText(t, { measured, budgets }) {
  const peak = measured.devicePeak ? t("card.peak", { peak: sizeText(measured.devicePeak) }) : "";
  const more = measured.activationPeak
    ? t("card.activations", { peak: sizeText(measured.activationPeak) })
    : "";
  return [againstText(t, measured.device, budgets.device), peak, more].filter(Boolean).join(" · ");
}

/** What the courier does at the moment, and did. */
export function courierText(t, model) {
  const isOnMove = model.engine === "running" && model.rate > 0;
  const rate = isOnMove ? rateText(model.rate) : t("card.idle");
  const total = model.shipped ? t("card.shipped", { bytes: sizeText(model.shipped) }) : "";
  return [rate, total].filter(Boolean).join(" · ");
}

/** Whose budget it is, and whether it is in force. */
export function noteText(t, model) {
  const { asked } = model;
  if (!asked) {
    return "";
  }
  const figure = (value) => (value === null ? t("card.auto.short") : sizeText(value));
  const parts = [];
  if (asked.waits) {
    parts.push(t("card.asked", { device: figure(asked.device), host: figure(asked.host) }));
  } else if (asked.by === "order") {
    parts.push(t("card.byOrder"));
  } else if (asked.by === "settings") {
    parts.push(t("card.bySettings"));
  }
  if (asked.shared) {
    parts.push(t("card.shared"));
  }
  return parts.join(" · ");
}

/** What the button for sleep says. */
export function sleepText(t, state, model) {
  if (isAsleep(model)) {
    return t("action.deeper");
  }
  return t(state.busy ? "action.sleep.later" : "action.sleep");
}

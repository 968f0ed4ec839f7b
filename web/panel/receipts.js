// What came of an order, in words and bytes. Pure.
import { isNumber, secondsText, sizeText } from "./units.js";

/** `{severity, title, text}` for a toast. `state` is the one after the order. */
export function receiptText(t, action, receipt, state) {
  const title = t(`toast.${action}`);
  if (receipt.ok === false) {
    return { severity: "warn", title, text: String(receipt.message ?? "") };
  }
  const texts = { sleep: sleepText, wake: wakeText, budget: budgetText };
  return { severity: "success", title, text: texts[action](t, receipt, state) };
}

function sleepText(t, receipt, state) {
  const device = given(receipt, "device_bytes");
  const host = givenOfHost(receipt);
  if (!changed(receipt).length) {
    return `${t("toast.freed.none")}.`;
  }
  const values = { device: sizeText(device), host: sizeText(host), seconds: secondsText(receipt.seconds) };
  if (state.device.type === "cpu") {
    return `${t("toast.freed.ram", { ...values, device: sizeText(Math.max(0, device + host)) })}.`;
  }
  const text = t(host > 0 ? "toast.freed" : "toast.freed.card", values);
  const others = othersOf(receipt, state);
  return others > 0 ? t("toast.freed.others", { text, others: sizeText(others) }) : `${text}.`;
}

function wakeText(t, receipt, state) {
  if (!changed(receipt).length) {
    return t("toast.woken.none");
  }
  const isRam = state.device.type === "cpu";
  // What moved from one part of RAM to another is not in use anew.
  const taken = -given(receipt, "device_bytes") - (isRam ? givenOfHost(receipt) : 0);
  const values = { device: sizeText(Math.max(0, taken)), seconds: secondsText(receipt.seconds) };
  return t(isRam ? "toast.woken.ram" : "toast.woken", values);
}

function budgetText(t, receipt) {
  const key = receipt.applied === "now" ? "toast.applied.now" : "toast.applied.next";
  return t(key, { message: "" }).trim();
}

function changed(receipt) {
  return (receipt.models ?? []).filter((model) => model.changed);
}

function given(receipt, name) {
  const bytes = (held) => (isNumber(held?.[name]) ? held[name] : 0);
  return changed(receipt).reduce((sum, model) => sum + bytes(model.before) - bytes(model.after), 0);
}

function givenOfHost(receipt) {
  return ["locked_bytes", "copied_bytes", "staging_bytes"]
    .map((name) => given(receipt, name))
    .reduce((total, bytes) => total + bytes, 0);
}

/** What the driver counts and no model of this ComfyUI holds. */
function othersOf(receipt, state) {
  const used = receipt.machine?.after?.device_used_bytes;
  if (!isNumber(used)) {
    return 0;
  }
  const after = new Map(receipt.models.map((model) => [model.id, model.after?.device_bytes ?? 0]));
  const held = (model) => after.get(model.id) ?? model.held.device;
  return Math.max(0, used - state.models.reduce((sum, model) => sum + held(model), 0));
}

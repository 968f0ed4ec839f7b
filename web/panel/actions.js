// Orders: asked, followed, and what came of them said.
import { KINDS } from "./client.js";
import { receiptText } from "./receipts.js";
import { isAsleep } from "./state.js";

export class Actions {
  /**
   * `client`; `state()` as it is now; `confirm(title, text)` asks the user; `toast(severity, title,
   * text)`; `read()` reads everything anew; `changed()` after an order began or ended.
   */
  constructor({ t, client, state, confirm, toast, read, changed }) {
    Object.assign(this, { t, client, state, confirm, toast, read, changed });
    this.level = 1;
    this.pending = [];
    this.said = "";
  }

  /** `ids`: null for all. Resolves to whether it was done. */
  async sleep(ids) {
    const isSure = ids !== null || (await this.confirm(this.t("confirm.title"), this.t("confirm.text")));
    if (!isSure) {
      return false;
    }
    const deeper = ids !== null && this.state().models.some((m) => ids.includes(m.id) && isAsleep(m));
    const level = deeper ? 2 : this.level;
    return this.order("sleep", (when) => this.client.sleep({ models: ids ?? "all", level, when }));
  }

  async wake(ids) {
    return this.order("wake", (when) => this.client.wake({ models: ids ?? "all", when }));
  }

  async budget(id, figures) {
    return this.order("budget", (when) => this.client.budget({ model: id, ...figures, when }));
  }

  plan(id, figures, signal) {
    return this.client.plan({ model: id, ...figures }, signal);
  }

  /** Cancel what waits or is being carried out; the order itself says that it ended. */
  async cancel() {
    for (const order of this.pending) {
      order.cancelled = true;
    }
    this.changed();
    try {
      await this.client.cancel();
    } catch (error) {
      this.fail(error);
    }
  }

  refresh() {
    this.changed();
  }

  async order(action, send) {
    const order = { action, waits: this.state().busy, done: 0, total: 0, name: "", isSent: true };
    this.pending.push(order);
    this.changed();
    try {
      const receipt = await send(order.waits ? "idle" : "now");
      this.finish(order);
      await this.read();
      this.report(action, receipt);
      return true;
    } catch (error) {
      this.finish(order);
      this.read();
      this.fail(error);
      return false;
    }
  }

  finish(order) {
    this.pending = this.pending.filter((other) => other !== order);
    this.changed();
  }

  report(action, receipt) {
    const { severity, title, text } = receiptText(this.t, action, receipt, this.state());
    this.say(severity, title, text);
  }

  fail(error) {
    if (error.kind === KINDS.ABORTED) {
      return;
    }
    if (error.code === "cancelled") {
      this.say("info", this.t("toast.cancelled"), error.message);
      return;
    }
    const isRefused = error.kind === KINDS.REFUSED && error.status < 500;
    const title = this.t(isRefused ? "toast.refused" : "toast.failed");
    const text = error.kind === KINDS.OFFLINE ? this.t("why.offline") : error.message;
    this.say(isRefused ? "warn" : "error", title, text);
  }

  say(severity, title, text) {
    this.said = `${title}. ${text}`;
    this.toast(severity, title, text);
    this.changed();
  }
}

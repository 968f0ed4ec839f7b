// Plans: asked for while somebody types, and told.
import { CourierError, KINDS } from "./client.js";
import { layerOf, lettersOf } from "./state.js";
import { isNumber, sizeText } from "./units.js";

const TYPING_SECONDS = 0.35;
const BUSY_SECONDS = 1;

/** Asks for the plan of what is typed: once it rests, and only the last answer counts. */
export class Trial {
  /** `ask(body, signal)` the server; `clock`: set, clear; `onChange()` when `plan` is another. */
  constructor(ask, clock, onChange) {
    Object.assign(this, { ask, clock, onChange });
    this.plan = null;
    this.timer = null;
    this.asking = null;
  }

  later(body) {
    this.stop();
    this.timer = this.clock.set(() => this.now(body), TYPING_SECONDS);
    this.onChange();
  }

  async now(body) {
    this.stop();
    const asking = new AbortController();
    this.asking = asking;
    this.onChange();
    const plan = await this.tried(body, asking.signal);
    if (this.asking === asking) {
      this.asking = null;
      this.plan = plan;
      this.onChange();
    }
  }

  async tried(body, signal) {
    try {
      return readPlan(await this.ask(body, signal), body);
    } catch (error) {
      if (error.status === 429 && !signal.aborted) {
        this.timer = this.clock.set(() => this.now(body), BUSY_SECONDS);
        return null;
      }
      return { fits: false, message: error.message, smallest: null, layers: [], body };
    }
  }

  /** What is under way counts no more, and there is no plan. */
  stop() {
    this.clock.clear(this.timer);
    this.asking?.abort();
    this.asking = null;
    this.plan = null;
  }
}

/** A plan's answer, as the editor needs it. Throws: CourierError. */
export function readPlan(raw, body) {
  if (typeof raw.fits !== "boolean" || !Array.isArray(raw.layers)) {
    throw new CourierError(KINDS.GARBAGE, "no plan");
  }
  const layers = raw.layers.map(layerOf);
  const figure = (value) => (isNumber(value) ? value : null);
  const planned = raw.planned ?? {};
  const hostParts = ["host_locked_bytes", "host_copied_bytes", "host_staging_bytes"];
  return {
    fits: raw.fits,
    message: String(raw.message ?? ""),
    body,
    layers,
    letters: lettersOf(layers),
    asked: { device: figure(raw.asked?.device_bytes), host: figure(raw.asked?.host_bytes) },
    smallest: figure(raw.smallest?.device_bytes),
    changes: figure(raw.changes) ?? 0,
    device: figure(planned.device_bytes),
    activations: figure(planned.activation_bytes),
    host: hostParts.reduce((total, name) => total + (figure(planned[name]) ?? 0), 0),
  };
}

/** What a plan comes to, in words. */
export function planText(t, plan) {
  if (!plan.fits) {
    return t("budget.unfit", { message: plan.message });
  }
  const blocks = plan.layers.filter((layer) => !layer.name.startsWith("("));
  const streams = blocks.reduce((total, layer) => total + layer.bytes - layer.resident, 0);
  const resident = blocks.filter((layer) => layer.placement === "resident").length;
  const numbers = { resident, layers: blocks.length, streams: sizeText(streams) };
  const [device, activations, host] = [plan.device, plan.activations, plan.host].map(sizeText);
  const changes = plan.changes === 0 ? "none" : plan.changes === 1 ? "one" : "many";
  return [
    streams > 0 ? t("budget.plan", numbers) : t("budget.plan.whole"),
    t(`budget.changes.${changes}`, { count: plan.changes }),
    t("budget.memory", { device, activations, host }),
  ].join(" ");
}

// Another budget for one model: typed, tried, seen, and only then applied.
import { CourierError, KINDS } from "./client.js";
import { freshId, make, makeButton, setAttribute, setButton, setHidden, setText } from "./dom.js";
import { layerOf, lettersOf } from "./state.js";
import { Strip } from "./strip.js";
import { gibFigure, isNumber, parseGib, sizeText } from "./units.js";

const MOST = { device: 1024, host: 4096 };
const TYPING_SECONDS = 0.35;

export class BudgetEditor {
  /** `actions`: plan(id, body, signal), budget(id, body). `clock`: set, clear. `onClose()`. */
  constructor(t, actions, clock, onClose) {
    Object.assign(this, { t, actions, clock, onClose });
    this.model = null;
    this.plan = null;
    this.timer = null;
    this.asking = null;
    this.why = "";
    this.busy = false;
    this.fields = { device: this.makeField("device"), host: this.makeField("host") };
    this.title = make("h4", "courier-subtitle");
    this.message = make("p", "courier-plan", { role: "status" });
    this.strip = new Strip(t);
    this.smallest = makeButton("courier-is-quiet", () => this.useSmallest());
    this.apply = makeButton("courier-is-main", () => this.submit());
    this.close = makeButton("courier-is-quiet", () => onClose());
    const fields = make("div", "courier-fields", {}, this.fields.device.element, this.fields.host.element);
    const buttons = make("div", "courier-buttons", {}, this.apply, this.smallest, this.close);
    const parts = [this.title, fields, this.message, this.strip.element, buttons];
    this.element = make("div", "courier-budget", { role: "group" }, ...parts);
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.name();
  }

  makeField(which) {
    const [id, helpId] = [freshId(which), freshId("help")];
    const attributes = { id, type: "text", inputmode: "decimal", autocomplete: "off" };
    const input = make("input", "courier-input", { ...attributes, "aria-describedby": helpId });
    input.addEventListener("input", () => this.tryLater());
    const label = make("label", "courier-label", { for: id }, this.t(`budget.${which}`));
    const help = make("p", "courier-help", { id: helpId }, this.t(`budget.${which}.help`));
    input.placeholder = this.t("budget.auto");
    return { input, help, element: make("div", "courier-field", {}, label, input, help) };
  }

  name() {
    this.titleId = freshId("budget");
    this.title.id = this.titleId;
    this.element.setAttribute("aria-labelledby", this.titleId);
    setButton(this.close, this.t("budget.close"));
  }

  /** Begin with what the model has. */
  open(model) {
    this.model = model;
    setText(this.title, this.t("budget.title", { name: model.name }));
    const asked = model.asked ?? model.budgets;
    this.fields.device.input.value = gibFigure(asked.device);
    this.fields.host.input.value = gibFigure(asked.host);
    this.fields.device.input.focus();
    this.tryNow();
  }

  update(model, why, busy) {
    this.model = model;
    this.why = why;
    this.busy = busy;
    this.show();
  }

  destroy() {
    this.stopTrying();
  }

  onKey(event) {
    if (event.key === "Escape") {
      event.preventDefault();
      this.onClose();
    } else if (event.key === "Enter" && event.target.tagName === "INPUT") {
      event.preventDefault();
      this.apply.click();
    }
    // ComfyUI's own keys would act on what is typed.
    event.stopPropagation();
  }

  /** The figures as the route takes them; null where one of them is none. */
  body() {
    const device = parseGib(this.fields.device.input.value, 0, MOST.device);
    const host = parseGib(this.fields.host.input.value, 0, MOST.host);
    if (device === undefined || host === undefined) {
      return null;
    }
    // 0 of the card is automatic, as in the node Courier Budget.
    return { device_gib: device === 0 ? null : device, host_gib: host };
  }

  stopTrying() {
    this.clock.clear(this.timer);
    this.asking?.abort();
    this.asking = null;
  }

  tryLater() {
    this.stopTrying();
    this.plan = null;
    this.timer = this.clock.set(() => this.tryNow(), TYPING_SECONDS);
    this.show();
  }

  async tryNow() {
    this.stopTrying();
    this.plan = null;
    const body = this.body();
    if (body === null || this.why === "why.old") {
      this.show();
      return;
    }
    const asking = new AbortController();
    this.asking = asking;
    this.show();
    const plan = await this.ask(body, asking.signal);
    if (this.asking === asking) {
      this.asking = null;
      this.plan = plan;
      this.show();
    }
  }

  async ask(body, signal) {
    try {
      return readPlan(await this.actions.plan(this.model.id, body, signal), body);
    } catch (error) {
      if (error.kind === KINDS.REFUSED && error.status === 429) {
        this.timer = this.clock.set(() => this.tryNow(), 1);
        return null;
      }
      return { fits: false, message: error.message, smallest: null, layers: [], body };
    }
  }

  show() {
    const t = this.t;
    const isWrong = this.markWrong();
    const { plan } = this;
    setText(this.message, this.messageText(isWrong));
    setAttribute(this.message, "data-kind", isWrong || plan?.fits === false ? "bad" : "plain");
    setHidden(this.strip.element, !plan?.layers.length);
    if (plan?.layers.length) {
      const before = this.model.layers.length === plan.layers.length ? plan.before(this.model) : null;
      this.strip.update({ label: t("budget.preview"), layers: plan.layers, ...plan.letters, before });
    }
    const isSmall = plan?.fits === false && isNumber(plan.smallest);
    setHidden(this.smallest, !isSmall);
    if (isSmall) {
      setButton(this.smallest, t("budget.smallest", { gib: gibFigure(plan.smallest) }));
    }
    setButton(this.apply, t(this.busy ? "budget.apply.later" : "budget.apply"), this.whyNot(isWrong));
  }

  markWrong() {
    const limits = { device: MOST.device, host: MOST.host };
    let isWrong = false;
    for (const [which, most] of Object.entries(limits)) {
      const { input } = this.fields[which];
      const wrong = parseGib(input.value, 0, most) === undefined;
      setAttribute(input, "aria-invalid", wrong ? "true" : null);
      isWrong ||= wrong;
    }
    return isWrong;
  }

  messageText(isWrong) {
    const t = this.t;
    if (isWrong) {
      const device = parseGib(this.fields.device.input.value, 0, MOST.device) === undefined;
      return t("budget.wrong.host", { most: device ? MOST.device : MOST.host });
    }
    if (this.plan === null) {
      return this.why === "why.old" ? t(this.why) : t("budget.asking");
    }
    return planText(t, this.plan);
  }

  whyNot(isWrong) {
    if (this.why) {
      return this.t(this.why);
    }
    if (isWrong || this.plan === null) {
      return this.messageText(isWrong);
    }
    if (!this.plan.fits) {
      return this.messageText(false);
    }
    return this.isSame() ? this.t("budget.same") : "";
  }

  /** Whether the model has this budget already. */
  isSame() {
    const asked = this.model.asked ?? this.model.budgets;
    const { device, host } = this.plan.asked;
    return device === asked.device && host === asked.host;
  }

  useSmallest() {
    this.fields.device.input.value = gibFigure(this.plan.smallest);
    this.fields.device.input.focus();
    this.tryNow();
  }

  async submit() {
    const done = await this.actions.budget(this.model.id, this.plan.body, this.busy);
    if (done) {
      this.onClose();
    }
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
    before: (model) => model.placements,
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
  const memory = { device: sizeText(plan.device), activations: sizeText(plan.activations), host: sizeText(plan.host) };
  const changes = plan.changes === 0 ? "none" : plan.changes === 1 ? "one" : "many";
  return [
    streams > 0 ? t("budget.plan", numbers) : t("budget.plan.whole"),
    t(`budget.changes.${changes}`, { count: plan.changes }),
    t("budget.memory", memory),
  ].join(" ");
}

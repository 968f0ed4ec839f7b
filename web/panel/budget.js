// Another budget for one model: typed, tried, seen, and only then applied.
import { BudgetForm } from "./budget_form.js";
import { freshId, make, makeButton, setAttribute, setButton, setHidden, setText } from "./dom.js";
import { Trial, planText } from "./plans.js";
import { Strip } from "./strip.js";
import { gibFigure, isNumber } from "./units.js";

export class BudgetEditor {
  /** `actions`: plan(id, body, signal), budget(id, body). `clock`: set, clear. `onClose()`. */
  constructor(t, actions, clock, onClose) {
    Object.assign(this, { t, actions, onClose });
    this.model = null;
    this.why = "";
    this.busy = false;
    const ask = (body, signal) => actions.plan(this.model.id, body, signal);
    this.trial = new Trial(ask, clock, () => this.show());
    this.form = new BudgetForm(t, () => this.tryLater());
    this.title = make("h4", "courier-subtitle", { id: freshId("budget") });
    this.message = make("p", "courier-plan", { role: "status" });
    this.strip = new Strip(t);
    this.smallest = makeButton("courier-is-quiet", () => this.useSmallest());
    this.apply = makeButton("courier-is-main", () => this.submit());
    const close = makeButton("courier-is-quiet", () => onClose());
    setButton(close, t("budget.close"));
    const buttons = make("div", "courier-buttons", {}, this.apply, this.smallest, close);
    const parts = [this.title, this.form.element, this.message, this.strip.element, buttons];
    const attributes = { role: "group", "aria-labelledby": this.title.id };
    this.element = make("div", "courier-budget", attributes, ...parts);
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Begin with what the model has. */
  open(model) {
    this.model = model;
    setText(this.title, this.t("budget.title", { name: model.name }));
    this.form.fill(model.asked ?? model.budgets);
    this.trial.now(this.form.body());
  }

  update(model, why, busy) {
    Object.assign(this, { model, why, busy });
    this.show();
  }

  destroy() {
    this.trial.stop();
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

  tryLater() {
    const body = this.form.body();
    if (body === null) {
      this.trial.stop();
      this.show();
    } else {
      this.trial.later(body);
    }
  }

  show() {
    const t = this.t;
    const { plan } = this.trial;
    const wrong = this.form.check();
    const text = wrong || (plan === null ? t("budget.asking") : planText(t, plan));
    setText(this.message, text);
    setAttribute(this.message, "data-kind", wrong || plan?.fits === false ? "bad" : "plain");
    this.showPlan(plan);
    const isSmall = plan?.fits === false && isNumber(plan.smallest);
    setHidden(this.smallest, !isSmall);
    setText(this.smallest, isSmall ? t("budget.smallest", { gib: gibFigure(plan.smallest) }) : "");
    const why = this.why ? t(this.why) : wrong || !plan?.fits ? text : this.sameText(plan);
    setButton(this.apply, t(this.busy ? "budget.apply.later" : "budget.apply"), why);
  }

  showPlan(plan) {
    setHidden(this.strip.element, !plan?.layers.length);
    if (plan?.layers.length) {
      const { layers, placements } = this.model;
      const differs = (layer, index) =>
        plan.letters.placements[index] !== placements[index] || layer.resident !== layers[index]?.resident;
      const label = this.t("budget.preview");
      this.strip.update({ label, layers: plan.layers, ...plan.letters, changed: plan.layers.map(differs) });
    }
  }

  /** That the model has this budget already; "" where it has another. */
  sameText({ asked: { device, host } }) {
    const asked = this.model.asked ?? this.model.budgets;
    return device === asked.device && host === asked.host ? this.t("budget.same") : "";
  }

  useSmallest() {
    this.form.fillDevice(this.trial.plan.smallest);
    this.trial.now(this.form.body());
  }

  async submit() {
    const done = await this.actions.budget(this.model.id, this.trial.plan.body);
    if (done) {
      this.onClose();
    }
  }
}

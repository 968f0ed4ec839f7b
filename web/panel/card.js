// One model: name, state, budgets and peaks, what the courier does, its layers, and what can be done.
import { BudgetEditor } from "./budget.js";
import { aboutText, againstText, courierText, deviceText, noteText, sleepText, stateText } from "./card_text.js";
import { freshId, make, makeButton, setAttribute, setButton, setClass, setHidden, setText } from "./dom.js";
import { whyNoBudget, whyNoOrders, whyNoSleep, whyNoWake } from "./rules.js";
import { isAsleep, stateOf } from "./state.js";
import { Strip } from "./strip.js";
import { LayerTable } from "./table.js";
import { sizeText } from "./units.js";

export class ModelCard {
  /** `generalId`: the element that says what is true of all orders. */
  constructor(t, actions, clock, generalId) {
    Object.assign(this, { t, actions, clock, generalId });
    this.model = null;
    this.table = null;
    this.editor = null;
    const titleId = freshId("model");
    this.title = make("h3", "courier-name", { id: titleId });
    this.badge = make("span", "courier-state");
    this.about = make("p", "courier-about");
    this.facts = ["device", "host", "courier"].map(() => makeFact());
    this.notes = make("p", "courier-note");
    this.problem = make("p", "courier-problem");
    this.strip = new Strip(t);
    this.layersHost = make("div", "courier-layers", {}, this.strip.element);
    this.sleep = makeButton("", () => actions.sleep([this.model.id]));
    this.wake = makeButton("courier-is-main", () => actions.wake([this.model.id]));
    this.budget = makeButton("", () => this.toggleEditor());
    this.view = makeButton("courier-is-quiet", () => this.toggleTable());
    this.why = make("p", "courier-why", { id: freshId("why") });
    const head = make("div", "courier-head", {}, this.title, this.badge);
    const facts = make("dl", "courier-facts", {}, ...this.facts.flatMap((fact) => [fact.term, fact.value]));
    const buttons = make("div", "courier-buttons", {}, this.wake, this.sleep, this.budget, this.view);
    this.editorHost = make("div");
    const parts = [head, this.about, this.problem, facts, this.notes, this.layersHost, buttons, this.why];
    this.element = make("article", "courier-card", { "aria-labelledby": titleId }, ...parts, this.editorHost);
  }

  update(state, model) {
    this.model = model;
    const t = this.t;
    const word = stateOf(model);
    setText(this.title, model.name);
    setAttribute(this.title, "title", model.file || null);
    setText(this.badge, stateText(t, model, word));
    setClass(this.badge, `courier-state courier-on-${word}`);
    setText(this.about, aboutText(t, model));
    setText(this.problem, model.problem);
    setHidden(this.problem, !model.problem);
    this.updateFacts(model);
    this.updateLayers(model);
    this.updateButtons(state, model);
    this.editor?.update(model, whyNoOrders(state), state.busy);
    setText(this.notes, noteText(t, model));
    setHidden(this.notes, !this.notes.textContent);
    setText(this.sleep, sleepText(t, state, model));
    setAttribute(this.sleep, "aria-label", t("action.of", { action: this.sleep.textContent, name: model.name }));
    setText(this.wake, t(state.busy ? "action.wake.later" : "action.wake"));
    setAttribute(this.wake, "aria-label", t("action.of", { action: this.wake.textContent, name: model.name }));
  }

  updateFacts(model) {
    const t = this.t;
    const [device, host, courier] = this.facts;
    if (!model.ours) {
      const held = { device: sizeText(model.held.device), host: sizeText(model.held.host) };
      showFact(device, t("card.device"), held.device);
      showFact(host, t("card.host"), held.host);
      showFact(courier, "", "");
      return;
    }
    showFact(device, t("card.device"), deviceText(t, model));
    showFact(host, t("card.host"), againstText(t, model.measured.host, model.budgets.host));
    showFact(courier, t("card.courier"), courierText(t, model));
  }

  updateLayers(model) {
    setHidden(this.view, model.layers.length === 0);
    setHidden(this.layersHost, model.layers.length === 0);
    if (!model.layers.length) {
      return;
    }
    const isTable = this.table !== null;
    setButton(this.view, this.t(isTable ? "view.strip" : "view.table"));
    setAttribute(this.view, "aria-pressed", String(isTable));
    if (isTable) {
      this.table.update(model);
    } else {
      const label = this.t("card.strip", { name: model.name });
      this.strip.update({ label, ...model });
    }
  }

  updateButtons(state, model) {
    const needsWake = isAsleep(model) || stateOf(model) === "failed" || stateOf(model) === "waking";
    const whySleep = whyNoSleep(state, model);
    const whyWake = whyNoWake(state, model);
    setHidden(this.wake, !needsWake);
    setHidden(this.sleep, isAsleep(model) && whySleep === "why.deepest");
    setHidden(this.budget, !model.ours);
    const general = whyNoOrders(state);
    const disable = (button, why) => {
      setAttribute(button, "aria-disabled", why ? "true" : null);
      // What is true of all orders is said once, above the cards.
      setAttribute(button, "aria-describedby", why ? (general ? this.generalId : this.why.id) : null);
    };
    disable(this.sleep, whySleep);
    disable(this.wake, whyWake);
    disable(this.budget, whyNoBudget(state));
    setText(this.budget, this.t("action.budget"));
    setAttribute(this.budget, "aria-expanded", String(this.editor !== null));
    const why = general ? "" : (needsWake && whyWake) || whySleep;
    setText(this.why, why && why !== "why.deepest" ? this.t(why) : "");
    setHidden(this.why, !this.why.textContent);
  }

  toggleTable() {
    this.table = this.table === null ? new LayerTable(this.t) : null;
    this.layersHost.replaceChildren(this.table?.element ?? this.strip.element);
    this.updateLayers(this.model);
  }

  toggleEditor() {
    if (this.editor !== null) {
      this.closeEditor();
      return;
    }
    this.editor = new BudgetEditor(this.t, this.actions, this.clock, () => this.closeEditor());
    this.editorHost.replaceChildren(this.editor.element);
    this.budget.setAttribute("aria-expanded", "true");
    this.editor.open(this.model);
    this.actions.refresh();
  }

  closeEditor() {
    this.destroy();
    this.editor = null;
    this.editorHost.replaceChildren();
    this.budget.setAttribute("aria-expanded", "false");
    this.budget.focus();
  }

  destroy() {
    this.editor?.destroy();
  }
}

function makeFact() {
  return { term: make("dt"), value: make("dd") };
}

function showFact({ term, value }, name, text) {
  setText(term, name);
  setText(value, text);
  setHidden(term, !text);
  setHidden(value, !text);
}

// The two figures of a budget, as they are typed.
import { freshId, make, setAttribute } from "./dom.js";
import { gibFigure, parseGib } from "./units.js";

const MOST = { device: 1024, host: 4096 };

export class BudgetForm {
  /** `onInput()` whenever something was typed. */
  constructor(t, onInput) {
    this.t = t;
    this.fields = { device: makeField(t, "device", onInput), host: makeField(t, "host", onInput) };
    const fields = Object.values(this.fields).map((field) => field.element);
    this.element = make("div", "courier-fields", {}, ...fields);
  }

  /** Fill in what is asked for, in bytes; null is automatic. */
  fill(asked) {
    this.fields.device.input.value = gibFigure(asked.device);
    this.fields.host.input.value = gibFigure(asked.host);
    this.focus();
  }

  fillDevice(bytes) {
    this.fields.device.input.value = gibFigure(bytes);
    this.focus();
  }

  focus() {
    this.fields.device.input.focus();
  }

  /** The figures as the route takes them; null where one of them is none. */
  body() {
    const [device, host] = ["device", "host"].map((which) => this.figure(which));
    if (device === undefined || host === undefined) {
      return null;
    }
    // 0 of the card is automatic, as in the node Courier Budget.
    return { device_gib: device === 0 ? null : device, host_gib: host };
  }

  figure(which) {
    return parseGib(this.fields[which].input.value, 0, MOST[which]);
  }

  /** Mark the figures that are none. Returns: what to say about them, or "". */
  check() {
    const wrong = Object.keys(MOST).filter((which) => this.figure(which) === undefined);
    for (const [which, { input }] of Object.entries(this.fields)) {
      setAttribute(input, "aria-invalid", wrong.includes(which) ? "true" : null);
    }
    return wrong.length ? this.t("budget.wrong", { most: MOST[wrong[0]] }) : "";
  }
}

function makeField(t, which, onInput) {
  const [id, helpId] = [freshId(which), freshId("help")];
  const attributes = { id, type: "text", inputmode: "decimal", autocomplete: "off" };
  const input = make("input", "courier-input", { ...attributes, "aria-describedby": helpId });
  input.placeholder = t("budget.auto");
  input.addEventListener("input", onInput);
  const label = make("label", "courier-label", { for: id }, t(`budget.${which}`));
  const help = make("p", "courier-help", { id: helpId }, t(`budget.${which}.help`));
  return { input, element: make("div", "courier-field", {}, label, input, help) };
}

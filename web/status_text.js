// The read-only text on a Courier Status node.
import { WAITING, earlierText, outputText } from "./format.js";

const WIDGET = "status";
const SIZE = [560, 360];
const MIN_HEIGHT = 120;
const ROWS = 20;

/** A text area that shows and never takes: selectable, scrollable, read-only. */
export function makeTextArea(document) {
  const area = document.createElement("textarea");
  area.className = "courier-status-text";
  area.readOnly = true;
  area.spellcheck = false;
  area.wrap = "off";
  // For nodes drawn in HTML: where they give the widget no height, "100%" is this many lines.
  area.rows = ROWS;
  area.setAttribute("aria-label", "Courier status");
  Object.assign(area.style, {
    boxSizing: "border-box",
    width: "100%",
    height: "100%",
    padding: "6px",
    border: "1px solid var(--border-color)",
    borderRadius: "4px",
    background: "var(--comfy-input-bg)",
    color: "var(--input-text)",
    font: "11px/1.4 ui-monospace, Menlo, Consolas, monospace",
    whiteSpace: "pre",
    overflow: "auto",
    resize: "none",
  });
  area.value = WAITING;
  return area;
}

/** Give `node` its text: what an execution sends, and what a workflow was saved with. */
export function addStatusText(node) {
  const area = makeTextArea(document);
  node.addDOMWidget(WIDGET, "courier_status", area, {
    getValue: () => area.value,
    setValue: (value) => {
      area.value = earlierText(value);
    },
    getMinHeight: () => MIN_HEIGHT,
    // Out of the prompt: the text is no input, and would make every run a different one.
    serialize: false,
  });
  const onExecuted = node.onExecuted;
  node.onExecuted = function (output, ...rest) {
    onExecuted?.call(this, output, ...rest);
    const text = outputText(output);
    if (text !== null) {
      area.value = text;
    }
  };
  // A node from a workflow gets its saved size after this.
  node.setSize([Math.max(node.size[0], SIZE[0]), Math.max(node.size[1], SIZE[1])]);
}

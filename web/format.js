// Pure helpers: what a node's output and a saved workflow say, as text. No DOM, no ComfyUI.

export const WAITING = "The status appears here when the workflow runs.";
export const EARLIER = "(from an earlier run)";

/** The text in the output of an executed node; null if there is none. */
export function outputText(output) {
  const text = output?.text;
  const parts = Array.isArray(text) ? text : [text];
  const lines = parts.filter((part) => typeof part === "string");
  return lines.length ? lines.join("\n") : null;
}

/** A text that came with a workflow, marked once as not being of now. */
export function earlierText(saved) {
  if (typeof saved !== "string" || saved === "" || saved === WAITING) {
    return WAITING;
  }
  return saved.startsWith(EARLIER) ? saved : `${EARLIER}\n${saved}`;
}

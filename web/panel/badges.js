// Badges on Courier's nodes: what the model of a loader does, how many models sleep.
import { isAsleep, stateOf } from "./state.js";
import { wordOr } from "./text.js";

const LOADERS = new Set(["CourierLoadDiffusionModel"]);
const ALL = new Set(["CourierSleepModel", "CourierWakeModel", "CourierStatus"]);

/** Whether a node of that kind has a badge. */
export function hasBadge(kind) {
  return LOADERS.has(kind) || ALL.has(kind);
}

/** What a node's badge says; "" for no badge. `file` is what a loader has chosen. */
export function badgeText(t, state, kind, file) {
  if (state.link !== "live") {
    return "";
  }
  if (LOADERS.has(kind)) {
    const base = String(file ?? "").split(/[\\/]/).at(-1);
    const model = state.models.findLast((one) => one.ours && one.file === base);
    return model === undefined ? "" : wordOr(t, "state", stateOf(model));
  }
  const count = state.models.filter(isAsleep).length;
  return count ? t("node.sleeping", { count }) : "";
}

export class NodeBadges {
  /** `Badge`: litegraph's own class, or undefined where there is none. `redraw()` the canvas. */
  constructor(t, Badge, redraw) {
    Object.assign(this, { t, Badge, redraw });
    this.badges = new Set();
  }

  add(node) {
    if (this.Badge === undefined || !Array.isArray(node.badges)) {
      return;
    }
    const badge = new this.Badge({ text: "" });
    const entry = { node: new WeakRef(node), badge, text: "" };
    node.badges.push(() => badge);
    this.badges.add(entry);
  }

  update(state) {
    let isChanged = false;
    for (const entry of this.badges) {
      const node = entry.node.deref();
      if (node === undefined) {
        this.badges.delete(entry);
        continue;
      }
      const file = node.widgets?.find((widget) => widget.name === "unet_name")?.value;
      const text = badgeText(this.t, state, node.comfyClass, file);
      if (entry.badge.text !== text) {
        entry.badge.text = text;
        isChanged = true;
      }
    }
    if (isChanged) {
      this.redraw();
    }
  }
}

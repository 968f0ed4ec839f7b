// Badges on Courier's nodes: what the model of a loader does, how many models sleep.
import { isAsleep, stateOf } from "./state.js";
import { wordOr } from "./text.js";

const LOADER_PREFIX = "CourierLoad";
const ALL = new Set(["CourierSleepModel", "CourierWakeModel", "CourierStatus"]);

/** Whether a node of that kind has a badge. */
export function hasBadge(kind) {
  return isLoader(kind) || ALL.has(kind);
}

/**
 * What a node's badge says; "" for no badge. `inputs` is what a loader has chosen, by name: the last
 * model that the server says was made by such a loader of the same is its model.
 */
export function badgeText(t, state, kind, inputs = {}) {
  if (state.link !== "live") {
    return "";
  }
  if (isLoader(kind)) {
    const model = state.models.findLast((one) => one.ours && one.loader.class === kind && isOf(one, inputs));
    return model === undefined ? "" : wordOr(t, "state", stateOf(model));
  }
  const count = state.models.filter(isAsleep).length;
  return count ? t("node.sleeping", { count }) : "";
}

function isLoader(kind) {
  return String(kind ?? "").startsWith(LOADER_PREFIX);
}

/** An input that the node leaves open, or that comes from another node, says nothing against it. */
function isOf(model, inputs) {
  return Object.entries(model.loader.inputs).every(([name, value]) => {
    const given = inputs[name];
    return given === undefined || given === null || plain(given) === plain(value);
  });
}

function plain(name) {
  return String(name).replaceAll("\\", "/");
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
      const inputs = Object.fromEntries((node.widgets ?? []).map(({ name, value }) => [name, value]));
      const text = badgeText(this.t, state, node.comfyClass, inputs);
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

// What there is to say about one layer, for strips and tables. Pure.
import { activityOf, isInFlight, placementOf } from "./state.js";
import { wordOr } from "./text.js";
import { percentText, sizeText } from "./units.js";

/** Where a layer is, in words: "mapped, 40 % on the card, in use". */
export function placementText(t, layer, placementLetter, activityLetter) {
  const parts = [wordOr(t, "place", placementOf(placementLetter))];
  if (placementLetter !== "r" && layer.resident > 0) {
    parts.push(t("layer.part", { percent: percentText(layer.resident, layer.bytes) }));
  }
  if (placementLetter === "m" && layer.locked > 0) {
    parts.push(t("layer.locked", { size: sizeText(layer.locked) }));
  }
  if (isInFlight(placementLetter, activityLetter)) {
    parts.push(wordOr(t, "activity", activityOf(activityLetter)));
  }
  return parts.join(", ");
}

/** Everything about a layer in one sentence. */
export function layerText(t, layer, placementLetter, activityLetter) {
  return t("layer.text", {
    name: layer.name,
    size: sizeText(layer.bytes),
    dtypes: layer.dtypes.join(" + ") || "–",
    placement: placementText(t, layer, placementLetter, activityLetter),
    reason: layer.reason,
  });
}

/**
 * What all names begin with, whole parts with their dots: "diffusion_model." Two parts of each name are
 * left, which say what it is: "blocks.12". Names that are none ("(outside the blocks)") have no say.
 */
export function sharedPrefix(layers) {
  const names = layers.map((layer) => layer.name.split(".")).filter((parts) => parts[0][0] !== "(");
  const most = Math.min(...names.map((parts) => parts.length - 2));
  const [first = []] = names;
  const differs = first.findIndex((part, index) => index >= most || names.some((parts) => parts[index] !== part));
  return first.slice(0, Math.max(0, differs)).map((part) => `${part}.`).join("");
}

export const COLUMNS = ["name", "size", "resident", "placement", "dtype", "reason"];
const VALUES = {
  name: (row) => row.index,
  size: (row) => row.layer.bytes,
  resident: (row) => (row.layer.bytes ? row.layer.resident / row.layer.bytes : 0),
  placement: (row) => row.placement,
  dtype: (row) => row.layer.dtypes.join(" "),
  reason: (row) => row.layer.reason,
};

/**
 * The indices of the layers that have all words of `search` somewhere, in the order of `column`.
 * `direction` is 1 or -1. Layers that are alike keep their order; by name is the model's own order.
 */
export function chooseRows(layers, placements, search, column, direction) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = layers.map((layer, index) => ({ layer, index, placement: placementOf(placements[index]) }));
  const found = rows.filter((row) => {
    const { name, reason, dtypes } = row.layer;
    const all = `${name} ${row.placement} ${dtypes.join(" ")} ${reason}`.toLowerCase();
    return words.every((word) => all.includes(word));
  });
  const value = VALUES[column] ?? VALUES.name;
  found.sort((one, other) => direction * compare(value(one), value(other)) || one.index - other.index);
  return found.map((row) => row.index);
}

function compare(one, other) {
  return one < other ? -1 : one > other ? 1 : 0;
}

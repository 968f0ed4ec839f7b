// What the panel knows, as plain values: from the status, from events, from failures. Pure.
import { CourierError, KINDS } from "./client.js";
import { isNumber } from "./units.js";
import { VERSION } from "./version.js";

const PLACEMENTS = { r: "resident", p: "pinned", m: "mapped", a: "pageable" };
const ACTIVITIES = { ".": "absent", l: "loading", y: "ready", u: "in use", g: "releasing" };
const PLACEMENT_LETTERS = invert(PLACEMENTS);
const ACTIVITY_LETTERS = invert(ACTIVITIES);
const IN_FLIGHT = new Set(["l", "u", "y", "g"]);
const MOVING = new Set(["falling", "waking"]);
const RATE_FORGETS_SECONDS = 2;
const CANNOT_LOCK = "pages cannot be locked: ";

/** The state before anything was read. */
export function initialState() {
  return {
    link: "loading", // loading, live, offline, absent, failed, garbage
    problem: "",
    isOld: false, // the server shows its status and knows nothing else
    hasRead: false,
    bootId: "",
    version: "",
    wasRestarted: false,
    device: {},
    host: {},
    notes: [],
    models: [],
    orders: [],
    marks: null, // of the last event: what changes with things that an event does not tell
    busy: false,
  };
}

export function isOutdated(state) {
  return state.hasRead && state.version !== VERSION;
}

/**
 * The state after a status was read, and the list of models, which an older server does not have
 * (null). Throws: CourierError for what is no status.
 */
export function withStatus(state, status, list, now) {
  if (typeof status?.boot_id !== "string" || !Array.isArray(status.models)) {
    throw new CourierError(KINDS.GARBAGE, "no status");
  }
  const entries = new Map((list?.models ?? []).map((entry) => [text(entry?.id), entry]));
  const restarted = state.hasRead && state.bootId !== status.boot_id;
  // Another process begins its numbers anew: nothing of the one before is comparable.
  const known = restarted ? [] : state.models;
  const before = new Map(known.map((model) => [model.id, model]));
  const ours = status.models.map((raw) => {
    const id = text(raw?.id);
    return courierModel(raw, entries.get(id), before.get(id), now);
  });
  const ids = new Set(ours.map((model) => model.id));
  const others = [...entries.values()].filter((entry) => !ids.has(text(entry.id)));
  return {
    ...state,
    marks: restarted ? null : state.marks,
    link: "live",
    problem: "",
    isOld: list === null,
    hasRead: true,
    bootId: status.boot_id,
    version: text(status.version),
    wasRestarted: state.wasRestarted || restarted,
    device: object(status.device),
    host: object(status.host),
    notes: texts(status.notes),
    models: [...ours, ...others.map(coreModel)],
    orders: ordersOf(list),
    busy: list?.busy === true,
  };
}

/** The state after a reading failed; what was read before stays. */
export function withFailure(state, error) {
  const links = { [KINDS.OFFLINE]: "offline", [KINDS.ABSENT]: "absent", [KINDS.GARBAGE]: "garbage" };
  return { ...state, link: links[error.kind] ?? "failed", problem: text(error.message) };
}

/**
 * Whether the last reading saw something on its way to another rest. An order that waits is none: it
 * may wait for long, and says so when it begins.
 */
export function isUnsettled(state) {
  const isMoving = (model) => MOVING.has(stateOf(model));
  return state.link === "live" && (state.orders.some((order) => !order.waits) || state.models.some(isMoving));
}

/**
 * The state after an event, and whether something changed that the event does not tell, so that
 * the status has to be read again: `[state, reread]`. The first event, of the server or of a model,
 * has nothing to be compared with: what it leaves out may have changed since the reading.
 */
export function withEvent(state, event, now) {
  if (!state.hasRead || event?.boot_id !== state.bootId || !Array.isArray(event.models)) {
    return [state, true];
  }
  const told = new Map(event.models.map((model) => [model.id, model]));
  const ours = state.models.filter((model) => model.ours);
  let reread = ours.length !== told.size || ours.some((model) => !told.has(model.id));
  const marks = JSON.stringify([event.orders_done, event.loaded, event.asleep]);
  reread ||= marks !== state.marks || state.link !== "live";
  const models = state.models.map((model) => {
    const news = told.get(model.id);
    if (news === undefined || !fits(model, news)) {
      reread ||= news !== undefined;
      return model;
    }
    reread ||= news.plan !== model.plan;
    return withNews(model, news, now);
  });
  const next = { ...state, models, marks, orders: ordersOf(event), busy: event.busy === true };
  return [{ ...next, link: "live", problem: "" }, reread];
}

/** One word for where a model stands; a key of the words "state.*". */
export function stateOf(model) {
  const rests = { failed: "failed", "falling asleep": "falling", waking: "waking", asleep: "asleep" };
  if (Object.hasOwn(rests, model.rest)) {
    return rests[model.rest];
  }
  return model.ours ? model.engine : "awake";
}

/** Whether it gave the card back and waits to be woken. */
export function isAsleep(model) {
  return stateOf(model) === "asleep";
}

/** Whether a layer's letter says that it is under way, or used where it does not stay. */
export function isInFlight(placementLetter, activityLetter) {
  return placementLetter !== "r" && IN_FLIGHT.has(activityLetter);
}

export function placementOf(letter) {
  return PLACEMENTS[letter] ?? "mapped";
}

export function activityOf(letter) {
  return ACTIVITIES[letter] ?? "absent";
}

/** The letters of layers as the status or a plan lists them. */
export function lettersOf(layers) {
  return {
    placements: layers.map((layer) => PLACEMENT_LETTERS[layer.placement] ?? "m").join(""),
    activity: layers.map((layer) => ACTIVITY_LETTERS[layer.activity] ?? ".").join(""),
  };
}

/** A layer as the status or a plan lists it. */
export function layerOf(raw) {
  return {
    name: text(raw?.name),
    bytes: number(raw?.bytes),
    resident: number(raw?.resident_bytes),
    locked: number(raw?.locked_bytes),
    placement: text(raw?.placement),
    inPlace: raw?.in_place === true,
    reason: text(raw?.reason),
    activity: text(raw?.state),
    dtypes: texts(raw?.dtypes),
  };
}

/** Everything that is not as planned: `[{kind: "note" | "lock" | "blocks", name, text}]`. */
export function fallbacksOf(state) {
  const found = state.notes.map((note) => ({ kind: "note", name: "", text: note }));
  for (const model of state.models.filter((one) => one.ours)) {
    found.push(...model.notes.map((note) => ({ kind: "note", name: model.name, text: note })));
    const stuck = model.layers.find((layer) => layer.reason.startsWith(CANNOT_LOCK));
    if (stuck !== undefined) {
      const reason = stuck.reason.slice(CANNOT_LOCK.length);
      found.push({ kind: "lock", name: model.name, text: reason });
    }
    if (model.streamable === 0) {
      found.push({ kind: "blocks", name: model.name, text: "" });
    }
  }
  const keys = found.map((one) => JSON.stringify([one.kind, one.text, one.kind === "blocks" && one.name]));
  return found.filter((_, index) => keys.indexOf(keys[index]) === index);
}

/** Bytes that Courier's models take of the card and of RAM, and ComfyUI's other models. */
export function usageOf(state) {
  const sum = (models, value) => models.reduce((total, model) => total + (value(model) ?? 0), 0);
  const ours = state.models.filter((model) => model.ours);
  const core = state.models.filter((model) => !model.ours);
  return {
    device: sum(ours, (model) => model.measured.device),
    host: sum(ours, (model) => model.measured.host),
    coreDevice: sum(core, (model) => model.held.device),
    coreHost: sum(core, (model) => model.held.host),
  };
}

/** The budgets of the models that are loaded, together; null where one has no limit, or none is. */
export function budgetLine(models, which) {
  const loaded = models.filter((model) => model.ours && model.measured.device > 0);
  const figures = loaded.map((model) => model.budgets[which]);
  if (!figures.length || figures.includes(null)) {
    return null;
  }
  const isShared = loaded.every((model) => model.asked?.shared);
  return isShared ? Math.max(...figures) : figures.reduce((total, figure) => total + figure, 0);
}

function courierModel(raw, entry, before, now) {
  const layers = (Array.isArray(raw?.layers) ? raw.layers : []).map(layerOf);
  const measured = object(raw?.measured);
  const engine = text(raw?.state);
  const model = {
    id: text(raw?.id),
    ours: true,
    name: text(raw?.name),
    file: text(raw?.file),
    kind: text(entry?.kind) || text(raw?.kind) || "diffusion model",
    loader: { class: text(raw?.loader?.class), inputs: object(raw?.loader?.inputs) },
    engine,
    rest: text(entry?.state) || (engine === "asleep" ? "asleep" : "awake"),
    level: isNumber(entry?.level) ? entry.level : null,
    onUse: text(entry?.on_use),
    problem: text(entry?.problem),
    budgets: figures(raw?.budgets),
    asked: askedOf(raw?.asked),
    measured: memoryOf(measured),
    held: heldOf(entry?.held),
    notes: texts(raw?.notes),
    streamable: number(raw?.streamable_layers),
    layers,
    ...lettersOf(layers),
    plan: before?.plan ?? null,
  };
  return { ...model, ...trafficOf(raw?.traffic, before, now) };
}

function coreModel(entry) {
  return {
    id: text(entry?.id),
    ours: false,
    name: text(entry?.name),
    kind: text(entry?.kind),
    engine: "",
    rest: text(entry?.state) || "awake",
    level: isNumber(entry?.level) ? entry.level : null,
    onUse: text(entry?.on_use),
    problem: text(entry?.problem),
    held: heldOf(entry?.held),
    notes: [],
    layers: [],
  };
}

function ordersOf(raw) {
  const orders = Array.isArray(raw?.orders) ? raw.orders : [];
  return orders.filter((order) => order !== null && typeof order === "object");
}

function fits(model, news) {
  const count = model.layers.length;
  return model.ours && news.placements?.length === count && news.activity?.length === count;
}

function withNews(model, news, now) {
  const measured = memoryOf(object(news.measured));
  return {
    ...model,
    layers: layersAfter(model, news.placements, measured.device),
    engine: text(news.state),
    rest: text(news.rest),
    placements: news.placements,
    activity: news.activity,
    plan: number(news.plan),
    measured,
    ...trafficOf(news.traffic, model, now),
  };
}

/**
 * An event has no bytes of layers. What left the card has none there, until the next reading says how
 * many: not those of before, which would show it full.
 */
function layersAfter({ layers, placements }, letters, deviceBytes) {
  const left = (index) => letters[index] !== "r" && (placements[index] === "r" || deviceBytes === 0);
  const isSame = layers.every((layer, index) => layer.resident === 0 || !left(index));
  return isSame ? layers : layers.map((layer, index) => (left(index) ? { ...layer, resident: 0 } : layer));
}

/** Counters, and the bytes a second between this look and those before. */
function trafficOf(raw, before, now) {
  const shipped = number(raw?.shipped_bytes);
  if (before?.seenAt === undefined || shipped < before.shipped) {
    return { shipped, seenAt: now, rate: 0 };
  }
  const seconds = now - before.seenAt;
  if (seconds < 0.15) {
    // Too short to divide by: the next look counts both.
    return { shipped: before.shipped, seenAt: before.seenAt, rate: before.rate };
  }
  const rate = (shipped - before.shipped) / seconds;
  const isFresh = before.rate > 0 && rate > 0 && seconds < RATE_FORGETS_SECONDS;
  return { shipped, seenAt: now, rate: isFresh ? (before.rate + rate) / 2 : rate };
}

function memoryOf(raw) {
  const parts = ["host_locked_bytes", "host_copied_bytes", "host_staging_bytes"];
  return {
    device: number(raw.device_bytes),
    devicePeak: number(raw.device_peak_bytes),
    activationPeak: isNumber(raw.activation_peak_bytes) ? raw.activation_peak_bytes : null,
    host: parts.reduce((total, name) => total + number(raw[name]), 0),
  };
}

function heldOf(raw) {
  const parts = ["locked_bytes", "copied_bytes", "staging_bytes"];
  return {
    device: number(raw?.device_bytes),
    host: parts.reduce((total, name) => total + number(raw?.[name]), 0),
  };
}

function askedOf(raw) {
  if (raw === null || typeof raw !== "object") {
    return null;
  }
  return { ...figures(raw), shared: raw.shared === true, by: text(raw.by), waits: raw.waits === true };
}

function figures(raw) {
  const figure = (value) => (isNumber(value) ? value : null);
  return { device: figure(raw?.device_bytes), host: figure(raw?.host_bytes) };
}

function number(value) {
  return isNumber(value) ? value : 0;
}

function text(value) {
  return typeof value === "string" ? value : "";
}

function texts(value) {
  return Array.isArray(value) ? value.filter((item) => typeof item === "string") : [];
}

function object(value) {
  return value !== null && typeof value === "object" ? value : {};
}

function invert(letters) {
  return Object.fromEntries(Object.entries(letters).map(([letter, word]) => [word, letter]));
}

import assert from "node:assert/strict";
import test from "node:test";

import { CourierError, KINDS } from "../../web/panel/client.js";
import { barsOf } from "../../web/panel/machine.js";
import { badgeOf, whyNoSleep, whyNoSleepOfAll, whyNoWakeOfAll } from "../../web/panel/rules.js";
import {
  budgetLine, fallbacksOf, initialState, isOutdated, isUnsettled, stateOf, withEvent, withFailure, withStatus,
} from "../../web/panel/state.js";
import { entry, event, layer, list, model, status } from "./helpers.js";

function read(models, entries, more) {
  return withStatus(initialState(), status(models, more), entries ?? list(), 0);
}

test("a status and a list of models are one list: Courier's, then the others", () => {
  const state = read([model()], list([entry("m-1", { state: "asleep", level: 2 }), entry("vae-1")]));
  assert.deepEqual(state.models.map((one) => [one.id, one.ours, stateOf(one)]), [
    ["m-1", true, "asleep"], ["vae-1", false, "awake"],
  ]);
  assert.equal(state.models[0].measured.host, 60);
  assert.equal(state.models[0].placements, "rm");
  assert.equal(state.isOld, false);
  assert.equal(isOutdated(state), false);
  assert.equal(isOutdated(read([], list([]), { version: "9" })), true);
});

test("an older server has a status and no list", () => {
  const state = withStatus(initialState(), status([model({ asked: undefined })]), null, 0);
  assert.equal(state.isOld, true);
  assert.equal(state.models[0].asked, null);
  assert.equal(whyNoSleep(state, state.models[0]), "why.old");
});

test("garbage in any place of a status is survived or refused whole", () => {
  for (const broken of [null, [], 7, "x", {}, { boot_id: "b" }, { boot_id: 3, models: [] }]) {
    assert.throws(() => withStatus(initialState(), broken, null, 0), CourierError);
  }
  const odd = [null, 7, {}, { layers: [null, 7, {}], notes: 3, measured: "x", budgets: [], traffic: null }];
  const state = read(odd, { models: [null, { id: 7 }], orders: "x", busy: "yes" }, { device: 3, notes: [1] });
  assert.equal(state.models.filter((one) => one.ours).length, 4);
  assert.deepEqual(barsOf(state).map((bar) => bar.key), ["card", "host"]);
});

test("an event moves letters and counts, and asks for no status where nothing else changed", () => {
  const state = read([model()]);
  const [next] = withEvent(state, event(), 1);
  assert.equal(next.models[0].activity, "yu");
  assert.equal(next.models[0].layers, state.models[0].layers, "the layers themselves are the same");
  assert.equal(stateOf(next.models[0]), "running");
  assert.equal(next.models[0].rate, 5000);
  const [, reread] = withEvent(next, event({}, { activity: "u." }), 2);
  assert.equal(reread, false);
  const [, again] = withEvent(next, event({}, { plan: 2 }), 2);
  assert.equal(again, true, "another plan");
});

test("of a layer that left the card no bytes are shown there, before they are read", () => {
  const part = layer(1, "mapped", { resident_bytes: 400 });
  const state = read([model({ layers: [layer(0, "resident"), part, layer(2, "resident")] })]);
  const after = (placements, device_bytes) =>
    withEvent(state, event({}, { placements, activity: "...", measured: { device_bytes } }), 1)[0].models[0].layers;
  assert.deepEqual(after("mmr", 9).map((one) => one.resident), [0, 400, 1000]);
  assert.deepEqual(after("mmm", 0).map((one) => one.resident), [0, 0, 0]);
  assert.equal(after("rmr", 9), state.models[0].layers);
});

test("the first event has nothing to be compared with, also after a restart or a failure", () => {
  const state = read([model()]);
  const [next, reread] = withEvent(state, event(), 1);
  assert.equal(reread, true);
  assert.equal(withEvent(next, event(), 2)[1], false);
  const failed = withFailure(next, new CourierError(KINDS.OFFLINE, ""));
  assert.equal(withEvent(failed, event(), 3)[1], true);
  const back = withStatus(next, status([model()], { boot_id: "new" }), list(), 4);
  assert.equal(withEvent(back, event({ boot_id: "new" }), 5)[1], true, "the numbers are of another process");
});

test("what moves is not settled; what waits or rests is", () => {
  const rest = (state) => list([entry("m-1", { state })]);
  assert.equal(isUnsettled(read([model()], rest("awake"))), false);
  assert.equal(isUnsettled(read([model()], rest("falling asleep"))), true);
  assert.equal(isUnsettled(read([model()], list([], { orders: [{ waits: false }] }))), true);
  assert.equal(isUnsettled(read([model()], list([], { orders: [{ waits: true }] }))), false);
  assert.equal(isUnsettled(initialState()), false);
});

test("what an event does not tell is read again", () => {
  const [state] = withEvent(read([model()]), event(), 1);
  for (const news of [
    event({ boot_id: "other" }),
    event({ models: [] }),
    event({ orders_done: 1 }),
    event({ loaded: 2 }),
    event({ asleep: 1 }),
    event({}, { placements: "rmm", activity: "..." }),
    event({}, { id: "other" }),
    {},
  ]) {
    assert.equal(withEvent(state, news, 2)[1], true, JSON.stringify(news));
  }
  assert.equal(withEvent(initialState(), event(), 1)[1], true, "nothing was read yet");
});

test("another boot is a restart, the first is none, and a failure keeps what was read", () => {
  const first = read([model()]);
  assert.equal(first.wasRestarted, false);
  const failed = withFailure(first, new CourierError(KINDS.OFFLINE, "gone"));
  assert.deepEqual([failed.link, failed.models.length], ["offline", 1]);
  const back = withStatus(failed, status([], { boot_id: "new" }), list([]), 9);
  assert.deepEqual([back.link, back.wasRestarted, back.models.length], ["live", true, 0]);
});

test("the rate is of the last moments and never negative", () => {
  let state = read([model()]);
  const shipped = (bytes, at) => {
    [state] = withEvent(state, event({}, { traffic: { shipped_bytes: bytes } }), at);
    return state.models[0].rate;
  };
  assert.equal(shipped(1000, 1), 1000);
  assert.equal(shipped(4000, 2), 2000);
  assert.equal(shipped(4000, 2.05), 2000, "too soon to tell");
  assert.equal(shipped(4000, 3), 0);
  assert.equal(shipped(100, 4), 0, "a counter that began anew");
});

test("fallbacks are said once each", () => {
  const stuck = layer(0, "mapped", { reason: "pages cannot be locked: Windows" });
  const state = read([
    model({ layers: [stuck, stuck], notes: ["slow"] }),
    model({ id: "m-2", name: "two", layers: [stuck], notes: ["slow"] }),
    model({ id: "m-3", name: "flat", layers: [], streamable_layers: 0 }),
  ], list([]), { notes: ["of the machine"] });
  assert.deepEqual(fallbacksOf(state).map((one) => [one.kind, one.text]), [
    ["note", "of the machine"], ["note", "slow"], ["lock", "Windows"], ["blocks", ""],
  ]);
  assert.equal(badgeOf(state, fallbacksOf(state)), "!");
  assert.equal(badgeOf(read([model()]), []), "");
});

test("bars are ours, others, free, and add up", () => {
  const state = read([model()], list([entry("m-1"), entry("vae-1")]));
  const [card, host] = barsOf(state);
  assert.deepEqual(card, { key: "card", total: 10000, us: 2000, core: 300, others: 2700, free: 5000, budget: 4000 });
  assert.deepEqual([host.us, host.core, host.others, host.free, host.budget], [60, 0, 4940, 15000, null]);
  const cpu = { device: { type: "cpu", total_bytes: 9, free_bytes: 3 } };
  const both = model({ budgets: { device_bytes: 4000, host_bytes: 1000 } });
  const shown = (one) => barsOf(read([one], list(), cpu)).map((bar) => [bar.key, bar.us, bar.budget]);
  assert.deepEqual(shown(both), [["cpu", 2060, 5000]]);
  assert.deepEqual(shown(model()), [["cpu", 2060, null]]);
  const silent = read([model()], list(), { device: { type: "mps", total_bytes: null, free_bytes: null } });
  assert.equal(barsOf(silent)[0].total, null);
});

test("budgets add up, unless they are shared or one has no limit", () => {
  const two = (asked, device = 4000) =>
    read([model({ asked }), model({ id: "m-2", asked, budgets: { device_bytes: device } })]).models;
  const own = { device_bytes: 1, host_bytes: 1, shared: false };
  assert.equal(budgetLine(two(own), "device"), 8000);
  assert.equal(budgetLine(two({ ...own, shared: true }), "device"), 4000);
  assert.equal(budgetLine(two(own, null), "device"), null);
  assert.equal(budgetLine([], "device"), null);
});

test("why an order cannot be given", () => {
  const awake = read([model()]);
  assert.equal(whyNoSleep(awake, awake.models[0]), "");
  assert.equal(whyNoWakeOfAll(awake), "why.noneAsleep");
  const asleep = read([model({ state: "asleep" })], list([entry("m-1", { state: "asleep", level: 2 })]));
  assert.equal(whyNoSleep(asleep, asleep.models[0]), "why.deepest");
  assert.equal(whyNoSleepOfAll(asleep), "why.noneAwake");
  assert.equal(whyNoWakeOfAll(asleep), "");
  assert.equal(badgeOf(asleep, [1]), "1");
  const empty = read([model({ state: "unloaded", measured: {} })],
    list([entry("m-1", { held: { device_bytes: 0 } })]));
  assert.equal(whyNoSleep(empty, empty.models[0]), "why.unloaded");
  assert.equal(whyNoSleep({ ...awake, orders: [{}] }, awake.models[0]), "why.order");
  assert.equal(whyNoSleep({ ...awake, orders: [{ waits: true }] }, awake.models[0]), "why.waits");
  assert.equal(whyNoSleep({ ...awake, link: "offline" }, awake.models[0]), "why.offline");
});

import assert from "node:assert/strict";
import test from "node:test";

import { Actions } from "../../web/panel/actions.js";
import { CourierError, KINDS } from "../../web/panel/client.js";
import { translator } from "../../web/panel/text.js";

function stage({ sure = true, busy = false, answer = { ok: true, models: [] }, models = [] } = {}) {
  const sent = [];
  const toasts = [];
  const made = { sent, toasts, reads: 0, answer };
  const send = (name) => async (body) => {
    sent.push([name, body]);
    if (made.answer instanceof Error) {
      throw made.answer;
    }
    return made.answer;
  };
  made.actions = new Actions({
    t: translator("en"),
    client: { sleep: send("sleep"), wake: send("wake"), budget: send("budget"), cancel: send("cancel"), plan: send("plan") },
    state: () => ({ busy, models, device: {} }),
    confirm: async () => sure,
    toast: (severity, title, text) => toasts.push([severity, title, text]),
    read: async () => { made.reads += 1; },
    changed: () => {},
  });
  return made;
}

test("all models are put to sleep only when the user is sure", async () => {
  const unsure = stage({ sure: false });
  assert.equal(await unsure.actions.sleep(null), false);
  assert.deepEqual(unsure.sent, []);
  const made = stage();
  made.actions.level = 2;
  assert.equal(await made.actions.sleep(null), true);
  assert.deepEqual(made.sent, [["sleep", { models: "all", level: 2, when: "now" }]]);
  assert.equal(made.reads, 1);
  assert.deepEqual(made.toasts, [["success", "Asleep", "Nothing was awake: nothing was freed."]]);
});

test("one model is put to sleep at once, one that sleeps deeper, and one during a run later", async () => {
  const asleep = { id: "b", ours: true, rest: "asleep", engine: "asleep" };
  const made = stage({ busy: true, models: [asleep] });
  await made.actions.sleep(["a"]);
  await made.actions.sleep(["b"]);
  assert.deepEqual(made.sent.map(([, body]) => [body.level, body.when]), [[1, "idle"], [2, "idle"]]);
});

test("an order is shown while it is under way, and gone when it ends in whatever way", async () => {
  const made = stage();
  const order = made.actions.wake(["a"]);
  assert.deepEqual(made.actions.pending.map((one) => one.action), ["wake"]);
  await order;
  assert.deepEqual(made.actions.pending, []);
  made.answer = new CourierError(KINDS.REFUSED, "a prompt runs", { status: 409, code: "busy" });
  assert.equal(await made.actions.wake(["a"]), false);
  assert.deepEqual(made.actions.pending, []);
  assert.deepEqual(made.toasts.at(-1), ["warn", "Not done", "a prompt runs"]);
});

test("each failure has its word", async () => {
  const made = stage();
  const words = async (error) => {
    made.answer = error;
    await made.actions.sleep(["a"]);
    return made.toasts.at(-1);
  };
  assert.deepEqual(await words(new CourierError(KINDS.REFUSED, "half-way", { status: 503 })), ["error", "It failed", "half-way"]);
  assert.deepEqual(await words(new CourierError(KINDS.OFFLINE, "TypeError: x")), ["error", "It failed", "ComfyUI does not answer."]);
  assert.deepEqual(await words(new CourierError(KINDS.REFUSED, "undone", { status: 409, code: "cancelled" })), ["info", "Cancelled", "undone"]);
  const before = made.toasts.length;
  await words(new CourierError(KINDS.ABORTED, ""));
  assert.equal(made.toasts.length, before);
});

test("cancelling marks what waits and tells the server", async () => {
  const made = stage({ busy: true });
  let end;
  made.actions.client.sleep = () => new Promise((resolve) => { end = resolve; });
  const order = made.actions.sleep(["a"]);
  await made.actions.cancel();
  assert.equal(made.actions.pending[0].cancelled, true);
  assert.deepEqual(made.sent, [["cancel", undefined]]);
  end({ ok: true, models: [] });
  await order;
});

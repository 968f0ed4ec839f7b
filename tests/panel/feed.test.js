// When the server is asked, with a clock and a page of the test's own.
import assert from "node:assert/strict";
import test from "node:test";

import { CourierError, KINDS } from "../../web/panel/client.js";
import { Feed, STATUS_EVENT } from "../../web/panel/feed.js";

class Clock {
  constructor() {
    this.time = 0;
    this.timers = new Map();
    this.next = 1;
  }

  now() {
    return this.time;
  }

  set(call, seconds) {
    this.timers.set(this.next, { call, at: this.time + seconds });
    return this.next++;
  }

  clear(handle) {
    this.timers.delete(handle);
  }

  /** Go on by so much, and let everything run that is due. */
  async pass(seconds) {
    const end = this.time + seconds;
    await settle();
    for (;;) {
      const due = [...this.timers].filter(([, timer]) => timer.at <= end + 1e-9);
      if (!due.length) {
        break;
      }
      const [handle, timer] = due.sort((one, other) => one[1].at - other[1].at)[0];
      this.timers.delete(handle);
      this.time = timer.at;
      timer.call();
      await settle();
    }
    this.time = end;
  }
}

async function settle() {
  for (let turn = 0; turn < 20; turn += 1) {
    await Promise.resolve();
  }
}

function statusOf(boot_id, models = []) {
  return { boot_id, version: "0.1.0", device: {}, host: {}, notes: [], models };
}

function stage({ watched = true, visibility = "visible", answer = () => statusOf("boot") } = {}) {
  const clock = new Clock();
  const events = new EventTarget();
  const page = Object.assign(new EventTarget(), { visibilityState: visibility });
  const asked = [];
  const list = () => ({ models: [], orders: [], last_order: null, busy: false });
  const made = { clock, events, page, asked, watched, states: [], answer, list };
  const client = {
    status: async (signal) => {
      asked.push({ at: clock.time, signal });
      return made.answer(signal);
    },
    models: async () => made.list(),
  };
  made.feed = new Feed({
    client, events, page, clock,
    pollSeconds: () => 5,
    isWatched: () => made.watched,
    onState: (state) => made.states.push(state),
  });
  made.feed.listen();
  made.send = (detail) => events.dispatchEvent(new CustomEvent(STATUS_EVENT, { detail }));
  return made;
}

test("an open panel asks every five seconds, one request at a time", async () => {
  const { feed, clock, asked, states } = stage();
  feed.read();
  await settle();
  assert.equal(asked.length, 1);
  await clock.pass(21);
  assert.deepEqual(asked.map((one) => one.at), [0, 5, 10, 15, 20]);
  assert.equal(states.at(-1).link, "live");
});

test("nothing is asked while nobody watches or the page is hidden", async () => {
  const { feed, clock, asked, page } = stage({ watched: false });
  feed.read();
  await clock.pass(60);
  assert.equal(asked.length, 0);
  const hidden = stage({ visibility: "hidden" });
  hidden.feed.read();
  hidden.feed.read(true);
  await hidden.clock.pass(60);
  assert.equal(hidden.asked.length, 0);
  hidden.page.visibilityState = "visible";
  hidden.page.dispatchEvent(new Event("visibilitychange"));
  await hidden.clock.pass(6);
  assert.equal(hidden.asked.length, 2);
  assert.equal(page.visibilityState, "visible");
});

test("closing the panel ends the timer and breaks off what is under way", async () => {
  const made = stage({ answer: () => new Promise(() => {}) });
  made.feed.read();
  await settle();
  made.watched = false;
  made.feed.leave();
  assert.equal(made.asked[0].signal.aborted, true);
  assert.equal(made.clock.timers.size, 0);
  await made.clock.pass(60);
  assert.equal(made.asked.length, 1);
  made.watched = true;
  made.answer = () => statusOf("boot");
  made.feed.read();
  await settle();
  assert.equal(made.states.at(-1).link, "live");
});

test("a panel that ComfyUI took away without a word asks once more at most", async () => {
  const made = stage();
  made.feed.read();
  await settle();
  made.watched = false;
  await made.clock.pass(60);
  assert.equal(made.asked.length, 1);
  assert.equal(made.clock.timers.size, 0);
});

test("after a failure it asks on, and what was read before stays", async () => {
  const made = stage();
  made.feed.read();
  await settle();
  made.answer = () => Promise.reject(new CourierError(KINDS.OFFLINE, "no route"));
  await made.clock.pass(10);
  assert.equal(made.states.at(-1).link, "offline");
  assert.equal(made.states.at(-1).bootId, "boot");
  made.answer = () => statusOf("another boot");
  await made.clock.pass(5);
  assert.equal(made.states.at(-1).link, "live");
  assert.equal(made.states.at(-1).wasRestarted, true);
  made.feed.acknowledge();
  assert.equal(made.states.at(-1).wasRestarted, false);
});

test("a connection that came back is read at once, one that broke is said at once", async () => {
  const made = stage();
  made.feed.read();
  await settle();
  made.events.dispatchEvent(new Event("reconnecting"));
  assert.equal(made.states.at(-1).link, "offline");
  made.events.dispatchEvent(new Event("reconnected"));
  await settle();
  assert.equal(made.asked.length, 2);
  assert.equal(made.states.at(-1).link, "live");
});

test("events that the status has to follow are followed soon, and not once for each", async () => {
  const made = stage();
  made.feed.read();
  await settle();
  for (let number = 0; number < 10; number += 1) {
    made.send({ boot_id: "boot", models: [{ id: "new" }], orders: [] });
    await made.clock.pass(0.2);
  }
  const soon = made.asked.filter((one) => one.at > 0 && one.at <= 2);
  assert.ok(soon.length >= 2 && soon.length <= 3, `${soon.length} requests in two seconds`);
});

test("an event while a request is under way is not lost", async () => {
  let answer;
  const made = stage({ answer: () => new Promise((resolve) => (answer = resolve)) });
  made.feed.read();
  await settle();
  made.send({ boot_id: "boot", models: [], orders: [] });
  answer(statusOf("boot"));
  await settle();
  await made.clock.pass(1);
  assert.equal(made.asked.length, 2);
});

test("an event while the page is hidden is left until it is seen", async () => {
  const made = stage();
  made.feed.read();
  await settle();
  made.page.visibilityState = "hidden";
  made.page.dispatchEvent(new Event("visibilitychange"));
  const before = made.states.length;
  made.send({ boot_id: "boot", models: [{ id: "new" }], orders: [] });
  await made.clock.pass(30);
  assert.equal(made.states.length, before);
  assert.equal(made.asked.length, 1);
});

/** ComfyUI's own models as the list has them, of which events have nothing but the number. */
function cores(...states) {
  const models = states.map((state, index) => ({ id: `core-${index}`, kind: "VAE", state }));
  return () => ({ models, orders: [], last_order: null, busy: false });
}

const asleepIn = ({ states }) => states.at(-1).models.filter((one) => one.rest === "asleep").length;
const news = (more = {}) => ({ boot_id: "boot", models: [], orders: [], orders_done: 0, loaded: 3, asleep: 0, busy: false, ...more });

test("a page whose panel is closed learns of what an event does not tell, once, and asks no more", async () => {
  const made = stage({ watched: false });
  made.list = cores("awake", "awake", "awake");
  made.feed.read(true);
  await settle();
  assert.equal(asleepIn(made), 0);
  made.list = cores("asleep", "asleep", "asleep");
  made.send(news({ orders_done: 1, asleep: 3 }));
  await made.clock.pass(60);
  assert.equal(asleepIn(made), 3);
  assert.equal(made.asked.length, 2);
});

test("an answer that an event overtook does not undo what that told", async () => {
  const made = stage({ watched: false });
  const one = { id: "m-1", layers: [], state: "loaded" };
  const told = (rest) => ({ id: "m-1", state: rest === "asleep" ? "asleep" : "loaded", rest, placements: "", activity: "", plan: 1 });
  made.answer = () => statusOf("boot", [one]);
  made.feed.read(true);
  await settle();
  made.send(news({ models: [told("awake")] }));
  await made.clock.pass(2);
  let answer;
  made.answer = () => new Promise((resolve) => (answer = resolve));
  made.feed.read(true);
  await settle();
  made.send(news({ models: [told("asleep")] }));
  answer(statusOf("boot", [one]));
  await settle();
  assert.equal(asleepIn(made), 1);
});

test("what closing the panel broke off is read for the badges, if it was for a change", async () => {
  const made = stage();
  made.list = cores("awake");
  made.feed.read();
  await settle();
  made.list = cores("asleep");
  made.send(news({ asleep: 1 }));
  made.answer = () => new Promise(() => {});
  await made.clock.pass(1);
  assert.equal(made.asked.length, 2);
  made.watched = false;
  made.feed.leave();
  assert.equal(made.asked[1].signal.aborted, true);
  made.answer = () => statusOf("boot");
  await made.clock.pass(60);
  assert.equal(asleepIn(made), 1);
  assert.equal(made.asked.length, 3);
});

test("what changed while the page was hidden is read when it is seen, also with a closed panel", async () => {
  const made = stage({ watched: false });
  made.feed.read(true);
  await settle();
  const see = (visibility) => {
    made.page.visibilityState = visibility;
    made.page.dispatchEvent(new Event("visibilitychange"));
  };
  see("hidden");
  made.list = cores("asleep");
  made.send(news({ asleep: 1 }));
  await made.clock.pass(60);
  assert.equal(made.asked.length, 1);
  see("visible");
  await made.clock.pass(60);
  assert.equal(asleepIn(made), 1);
  assert.equal(made.asked.length, 2);
  see("hidden");
  see("visible");
  await made.clock.pass(60);
  assert.equal(made.asked.length, 2, "nothing changed meanwhile");
});

test("a reading in the middle of an order is not the last one", async () => {
  const made = stage({ watched: false });
  made.list = () => ({ ...cores("asleep", "awake")(), orders: [{ action: "sleep", waits: false }] });
  made.feed.read(true);
  await settle();
  made.list = cores("awake", "awake"); // it was cancelled and undone: no event has another number
  await made.clock.pass(60);
  assert.equal(asleepIn(made), 0);
  assert.equal(made.asked.length, 2);
});

test("a page that has its websocket's id only while it reads asks once more with it", async () => {
  let answer;
  const made = stage({ watched: false, answer: () => new Promise((resolve) => (answer = resolve)) });
  made.feed.read(true);
  await settle();
  made.feed.read(true);
  answer(statusOf("boot"));
  await made.clock.pass(60);
  assert.equal(made.asked.length, 2);
});

test("an answer that is none of ours is a failure and not the end", async () => {
  const made = stage({ answer: () => ({ hello: "world" }) });
  made.feed.read();
  await made.clock.pass(12);
  assert.equal(made.states.at(-1).link, "garbage");
  assert.equal(made.asked.length, 3);
});

test("a fault while drawing is not the last look", async () => {
  const made = stage();
  let faults = 0;
  made.feed.onState = () => {
    faults += 1;
    throw new Error("a fault of the drawing");
  };
  const first = made.feed.read().catch((error) => error.message);
  await settle();
  assert.equal(await first, "a fault of the drawing");
  made.feed.onState = (state) => made.states.push(state);
  await made.clock.pass(6);
  assert.equal(faults, 1);
  assert.equal(made.states.at(-1).link, "live");
});

// When the server is asked: while the panel is open and its page visible, seldom, one request at a
// time. Events make it quick; it is right without them. A page whose panel is closed has badges still:
// it asks once for each change that an event tells it of and does not tell it whole.
import { CourierError, KINDS } from "./client.js";
import { initialState, isUnsettled, withEvent, withFailure, withStatus } from "./state.js";

const REREAD_SECONDS = 0.7;
export const STATUS_EVENT = "courier.status";

export class Feed {
  /**
   * `events`: ComfyUI's api, which sends "courier.status", "reconnecting" and "reconnected".
   * `page`: the document, for its visibility. `clock`: `{now() in seconds, set(call, seconds),
   * clear(handle)}`. `pollSeconds()` and `isWatched()` (whether a panel is open) are asked each time:
   * ComfyUI does not always say that it closed one. `onState(state)` is called after a change.
   */
  constructor({ client, events, page, clock, pollSeconds, isWatched, onState }) {
    Object.assign(this, { client, events, page, clock, pollSeconds, isWatched, onState });
    this.state = initialState();
    this.timer = null;
    this.dueAt = 0;
    this.reading = null; // how to break it off, whether it was owed, the last event meanwhile
    // Something has changed that was not read: that is owed to the badges too, who looks or not.
    this.isOwed = false;
    this.onEvent = (event) => this.take(event.detail);
    this.onBreak = () => this.put(withFailure(this.state, new CourierError(KINDS.OFFLINE, "")));
    this.onBack = () => this.read(true);
    this.onVisible = () => (this.isActive ? this.read() : this.rest());
  }

  /** Whether anybody sees what is read. */
  get isActive() {
    return this.page.visibilityState !== "hidden" && this.isWatched();
  }

  /** The events that say that something changed: listeners, and no work while nobody looks. */
  listen() {
    this.events.addEventListener(STATUS_EVENT, this.onEvent);
    this.events.addEventListener("reconnecting", this.onBreak);
    this.events.addEventListener("reconnected", this.onBack);
    this.page.addEventListener("visibilitychange", this.onVisible);
  }

  /** A panel was closed: with the last one, the timer and the request in flight end. */
  leave() {
    if (!this.isWatched()) {
      this.rest();
    }
  }

  /**
   * Read everything now; once more if that is being done already. Nothing while nobody looks, but
   * for `force`: once, for the badges; of a hidden page when it is seen.
   */
  async read(force = false) {
    const isHidden = this.page.visibilityState === "hidden";
    if (this.reading !== null || isHidden) {
      this.isOwed ||= force || this.isWatched();
      return;
    }
    if (!force && !this.isWatched()) {
      return;
    }
    this.clear();
    const reading = { breaker: new AbortController(), wasOwed: force || this.isOwed, event: null };
    this.reading = reading;
    this.isOwed = false;
    let state = await this.readOnce(reading.breaker.signal);
    if (this.reading !== reading) {
      return; // it was broken off meanwhile
    }
    this.reading = null;
    if (reading.event !== null && state.link === "live") {
      // The answer may be older, and would undo what the event told; if it is newer, another event
      // is on its way.
      const [told, reread] = withEvent(state, reading.event, this.clock.now());
      state = told;
      this.isOwed ||= reread;
    }
    this.isOwed ||= isUnsettled(state);
    // Before anything is drawn: a fault there must not be the last look.
    this.plan();
    this.put(state);
  }

  /** The next reading: what is owed soon, whoever looks; otherwise while somebody does. */
  plan() {
    if (this.isOwed && this.page.visibilityState !== "hidden") {
      this.schedule(REREAD_SECONDS);
    } else if (this.isActive) {
      this.schedule(this.pollSeconds());
    }
  }

  /** The state after one reading, whatever came of it. */
  async readOnce(signal) {
    try {
      const [status, list] = await Promise.all([
        this.client.status(signal),
        this.client.models(signal).catch(onlyIfAbsent),
      ]);
      return withStatus(this.state, status, list, this.clock.now());
    } catch (error) {
      const isKnown = error instanceof CourierError;
      return withFailure(this.state, isKnown ? error : new CourierError(KINDS.GARBAGE, String(error)));
    }
  }

  /** An event came. Where nobody sees the page, it is looked at when somebody does. */
  take(event) {
    if (this.page.visibilityState === "hidden") {
      this.isOwed = true;
      return;
    }
    const [state, reread] = withEvent(this.state, event, this.clock.now());
    if (state !== this.state) {
      this.put(state);
    }
    if (this.reading !== null) {
      this.reading.event = event;
      this.isOwed ||= reread;
    } else if (reread) {
      this.isOwed = true;
      this.plan();
    }
  }

  /** The user has seen that the server was restarted. */
  acknowledge() {
    this.put({ ...this.state, wasRestarted: false });
  }

  put(state) {
    this.state = state;
    this.onState(state);
  }

  /** Read in so many seconds, or sooner if that is planned already. */
  schedule(seconds) {
    const dueAt = this.clock.now() + seconds;
    if (this.timer !== null && this.dueAt <= dueAt) {
      return;
    }
    this.clear();
    this.dueAt = dueAt;
    this.timer = this.clock.set(() => {
      this.timer = null;
      this.read(this.isOwed);
    }, seconds);
  }

  /** Nobody looks at the panel any more; the badges may be owed a reading still. */
  rest() {
    this.clear();
    this.isOwed ||= this.reading?.wasOwed === true;
    this.reading?.breaker.abort();
    this.reading = null;
    this.plan();
  }

  clear() {
    if (this.timer !== null) {
      this.clock.clear(this.timer);
      this.timer = null;
    }
  }
}

function onlyIfAbsent(error) {
  if (error.kind === KINDS.ABSENT) {
    return null;
  }
  throw error;
}

// Puts the panel together with ComfyUI: its api, its settings, its toasts, its tab.
import { Actions } from "./actions.js";
import { NodeBadges, hasBadge } from "./badges.js";
import { Client } from "./client.js";
import { Comfy } from "./comfy.js";
import { Feed } from "./feed.js";
import { RefusedNotice } from "./notice.js";
import { Panel } from "./panel.js";
import { badgeOf } from "./rules.js";
import { CONFIRM, POLL } from "./settings.js";
import { fallbacksOf } from "./state.js";
import { translator } from "./text.js";

export const TAB = "courier";
export const REFUSED_EVENT = "courier.refused";
const ASLEEP_ERROR = /(^|\.)AsleepError$/;

export class CourierApp {
  /** `app` and `api` are ComfyUI's. Nothing happens before `setup`. */
  constructor(app, api) {
    Object.assign(this, { app, api });
    this.comfy = new Comfy(app);
    this.views = [];
    this.t = translator("en");
    this.clock = {
      now: () => performance.now() / 1000,
      set: (call, seconds) => setTimeout(call, seconds * 1000),
      clear: (handle) => clearTimeout(handle),
    };
    const fetchApi = (route, options) => api.fetchApi(route, options);
    this.client = new Client(fetchApi, () => api.clientId ?? "");
  }

  setup() {
    const { api } = this;
    this.t = translator(this.comfy.setting("Comfy.Locale", "en"));
    const t = this.t;
    this.feed = new Feed({
      client: this.client,
      events: api,
      page: document,
      clock: this.clock,
      pollSeconds: () => Math.max(1, Number(this.comfy.setting(POLL, 5)) || 5),
      isWatched: () => this.views.some((view) => view.root.isConnected),
      onState: () => this.update(),
    });
    this.actions = new Actions({
      t,
      client: this.client,
      state: () => this.state,
      confirm: async (title, text) => !this.comfy.setting(CONFIRM, true) || this.comfy.confirm(title, text),
      toast: (severity, title, text) => this.comfy.toast(severity, title, text),
      read: () => this.feed.read(true),
      changed: () => this.update(),
    });
    this.badges = new NodeBadges(t, globalThis.LGraphBadge, () => this.comfy.redraw());
    this.notice = new RefusedNotice(t, () => this.wakeAndRun());
    this.feed.listen();
    api.addEventListener(REFUSED_EVENT, (event) => this.notice.show(String(event.detail?.message ?? "")));
    api.addEventListener("execution_error", (event) => this.onError(event.detail));
    this.registerTab();
    this.feed.read(true);
    if (!api.clientId) {
      // The first word of the websocket brings its id, without which nobody sends events.
      api.addEventListener("status", () => this.feed.read(true), { once: true });
    }
  }

  registerTab() {
    this.comfy.registerSidebarTab({
      id: TAB,
      icon: "pi pi-truck",
      title: this.t("panel.title"),
      tooltip: this.t("panel.tooltip"),
      label: this.t("panel.title"),
      type: "custom",
      render: (root) => this.mount(root),
      destroy: () => this.unmount(),
    });
  }

  /** The state, with the orders that this page has sent and the server does not list yet. */
  get state() {
    const { state } = this.feed;
    return state.orders.length ? state : { ...state, orders: this.actions.pending };
  }

  /** ComfyUI opens the tab; or draws it again, and means the panel that is there. */
  mount(root) {
    if (this.views.some((view) => view.root === root && view.isIn(root))) {
      return;
    }
    this.forgetGone();
    const view = new Panel(root, this.t, {
      actions: this.actions,
      clock: this.clock,
      retry: () => this.feed.read(),
      reload: () => location.reload(),
      acknowledge: () => this.feed.acknowledge(),
    });
    this.views.push(view);
    view.update(this.state);
    // ComfyUI puts the element into its page only after this.
    this.clock.set(() => this.feed.read(), 0);
  }

  /** Those that ComfyUI took off its page without a word: they were on it once, and are not. */
  forgetGone() {
    for (const view of this.views) {
      view.wasThere ||= view.root.isConnected;
    }
    const gone = this.views.filter((view) => view.wasThere && !view.root.isConnected);
    gone.forEach((view) => view.destroy());
    this.views = this.views.filter((view) => !gone.includes(view));
  }

  /** ComfyUI closes the tab. */
  unmount() {
    for (const view of this.views) {
      view.destroy();
    }
    this.views = [];
    this.feed.leave();
  }

  update() {
    this.forgetGone();
    const state = this.state;
    for (const view of this.views) {
      view.update(state);
    }
    this.badges.update(state);
    this.comfy.showBadge(TAB, state.link === "live" ? badgeOf(state, fallbacksOf(state)) : "");
  }

  nodeCreated(node) {
    if (this.badges && hasBadge(node.comfyClass)) {
      this.badges.add(node);
      this.badges.update(this.state);
    }
  }

  async wakeAndRun() {
    const done = await this.actions.wake(null);
    if (done) {
      await this.comfy.execute("Comfy.QueuePrompt");
    }
    return done;
  }

  /** A node failed: one that needed a model that sleeps has the same way on as a refused prompt. */
  onError(detail) {
    if (ASLEEP_ERROR.test(String(detail?.exception_type ?? ""))) {
      this.notice.show(String(detail.exception_message ?? ""));
    }
  }
}

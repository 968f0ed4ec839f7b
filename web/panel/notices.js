// What there is to say about the connection and the server, and what is not as planned.
import { make, makeButton, setButton, setClass, setHidden, setText } from "./dom.js";
import { fallbacksOf, isOutdated } from "./state.js";
import { VERSION } from "./version.js";

export class Notices {
  /** `retry()` reads anew; `reload()` the page; `acknowledge()` a restart. */
  constructor(t, { retry, reload, acknowledge }) {
    this.t = t;
    this.link = makeNotice(makeButton("courier-is-quiet", retry), t("link.retry"));
    this.restart = makeNotice(makeButton("courier-is-quiet", acknowledge), t("link.dismiss"));
    this.version = makeNotice(makeButton("courier-is-quiet", reload), t("link.reload"));
    const parts = [this.link, this.restart, this.version].map((notice) => notice.element);
    this.element = make("div", "courier-notices", { role: "status" }, ...parts);
  }

  update(state) {
    const t = this.t;
    const isWell = state.link === "live" || state.link === "loading";
    const problem = problemText(t, state);
    setHidden(this.link.element, isWell && !state.isOld);
    setText(this.link.text, problem);
    setClass(this.link.element, `courier-notice courier-on-${isWell ? "info" : "bad"}`);
    setHidden(this.restart.element, !state.wasRestarted);
    setText(this.restart.text, t("link.restarted"));
    setHidden(this.version.element, !isOutdated(state) || state.isOld);
    setText(this.version.text, t("link.version", { page: VERSION, server: state.version }));
  }
}

export class Fallbacks {
  constructor(t) {
    this.t = t;
    this.shown = "";
    this.element = make("section", "courier-notice courier-on-warn", { "aria-label": t("fallback.title") });
  }

  update(state) {
    const texts = fallbacksOf(state).map(({ kind, name, text }) => {
      const reason = text;
      return kind === "note" ? (name ? `${name}: ${text}` : text) : this.t(`fallback.${kind}`, { name, reason });
    });
    setHidden(this.element, texts.length === 0);
    const key = JSON.stringify(texts);
    if (key !== this.shown) {
      this.shown = key;
      const title = make("h3", "courier-subtitle", {}, this.t("fallback.title"));
      const items = texts.map((text) => make("li", "", {}, text));
      this.element.replaceChildren(title, make("ul", "courier-reasons", {}, ...items));
    }
  }
}

function problemText(t, state) {
  const { link, hasRead, isOld, problem: message } = state;
  if (link === "offline") {
    return t(hasRead ? "link.offline" : "link.offline.empty");
  }
  if (link === "garbage" || link === "failed") {
    return t(`link.${link}`, { message });
  }
  return link === "absent" ? t("link.absent") : isOld ? t("link.old") : "";
}

function makeNotice(button, label) {
  setButton(button, label);
  const text = make("p", "courier-notice-text");
  return { element: make("div", "courier-notice courier-on-info", {}, text, button), text };
}

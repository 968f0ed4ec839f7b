// The word to a user whose workflow was refused because a model sleeps, and the way on.
import { freshId, make, makeButton, setButton, setText } from "./dom.js";
import { CSS } from "./style.js";

export class RefusedNotice {
  /** `onWake()` wakes and runs again; resolves to whether that went well. */
  constructor(t, onWake) {
    this.t = t;
    this.onWake = onWake;
    this.element = null;
  }

  show(message) {
    this.close();
    const titleId = freshId("refused");
    const title = make("h2", "courier-subtitle", { id: titleId }, this.t("refused.title"));
    const text = make("p", "courier-notice-text", {}, this.t("refused.text"));
    const detail = make("p", "courier-help", {}, message);
    const wake = makeButton("courier-is-main", () => this.wake(wake));
    const close = makeButton("courier-is-quiet", () => this.close());
    setButton(wake, this.t("refused.action"));
    setButton(close, this.t("refused.close"));
    const buttons = make("div", "courier-buttons", {}, wake, close);
    const attributes = { role: "alertdialog", "aria-labelledby": titleId };
    const box = make("div", "courier-refused", attributes, title, text, detail, buttons);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.close();
      }
      event.stopPropagation();
    });
    this.element = make("div", "courier-float", {}, make("style", "", {}, CSS), box);
    document.body.append(this.element);
    wake.focus();
  }

  async wake(button) {
    setButton(button, this.t("refused.waking"), this.t("refused.waking"));
    const done = await this.onWake();
    if (done) {
      this.close();
    } else if (button.isConnected) {
      setButton(button, this.t("refused.action"));
      setText(button, this.t("refused.action"));
    }
  }

  close() {
    this.element?.remove();
    this.element = null;
  }
}

// Elements, made and changed. Text goes in as text; what is as it was is not touched.

/** `make("p", "courier-note", {title: "x"}, "text", child)`. */
export function make(tag, className = "", attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (className) {
    element.className = className;
  }
  for (const [name, value] of Object.entries(attributes)) {
    setAttribute(element, name, value);
  }
  element.append(...children);
  return element;
}

/** A button that says why it cannot be used instead of losing the focus. */
export function makeButton(className, onClick) {
  const button = make("button", `courier-button ${className}`, { type: "button" });
  button.addEventListener("click", (event) => {
    if (button.getAttribute("aria-disabled") !== "true") {
      onClick(event);
    }
  });
  return button;
}

export function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** null and false take the attribute away. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) {
      element.removeAttribute(name);
    }
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) {
    element.setAttribute(name, text);
  }
}

export function setClass(element, className) {
  if (element.className !== className) {
    element.className = className;
  }
}

export function setHidden(element, isHidden) {
  if (element.hidden !== isHidden) {
    element.hidden = isHidden;
  }
}

export function setStyle(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) {
    element.style.setProperty(name, value);
  }
}

/** What a button says, and why it cannot be used now (or ""). */
export function setButton(button, text, why = "", label = "") {
  setText(button, text);
  setAttribute(button, "aria-disabled", why ? "true" : null);
  setAttribute(button, "title", why || null);
  setAttribute(button, "aria-label", label || null);
}

let numbers = 0;
/** An id that no other element of the page has. */
export function freshId(name) {
  numbers += 1;
  return `courier-${name}-${numbers}`;
}

import assert from "node:assert/strict";
import test from "node:test";

import { EARLIER, WAITING, earlierText, outputText } from "../../web/format.js";

test("the text of an executed node is what it sent", () => {
  assert.equal(outputText({ text: ["Courier 0.1.0\ndevice"] }), "Courier 0.1.0\ndevice");
  assert.equal(outputText({ text: ["first", "second"] }), "first\nsecond");
});

test("an output without text changes nothing", () => {
  for (const output of [undefined, null, {}, { text: [] }, { text: [3, null] }, { images: [] }]) {
    assert.equal(outputText(output), null);
  }
});

test("a saved text is marked as an earlier one, once", () => {
  const marked = earlierText("Courier 0.1.0");
  assert.equal(marked, `${EARLIER}\nCourier 0.1.0`);
  assert.equal(earlierText(marked), marked);
});

test("a workflow without a text, or with a foreign value, shows the hint", () => {
  for (const saved of [undefined, null, "", 7, {}, WAITING]) {
    assert.equal(earlierText(saved), WAITING);
  }
});

test("markup stays text", () => {
  const text = "<img src=x onerror=alert(1)>";
  assert.equal(outputText({ text: [text] }), text);
});

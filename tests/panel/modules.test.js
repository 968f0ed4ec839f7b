// ComfyUI imports every .js of web/: only main.js may act on import, and none writes markup.
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";

const WEB = new URL("../../web/", import.meta.url);
const modules = readdirSync(WEB, { recursive: true })
  .map(String)
  .filter((name) => name.endsWith(".js"));

test("importing a module other than main.js needs no browser and does nothing", async () => {
  const before = Object.keys(globalThis);
  for (const name of modules.filter((name) => name !== "main.js")) {
    await import(new URL(name, WEB));
  }
  assert.deepEqual(Object.keys(globalThis), before);
});

test("no module writes markup or looks up the page", () => {
  for (const name of modules) {
    const source = readFileSync(new URL(name, WEB), "utf-8");
    for (const word of ["innerHTML", "outerHTML", "insertAdjacentHTML", "querySelector", "getElement"]) {
      assert.ok(!source.includes(word), `${name} uses ${word}`);
    }
  }
});

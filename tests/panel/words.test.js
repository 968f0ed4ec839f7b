import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";

import { planText, readPlan } from "../../web/panel/plans.js";
import { CourierError, KINDS, readAnswer } from "../../web/panel/client.js";
import { chooseRows, layerText, sharedPrefix } from "../../web/panel/layers.js";
import { receiptText } from "../../web/panel/receipts.js";
import { KEYBINDINGS, MENU, SETTINGS, commandsOf } from "../../web/panel/settings.js";
import { layerOf } from "../../web/panel/state.js";
import en from "../../web/panel/text_en.js";
import zh from "../../web/panel/text_zh.js";
import { translator, wordOr } from "../../web/panel/text.js";
import { gibFigure, parseGib, percentText, secondsText, sizeText } from "../../web/panel/units.js";
import { VERSION } from "../../web/panel/version.js";
import { badgeText, hasBadge } from "../../web/panel/badges.js";
import { layer } from "./helpers.js";

const t = translator("en");
const ROOT = new URL("../../", import.meta.url);
const json = (path) => JSON.parse(readFileSync(new URL(path, ROOT), "utf-8"));

test("sizes have three figures and a unit", () => {
  const cases = [[0, "0 B"], [1023, "1023 B"], [1024, "1.00 KiB"], [2 ** 20 - 1, "1.00 MiB"],
    [11.7e9, "10.9 GiB"], [5e11, "466 GiB"], [null, "–"], [NaN, "–"]];
  for (const [bytes, text] of cases) {
    assert.equal(sizeText(bytes), text);
  }
  assert.deepEqual([0, 0.004, 0.06, 12.4, null].map(secondsText), ["0.00 s", "< 0.01 s", "0.06 s", "12 s", "–"]);
  assert.equal(percentText(999, 1000), "99 %", "what is not all is never all");
  assert.equal(percentText(1000, 1000), "100 %");
  assert.equal(percentText(1, 0), "–");
});

test("a figure that is typed is GiB, nothing, or wrong", () => {
  assert.equal(parseGib(" 12 ", 0, 1024), 12);
  assert.equal(parseGib("11,25", 0, 1024), 11.25);
  assert.equal(parseGib("", 0, 1024), null);
  for (const text of ["-1", "1e3", "12GB", "0x10", "1025", "1.2.3", "NaN", "Infinity", ".", "二"]) {
    assert.equal(parseGib(text, 0, 1024), undefined, text);
  }
  assert.equal(gibFigure(2 ** 31 + 1), "2.001", "a smallest figure is never rounded down");
  assert.equal(gibFigure(null), "");
});

test("both languages have the same words with the same values in them", () => {
  assert.deepEqual(Object.keys(zh).sort(), Object.keys(en).sort());
  const holes = (text) => [...text.matchAll(/\{(\w+)\}/g)].map((found) => found[1]).sort();
  for (const key of Object.keys(en)) {
    assert.deepEqual(holes(zh[key]), holes(en[key]), key);
  }
});

test("every word that the scripts ask for is there", () => {
  const folder = new URL("web/panel/", ROOT);
  for (const name of readdirSync(folder).filter((file) => !file.startsWith("text"))) {
    const source = readFileSync(new URL(name, folder), "utf-8");
    for (const [, key] of source.matchAll(/\bt\("([\w. ]+)"/g)) {
      assert.ok(key in en, `${name} asks for ${key}`);
    }
  }
});

test("a value is put in as it is, once", () => {
  assert.equal(t("link.failed", { message: "{message} $& <b>" }), "The status could not be read: {message} $& <b>");
  assert.equal(translator("zh-TW")("action.wake"), "唤醒");
  assert.equal(translator("fr")("action.wake"), "Wake");
  assert.equal(translator(undefined)("action.wake"), "Wake");
  assert.equal(wordOr(t, "state", "detached"), "detached", "what there is no word for is shown as it is");
});

test("ComfyUI's own texts are there in both languages for what is registered", () => {
  const ids = (things) => things.map((thing) => thing.id.replace(".", "_")).sort();
  for (const language of ["en", "zh"]) {
    assert.deepEqual(Object.keys(json(`locales/${language}/settings.json`)).sort(), ids(SETTINGS));
    assert.deepEqual(Object.keys(json(`locales/${language}/commands.json`)).sort(), ids(commandsOf({})));
  }
  const english = json("locales/en/settings.json");
  for (const setting of SETTINGS) {
    assert.equal(english[setting.id.replace(".", "_")].name, setting.name);
    assert.equal(english[setting.id.replace(".", "_")].tooltip, setting.tooltip);
  }
  const commands = commandsOf({}).map((command) => command.id);
  assert.ok(KEYBINDINGS.every((binding) => commands.includes(binding.commandId)));
  assert.ok(MENU.every((menu) => menu.commands.every((id) => commands.includes(id))));
});

test("the version is that of the pack", () => {
  const project = readFileSync(new URL("pyproject.toml", ROOT), "utf-8");
  assert.ok(project.includes(`\nversion = "${VERSION}"`));
});

test("an answer is an object, or one error that says what kind it is", () => {
  assert.deepEqual(readAnswer(200, true, '{"a": 1}'), { a: 1 });
  const kind = (status, text) => {
    try {
      readAnswer(status, status < 400, text);
    } catch (error) {
      assert.ok(error instanceof CourierError);
      return [error.kind, error.code];
    }
    return null;
  };
  const ours = JSON.stringify({ error: { code: "busy", message: "a prompt runs" } });
  assert.deepEqual(kind(409, ours), [KINDS.REFUSED, "busy"]);
  assert.deepEqual(kind(404, "404: Not Found"), [KINDS.ABSENT, ""]);
  assert.deepEqual(kind(404, ours), [KINDS.REFUSED, "busy"]);
  for (const text of ["", "<html>", "[]", "null", "7"]) {
    assert.deepEqual(kind(200, text), [KINDS.GARBAGE, ""], text);
  }
  assert.deepEqual(kind(500, "x"), [KINDS.GARBAGE, ""]);
});

test("rows are searched by any word and sorted without losing their order", () => {
  const layers = ["resident", "mapped", "pinned", "mapped"].map((place, index) =>
    layerOf(layer(index, place, { bytes: index === 1 ? 5 : 10 })));
  const letters = "rmpm";
  assert.deepEqual(chooseRows(layers, letters, "", "name", 1), [0, 1, 2, 3]);
  assert.deepEqual(chooseRows(layers, letters, "", "name", -1), [3, 2, 1, 0]);
  assert.deepEqual(chooseRows(layers, letters, "MAPPED", "name", 1), [1, 3]);
  assert.deepEqual(chooseRows(layers, letters, "blocks.3 map", "name", 1), [3]);
  assert.deepEqual(chooseRows(layers, letters, "", "size", 1), [1, 0, 2, 3]);
  assert.deepEqual(chooseRows(layers, letters, "", "placement", 1), [1, 3, 2, 0]);
  assert.deepEqual(chooseRows(layers, letters, ".*", "name", 1), [], "no pattern, a text");
});

test("what all names begin with is left out, and two parts of each are left", () => {
  const prefixOf = (...names) => sharedPrefix(names.map((name) => ({ name })));
  assert.equal(prefixOf("diffusion_model.blocks.0", "diffusion_model.blocks.11", "(outside the blocks)"), "diffusion_model.");
  assert.equal(prefixOf("diffusion_model.double.0", "diffusion_model.single.0"), "diffusion_model.");
  const units = ["input.1.1.blocks.0", "middle.1.blocks.0"].map((name) => `diffusion_model.${name}`);
  assert.equal(prefixOf(...units), "diffusion_model.");
  assert.equal(prefixOf("blocks.0", "blocks.1"), "");
  assert.equal(prefixOf("a.b.0", "c.d.0"), "");
  assert.equal(prefixOf("(outside the blocks)"), "");
  assert.equal(prefixOf("", "x"), "");
  assert.equal(prefixOf(), "");
});

test("a layer is told whole", () => {
  const one = layerOf(layer(3, "mapped", { resident_bytes: 400, locked_bytes: 2048 }));
  const text = layerText(t, one, "m", "u");
  assert.equal(text, "diffusion_model.blocks.3, 1000 B, bfloat16: mapped, 40 % on the card, 2.00 KiB locked, in use. why");
});

test("receipts are told in bytes", () => {
  const held = (device_bytes, locked_bytes = 0) => ({ device_bytes, locked_bytes });
  const receipt = { ok: true, seconds: 0.06, models: [{ id: "m-1", changed: true, before: held(2 ** 30, 2 ** 20), after: held(0) }],
    machine: { after: { device_used_bytes: 3 * 2 ** 20 } } };
  const state = { device: { type: "cuda" }, models: [{ id: "m-1", held: { device: 2 ** 30 } }, { id: "vae", held: { device: 2 ** 20 } }] };
  assert.equal(receiptText(t, "sleep", receipt, state).text,
    "Freed 1.00 GiB of the card and 1.00 MiB of RAM in 0.06 s; 2.00 MiB belongs to other programs.");
  assert.equal(receiptText(t, "sleep", { ok: true, models: [] }, state).text, "Nothing was awake: nothing was freed.");
  const failed = receiptText(t, "sleep", { ok: false, message: "Not all of the card was." }, state);
  assert.deepEqual([failed.severity, failed.text], ["warn", "Not all of the card was."]);
  const woken = { ok: true, seconds: 1, models: [{ changed: true, before: held(0), after: held(2 ** 30) }] };
  assert.equal(receiptText(t, "wake", woken, state).text, "1.00 GiB are on the card again, after 1.00 s.");
  const cpu = { ...state, device: { type: "cpu" } };
  assert.equal(receiptText(t, "wake", woken, cpu).text, "1.00 GiB of RAM are in use again, after 1.00 s.");
  // ComfyUI's own models stay in RAM: there is no other place that they could leave.
  const [used, shelved] = [{ device_bytes: 2 ** 30, copied_bytes: 0 }, { device_bytes: 0, copied_bytes: 2 ** 30 }];
  const moved = (before, after) => ({ ok: true, seconds: 1, models: [{ changed: true, before, after }] });
  assert.equal(receiptText(t, "sleep", moved(used, shelved), cpu).text, "Freed 0 B of RAM in 1.00 s.");
  assert.equal(receiptText(t, "wake", moved(shelved, used), cpu).text, "0 B of RAM are in use again, after 1.00 s.");
  assert.equal(receiptText(t, "wake", { ok: true, models: [] }, state).text, "Nothing was asleep.");
  assert.equal(receiptText(t, "budget", { applied: "now" }, state).text, "The new budget is in force.");
});

test("a plan is told, and what is none is refused", () => {
  const layers = [layer(0, "resident"), layer(1, "mapped", { resident_bytes: 250 }),
    layer(2, "resident", { name: "(outside the blocks)" })];
  const raw = { fits: true, message: "", layers, changes: 1, planned: { device_bytes: 2000, activation_bytes: 0 } };
  assert.equal(planText(t, readPlan(raw, {})),
    "1 of 2 layers on the card whole, 750 B stream in each pass. 1 layer changes. Card 1.95 KiB and 0 B for activations; RAM 0 B.");
  const whole = { ...raw, layers: [layer(0, "resident", { resident_bytes: 1000 })], changes: 0 };
  assert.ok(planText(t, readPlan(whole, {})).startsWith("Everything is on the card; nothing streams. Nothing moves."));
  assert.equal(planText(t, readPlan({ fits: false, layers: [], message: "no" }, {})), "Too small: no");
  assert.throws(() => readPlan({ layers: [] }, {}), CourierError);
});

test("badges of nodes say what the model of their choice does", () => {
  const one = (loader, inputs, rest) => ({ ours: true, loader: { class: loader, inputs }, rest, engine: "loaded" });
  const [unet, clip] = ["CourierLoadDiffusionModel", "CourierLoadCLIP"];
  const state = {
    link: "live",
    models: [
      one(unet, { unet_name: "sub/a.safetensors" }, "awake"),
      one(unet, { unet_name: "sub/b.safetensors" }, "asleep"),
      one(clip, { clip_name: "a.safetensors", type: "wan" }, "asleep"),
    ],
  };
  assert.equal(badgeText(t, state, unet, { unet_name: "sub\\b.safetensors" }), "asleep");
  assert.equal(badgeText(t, state, unet, { unet_name: "sub/a.safetensors", budget: 1 }), "ready");
  assert.equal(badgeText(t, state, unet, { unet_name: "a.safetensors" }), "");
  assert.equal(badgeText(t, state, clip, { clip_name: "a.safetensors", type: "wan" }), "asleep");
  assert.equal(badgeText(t, state, clip, { clip_name: "a.safetensors", type: "sd3" }), "");
  assert.equal(badgeText(t, state, "CourierStatus"), "2 asleep");
  const offline = { ...state, link: "offline" };
  assert.equal(badgeText(t, offline, unet, { unet_name: "sub/a.safetensors" }), "");
});

test("every loader of Courier's has a badge", () => {
  assert.ok(["CourierLoadDiffusionModel", "CourierLoadVAE", "CourierStatus"].every(hasBadge));
  assert.ok(!["CLIPLoader", "CourierBudget", undefined].some(hasBadge));
});

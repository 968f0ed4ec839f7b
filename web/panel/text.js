// Words by key, in the language that ComfyUI is set to. Pure.
import en from "./text_en.js";
import zh from "./text_zh.js";

const LANGUAGES = { en, zh };

/** `t(key, values)` for a locale such as "zh-TW"; what is not translated is English. */
export function translator(locale) {
  const words = LANGUAGES[String(locale ?? "en").slice(0, 2)] ?? en;
  return (key, values = {}) => fill(words[key] ?? en[key] ?? key, values);
}

/** The word under `prefix.name` where there is one; else `name`, as the server says it. */
export function wordOr(t, prefix, name) {
  const key = `${prefix}.${name}`;
  const word = t(key);
  return word === key ? name : word;
}

function fill(text, values) {
  // One pass: a value that holds braces is not filled again.
  return text.replace(/\{(\w+)\}/g, (all, name) => String(values[name] ?? all));
}

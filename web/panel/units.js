// Bytes, rates and seconds as people read them. Pure.

const UNITS = [
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];
export const GIB = 2 ** 30;
const NONE = "–";

/** Bytes with three figures; a dash where nobody knows. */
export function sizeText(bytes) {
  if (!isNumber(bytes)) {
    return NONE;
  }
  for (const [size, name] of UNITS) {
    if (Math.abs(bytes) >= size * 0.9995) {
      return `${figure(bytes / size)} ${name}`;
    }
  }
  return `${Math.round(bytes)} B`;
}

/** Bytes a second. */
export function rateText(bytesPerSecond) {
  return `${sizeText(bytesPerSecond)}/s`;
}

/** A short time; never "0.00 s" for what took some. */
export function secondsText(seconds) {
  if (!isNumber(seconds)) {
    return NONE;
  }
  if (seconds > 0 && seconds < 0.01) {
    return "< 0.01 s";
  }
  return seconds < 10 ? `${seconds.toFixed(2)} s` : `${Math.round(seconds)} s`;
}

/** A share of a whole as a whole number of percent; what is not all is never 100 %. */
export function percentText(part, whole) {
  if (!isNumber(part) || !isNumber(whole) || whole <= 0) {
    return NONE;
  }
  const percent = Math.round((part / whole) * 100);
  return `${percent === 100 && part < whole ? 99 : percent} %`;
}

/** Bytes as a figure of GiB to type; rounded up, so that a smallest one still suffices. */
export function gibFigure(bytes) {
  return isNumber(bytes) ? String(Math.ceil((bytes / GIB) * 1000) / 1000) : "";
}

/**
 * What somebody typed: null for nothing (automatic), a number of GiB, or undefined where it is no
 * figure between `least` and `most`. A comma is a decimal point.
 */
export function parseGib(text, least, most) {
  const trimmed = text.trim().replace(",", ".");
  if (trimmed === "") {
    return null;
  }
  if (!/^\d+(\.\d*)?$|^\.\d+$/.test(trimmed)) {
    return undefined;
  }
  const value = Number(trimmed);
  return value >= least && value <= most ? value : undefined;
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function figure(value) {
  const digits = Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
  return value.toFixed(digits);
}

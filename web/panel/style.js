// How the panel looks. Colours of surfaces and text are ComfyUI's own; those of placements are in
// the middle between light and dark and lean towards the text, so that they stand out on both.
export const CSS = `
.courier-panel, .courier-refused {
  --courier-text: var(--fg-color, var(--p-text-color, CanvasText));
  --courier-soft: var(--descrip-text, var(--p-text-muted-color, GrayText));
  --courier-line: var(--border-color, color-mix(in srgb, var(--courier-text) 25%, transparent));
  --courier-field: var(--comfy-input-bg, Field);
  --courier-field-text: var(--input-text, FieldText);
  --courier-raised: color-mix(in srgb, var(--courier-text) 5%, transparent);
  --courier-hover: color-mix(in srgb, var(--courier-text) 12%, transparent);
  --courier-resident: color-mix(in srgb, #3d7fe0 86%, var(--courier-text));
  --courier-pinned: color-mix(in srgb, #20936a 86%, var(--courier-text));
  --courier-mapped: color-mix(in srgb, #7d8590 86%, var(--courier-text));
  --courier-pageable: color-mix(in srgb, #b0731d 86%, var(--courier-text));
  --courier-flight: var(--courier-text);
  --courier-bad: #d0453f;
  --courier-warn: var(--courier-pageable);
  --courier-bad-text: color-mix(in srgb, var(--courier-bad) 65%, var(--courier-text));
  box-sizing: border-box;
  color: var(--courier-text);
  font-size: 13px; line-height: 1.45; font-family: inherit;
  overflow-wrap: anywhere;
}
.courier-panel *, .courier-refused * { box-sizing: border-box; }
.courier-panel [hidden] { display: none !important; }
.courier-panel {
  container-type: inline-size;
  display: flex; flex-direction: column; gap: 12px;
  height: 100%; min-width: 0; padding: 12px; overflow-x: hidden; overflow-y: auto;
}
.courier-panel > * { flex: none; }
.courier-panel p, .courier-panel h3, .courier-panel h4, .courier-panel ul, .courier-panel dl,
.courier-refused p, .courier-refused h2 { margin: 0; padding: 0; }
.courier-panel ul { list-style: none; }
.courier-name { font-size: 14px; font-weight: 600; min-width: 0; }
.courier-subtitle { font-size: 13px; font-weight: 600; }
.courier-about, .courier-why, .courier-help, .courier-count, .courier-note, .courier-loading,
.courier-bar-figures, .courier-bar-key, .courier-legend, .courier-label {
  color: var(--courier-soft); font-size: 12px;
}
.courier-detail { font-size: 12px; }
.courier-aloud {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
}

.courier-notices { display: flex; flex-direction: column; gap: 8px; }
.courier-notices:not(:has(> :not([hidden]))) { display: none; }
.courier-notice {
  display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center;
  padding: 8px 10px; border: 1px solid var(--courier-line); border-left: 3px solid var(--courier-mapped);
  border-radius: 6px; background: var(--courier-raised);
}
.courier-notice-text { flex: 1 1 150px; min-width: 0; }
.courier-refused .courier-notice-text { flex: none; }
.courier-notice.courier-on-bad { border-left-color: var(--courier-bad); }
.courier-notice.courier-on-warn { display: block; border-left-color: var(--courier-warn); }
.courier-reasons { display: flex; flex-direction: column; gap: 4px; margin-top: 4px !important; font-size: 12px; }

.courier-machine { display: flex; flex-direction: column; gap: 10px; }
.courier-bar-head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 8px; }
.courier-bar-name { font-weight: 600; }
.courier-bar {
  position: relative; display: flex; height: 10px; margin: 4px 0; overflow: hidden;
  border-radius: 5px; background: var(--courier-hover);
}
.courier-bar-part { height: 100%; min-width: 0; transition: width 0.2s; }
.courier-of-us { background: var(--courier-resident); }
.courier-of-core {
  background: repeating-linear-gradient(90deg, var(--courier-pinned) 0 4px, transparent 4px 6px);
}
.courier-of-others {
  background: repeating-linear-gradient(135deg, var(--courier-mapped) 0 3px, transparent 3px 5px);
}
.courier-bar-line {
  position: absolute; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: var(--courier-text);
}
.courier-bar-key, .courier-legend { display: flex; flex-wrap: wrap; gap: 2px 12px; }
.courier-key { display: inline-flex; align-items: center; gap: 5px; }
.courier-swatch { width: 10px; height: 10px; border-radius: 2px; flex: none; }
.courier-swatch.courier-of-line { width: 2px; background: var(--courier-text); }

.courier-toolbar { display: flex; flex-direction: column; gap: 6px; }
.courier-buttons { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
.courier-button {
  min-height: 28px; padding: 3px 10px; border: 1px solid var(--courier-line); border-radius: 6px;
  background: transparent; color: var(--courier-text); font: inherit; cursor: pointer;
}
.courier-button:hover { background: var(--courier-hover); color: var(--courier-text); }
.courier-button.courier-is-main { border-color: var(--courier-resident); box-shadow: inset 0 0 0 1px var(--courier-resident); }
.courier-button.courier-is-quiet { padding: 3px 4px; border-color: transparent; text-decoration: underline; text-underline-offset: 3px; text-decoration-color: var(--courier-line); }
.courier-button[aria-disabled="true"] {
  border-style: dashed; background: transparent; color: var(--courier-soft); box-shadow: none; cursor: not-allowed;
}
.courier-input {
  min-width: 0; min-height: 28px; padding: 3px 8px; border: 1px solid var(--courier-line);
  border-radius: 6px; background: var(--courier-field); color: var(--courier-field-text); font: inherit;
}
.courier-input::placeholder { color: var(--courier-soft); opacity: 1; }
.courier-input[aria-invalid="true"] { border-color: var(--courier-bad); }
.courier-panel :focus-visible, .courier-refused :focus-visible {
  outline: 2px solid var(--courier-resident); outline-offset: 1px;
}

.courier-order {
  display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; padding: 8px 10px;
  border: 1px solid var(--courier-line); border-radius: 6px;
}
.courier-order-text { flex: 1 1 160px; }
.courier-progress {
  flex: 1 1 80px; width: 80px; height: 6px; appearance: none; border: 0; border-radius: 3px;
  overflow: hidden; background: var(--courier-hover); color: var(--courier-resident);
}
.courier-progress::-webkit-progress-bar { background: var(--courier-hover); }
.courier-progress::-webkit-progress-value { background: var(--courier-resident); }
.courier-progress::-moz-progress-bar { background: var(--courier-resident); }
.courier-progress:indeterminate {
  background: repeating-linear-gradient(135deg, var(--courier-resident) 0 6px, transparent 6px 12px);
}
.courier-progress:indeterminate::-webkit-progress-bar { background: transparent; }
.courier-card > div:empty { display: none; }

.courier-cards { display: flex; flex-direction: column; gap: 10px; }
.courier-card {
  display: flex; flex-direction: column; gap: 8px; min-width: 0; padding: 10px;
  border: 1px solid var(--courier-line); border-radius: 8px; background: var(--courier-raised);
}
.courier-head { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: baseline; justify-content: space-between; }
.courier-head .courier-name {
  flex: 1 1 auto; max-width: 100%; display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; overflow: hidden;
}
.courier-state { display: inline-flex; gap: 6px; align-items: center; font-size: 12px; white-space: nowrap; }
.courier-state::before {
  content: ""; width: 9px; height: 9px; border-radius: 50%; border: 2px solid var(--courier-pinned);
  background: var(--courier-pinned);
}
.courier-on-running::before { border-radius: 1px; border-color: var(--courier-resident); background: var(--courier-resident); rotate: 45deg; }
.courier-on-asleep::before, .courier-on-unloaded::before { border-color: var(--courier-mapped); background: transparent; }
.courier-on-asleep::before { border-left-color: transparent; rotate: 45deg; }
.courier-on-falling::before, .courier-on-waking::before, .courier-on-loading::before, .courier-on-unloading::before {
  border-color: var(--courier-resident); border-right-color: transparent; background: transparent;
}
.courier-on-failed::before { border-radius: 0; border-color: var(--courier-bad); background: var(--courier-bad); }
.courier-problem { color: var(--courier-bad-text); }
.courier-facts { display: grid; grid-template-columns: minmax(4.2em, max-content) 1fr; gap: 2px 10px; font-size: 12px; }
.courier-facts dt { color: var(--courier-soft); }
.courier-facts dd { margin: 0; font-variant-numeric: tabular-nums; }

.courier-strip {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(9px, 1fr)); gap: 2px; border-radius: 3px;
}
.courier-strip.courier-is-few { display: flex; }
.courier-is-few .courier-cell { flex: 0 1 34px; }
.courier-strip-frame { position: relative; }
.courier-panel .courier-detail {
  position: absolute; inset: calc(100% + 6px) 0 auto 0; z-index: 2; padding: 6px 8px;
  border: 1px solid var(--courier-line); border-radius: 6px; color: var(--courier-text);
  background: var(--comfy-menu-bg, var(--bg-color, Canvas)); box-shadow: 0 4px 14px rgb(0 0 0 / 30%);
  pointer-events: none;
}
.courier-cell {
  position: relative; height: 16px; min-width: 0; max-width: 34px; border-radius: 2px;
  border: 1px solid var(--courier-cell-line); overflow: hidden;
  --courier-cell-line: var(--courier-mapped); --courier-cell-fill: none;
  background: var(--courier-cell-fill);
}
.courier-cell::before {
  content: ""; position: absolute; inset: auto 0 0 0; height: var(--courier-part, 0%);
  background: var(--courier-resident);
}
.courier-is-resident { --courier-cell-line: var(--courier-resident); --courier-cell-fill: var(--courier-resident); }
.courier-is-pinned {
  --courier-cell-line: var(--courier-pinned);
  --courier-cell-fill: repeating-linear-gradient(135deg, var(--courier-pinned) 0 3px, transparent 3px 5px);
}
.courier-is-mapped { --courier-cell-line: var(--courier-mapped); }
.courier-is-pageable {
  --courier-cell-line: var(--courier-pageable);
  --courier-cell-fill: repeating-linear-gradient(0deg, var(--courier-pageable) 0 2px, transparent 2px 4px);
}
.courier-is-flight::after {
  content: ""; position: absolute; inset: 0; margin: auto; width: 0; height: 0;
  border: 4px solid transparent; border-bottom: 6px solid var(--courier-flight); border-top: 0;
}
.courier-is-flight { border-color: var(--courier-flight); }
.courier-is-new { outline: 2px solid var(--courier-warn); outline-offset: -1px; }
.courier-is-active { outline: 2px solid var(--courier-text); outline-offset: 1px; }
.courier-key .courier-cell { width: 12px; height: 12px; flex: none; }

.courier-table-view { container: courier-table / inline-size; display: flex; flex-direction: column; gap: 6px; }
.courier-search { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: center; }
.courier-search .courier-input { flex: 1 1 120px; }
.courier-table-frame {
  max-height: 360px; overflow: auto; border: 1px solid var(--courier-line); border-radius: 6px;
  background: var(--bg-color, Canvas);
}
.courier-table { width: 100%; border-collapse: collapse; font-size: 12px; overflow-wrap: normal; }
.courier-table th, .courier-table td { padding: 3px 6px; text-align: left; vertical-align: top; font-weight: 400; }
.courier-table thead th { position: sticky; top: 0; z-index: 2; padding: 0; background: var(--bg-color, Canvas); }
.courier-table tbody tr { content-visibility: auto; contain-intrinsic-size: auto 24px; }
.courier-table tbody tr { background: var(--courier-row, transparent); }
.courier-table tbody tr:nth-child(odd) { --courier-row: var(--courier-raised); }
.courier-table .courier-of-name {
  position: sticky; left: 0; z-index: 1; min-width: 64px; overflow-wrap: anywhere;
  background: linear-gradient(var(--courier-row, transparent) 0 0), var(--bg-color, Canvas);
}
.courier-table thead .courier-of-name { z-index: 3; }
.courier-table .courier-of-size, .courier-table .courier-of-resident { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.courier-table .courier-of-reason { min-width: 120px; }
.courier-below { display: none; color: color-mix(in srgb, var(--courier-soft) 50%, var(--courier-text)); font-size: 11px; }
@container courier-table (max-width: 519px) {
  .courier-table :is(.courier-of-size, .courier-of-dtype, .courier-of-reason) { display: none; }
  .courier-below { display: block; }
}
@container courier-table (max-width: 229px) {
  .courier-table .courier-of-resident { display: none; }
}
.courier-sort { width: 100%; padding: 3px 6px; border: 0; border-radius: 0; background: transparent; color: inherit; text-align: left; font-weight: 600; }
th[aria-sort="ascending"] .courier-sort::after { content: " \\2191"; }
th[aria-sort="descending"] .courier-sort::after { content: " \\2193"; }

.courier-budget { display: flex; flex-direction: column; gap: 8px; padding-top: 8px; border-top: 1px solid var(--courier-line); }
.courier-fields { display: flex; flex-wrap: wrap; gap: 8px 12px; }
.courier-field { display: flex; flex-direction: column; gap: 3px; flex: 1 1 120px; min-width: 0; }
.courier-plan { min-height: 2.9em; font-size: 12px; }
.courier-plan[data-kind="bad"] { color: var(--courier-bad-text); }
.courier-empty { display: flex; flex-direction: column; gap: 4px; padding: 24px 8px; text-align: center; }

.courier-float { position: fixed; right: 16px; bottom: 64px; z-index: 10000; max-width: min(380px, calc(100vw - 32px)); }
.courier-refused {
  display: flex; flex-direction: column; gap: 8px; padding: 14px; border: 1px solid var(--courier-line);
  border-left: 3px solid var(--courier-warn); border-radius: 8px; background: var(--comfy-menu-bg, Canvas);
  box-shadow: 0 6px 24px rgb(0 0 0 / 35%);
}

@media (prefers-reduced-motion: no-preference) {
  .courier-is-flight::after { animation: courier-flight 0.9s ease-in-out infinite alternate; }
  .courier-on-falling::before, .courier-on-waking::before, .courier-on-loading::before, .courier-on-unloading::before {
    animation: courier-turn 1s linear infinite;
  }
}
@media (prefers-reduced-motion: reduce) { .courier-bar-part { transition: none; } }
@media (forced-colors: active) {
  .courier-cell, .courier-bar-part, .courier-swatch, .courier-state::before { forced-color-adjust: none; }
}
@keyframes courier-flight { from { translate: 0 1.5px; } to { translate: 0 -1.5px; } }
@keyframes courier-turn { to { rotate: 360deg; } }
`;

// Values for tests of the panel.

export function layer(index, placement = "mapped", more = {}) {
  return {
    name: `diffusion_model.blocks.${index}`, bytes: 1000, resident_bytes: placement === "resident" ? 1000 : 0, locked_bytes: 0, placement,
    in_place: false, reason: "why", state: "absent", dtypes: ["bfloat16"], ...more,
  };
}

export function model(more = {}) {
  return {
    id: "m-1", name: "wan", file: "wan.safetensors", state: "loaded",
    budgets: { device_bytes: 4000, host_bytes: null },
    asked: { device_bytes: 4000, host_bytes: null, shared: false, by: "node", waits: false },
    measured: { device_bytes: 2000, device_peak_bytes: 2500, activation_peak_bytes: null,
      host_locked_bytes: 10, host_copied_bytes: 20, host_locked_copy_bytes: 5, host_staging_bytes: 30 },
    notes: [], streamable_layers: 2, traffic: { shipped_bytes: 0 },
    layers: [layer(0, "resident"), layer(1)], ...more,
  };
}

export function status(models = [model()], more = {}) {
  return { version: "0.1.0", boot_id: "boot", device: { type: "cuda", total_bytes: 10000, free_bytes: 5000 },
    host: { total_bytes: 20000, available_bytes: 15000, limit_bytes: 20000 }, models, notes: [], ...more };
}

export function entry(id, more = {}) {
  return { id, name: id, kind: "VAE", state: "awake", level: null, on_use: null, problem: "",
    held: { device_bytes: 300, locked_bytes: 0, copied_bytes: 0, staging_bytes: 0 }, ...more };
}

export function list(models = [entry("m-1", { kind: "diffusion model" })], more = {}) {
  return { models, last_order: null, orders: [], busy: false, ...more };
}

export function event(more = {}, of = {}) {
  return { boot_id: "boot", orders: [], orders_done: 0, loaded: 1, asleep: 0, busy: false,
    models: [{ id: "m-1", state: "running", rest: "awake", placements: "rm", activity: "yu", plan: 1,
      measured: { device_bytes: 2200 }, traffic: { shipped_bytes: 5000 }, ...of }], ...more };
}

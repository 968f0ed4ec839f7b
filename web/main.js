// The only module here that acts on import; ComfyUI imports every .js of this folder.
import { app } from "../../scripts/app.js";
import { addStatusText } from "./status_text.js";

// The server reads both from ComfyUI's file of settings (nodes/idle.py).
const settings = [
  {
    id: "Courier.IdleSleepMinutes",
    category: ["Courier", "Sleep", "Minutes"],
    name: "Idle sleep: after so many minutes without a prompt (0: never)",
    tooltip: "All models go to sleep; the next prompt that needs one wakes it. Looking at the status does not count as use.",
    type: "number",
    attrs: { min: 0, max: 1440, step: 1 },
    defaultValue: 0,
  },
  {
    id: "Courier.IdleSleepLevel",
    category: ["Courier", "Sleep", "Level"],
    name: "Idle sleep: level (1 keeps what models hold in RAM, 2 gives that back too)",
    tooltip: "Of the sleep after so many idle minutes.",
    type: "combo",
    options: ["1", "2"],
    defaultValue: "1",
  },
];

const WITH_TEXT = new Set(["CourierStatus", "CourierSleepModel", "CourierWakeModel"]);

const extension = {
  name: "courier.status",
  settings,
  nodeCreated(node) {
    if (WITH_TEXT.has(node.comfyClass)) {
      addStatusText(node);
    }
  },
};

try {
  app.registerExtension(extension);
} catch (error) {
  // Two copies of the pack: the first one serves the nodes of both.
  console.warn(`Courier: ${error.message}; is the pack installed twice?`);
}

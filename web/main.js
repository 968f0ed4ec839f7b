// The only module here that acts on import; ComfyUI imports every .js of this folder.
import { app } from "../../scripts/app.js";
import { addStatusText } from "./status_text.js";

// The server reads both from ComfyUI's file of settings (nodes/idle.py).
const settings = [
  {
    id: "Courier.IdleSleepMinutes",
    category: ["Courier", "Sleep", "Minutes"],
    name: "Put all models to sleep after so many minutes without a prompt (0: never)",
    tooltip: "The next prompt that needs one wakes it. Looking at the status does not count as use.",
    type: "number",
    attrs: { min: 0, max: 1440, step: 1 },
    defaultValue: 0,
  },
  {
    id: "Courier.IdleSleepLevel",
    category: ["Courier", "Sleep", "Level"],
    name: "How deeply they sleep then (1 keeps what they hold in RAM, 2 gives it back too)",
    type: "combo",
    options: ["1", "2"],
    defaultValue: "1",
  },
];

const extension = {
  name: "courier.status",
  settings,
  nodeCreated(node) {
    if (node.comfyClass === "CourierStatus") {
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

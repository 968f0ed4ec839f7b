// The only module here that acts on import; ComfyUI imports every .js of this folder.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { CourierApp } from "./panel/app.js";
import { KEYBINDINGS, MENU, SETTINGS, commandsOf } from "./panel/settings.js";
import { addStatusText } from "./status_text.js";

const WITH_TEXT = new Set(["CourierStatus", "CourierSleepModel", "CourierWakeModel"]);

const courier = new CourierApp(app, api);

const extension = {
  name: "courier.status",
  settings: SETTINGS,
  commands: commandsOf(courier),
  keybindings: KEYBINDINGS,
  menuCommands: MENU,
  setup() {
    courier.setup();
  },
  nodeCreated(node) {
    if (WITH_TEXT.has(node.comfyClass)) {
      addStatusText(node);
    }
    courier.nodeCreated(node);
  },
};

try {
  app.registerExtension(extension);
} catch (error) {
  // Two copies of the pack: the first one serves the nodes of both.
  console.warn(`Courier: ${error.message}; is the pack installed twice?`);
}

// The only module here that acts on import; ComfyUI imports every .js of this folder.
import { app } from "../../scripts/app.js";
import { addStatusText } from "./status_text.js";

const extension = {
  name: "courier.status",
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

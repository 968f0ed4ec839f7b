// ComfyUI's own things, by its official door: settings, dialogs, toasts, commands, the sidebar.
const TOAST_MS = 8000;

export class Comfy {
  constructor(app) {
    this.app = app;
  }

  get manager() {
    return this.app.extensionManager;
  }

  setting(id, otherwise) {
    return this.manager?.setting?.get(id) ?? otherwise;
  }

  /** Ask the user; resolves to whether it was confirmed. */
  async confirm(title, message) {
    return (await this.manager.dialog.confirm({ title, message })) === true;
  }

  toast(severity, summary, detail) {
    this.manager.toast.add({ severity, summary, detail, life: TOAST_MS });
  }

  execute(command) {
    return this.manager.command.execute(command);
  }

  registerSidebarTab(tab) {
    this.manager.registerSidebarTab(tab);
  }

  /** On a tab's icon; "" for none. The list that ComfyUI gives is the one that it draws. */
  showBadge(tabId, text) {
    const tab = this.manager.getSidebarTabs?.().find((one) => one.id === tabId);
    const badge = text || null;
    if (tab && (tab.iconBadge ?? null) !== badge) {
      tab.iconBadge = badge;
    }
  }

  redraw() {
    this.app.graph?.setDirtyCanvas(true, true);
  }
}

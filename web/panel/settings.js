// What ComfyUI's settings dialog shows of Courier, and its commands. Values only; the texts in other
// languages are in locales/.
export const POLL = "Courier.PollSeconds";
export const CONFIRM = "Courier.ConfirmSleepAll";

// The server reads those of sleep and of budgets from ComfyUI's file of settings.
export const SETTINGS = [
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
  {
    id: CONFIRM,
    category: ["Courier", "Sleep", "Confirm"],
    name: "Ask before all models are put to sleep",
    tooltip: "In the panel, and for the command.",
    type: "boolean",
    defaultValue: true,
  },
  {
    id: "Courier.DefaultVramGib",
    category: ["Courier", "Budget", "Card"],
    name: "Default budget: GiB of the card (0: automatic)",
    tooltip: "For Courier loaders without a Courier Budget, the next time that they run.",
    type: "number",
    attrs: { min: 0, max: 1024, step: 0.25, maxFractionDigits: 3 },
    defaultValue: 0,
  },
  {
    id: "Courier.DefaultHostGib",
    category: ["Courier", "Budget", "RAM"],
    name: "Default budget: GiB of RAM (-1: automatic, 0 locks nothing)",
    tooltip: "For Courier loaders without a Courier Budget, the next time that they run.",
    type: "number",
    attrs: { min: -1, max: 4096, step: 0.25, maxFractionDigits: 3 },
    defaultValue: -1,
  },
  {
    id: POLL,
    category: ["Courier", "Panel", "Poll"],
    name: "Panel: seconds between two looks at the server",
    tooltip: "While the panel is open. What happens in between comes by itself, where the connection allows it.",
    type: "number",
    attrs: { min: 1, max: 120, step: 1 },
    defaultValue: 5,
  },
];

/** Commands over the actions of an app. */
export function commandsOf(courier) {
  return [
    {
      id: "Courier.SleepAll",
      label: "Courier: put all models to sleep",
      icon: "pi pi-moon",
      function: () => courier.actions.sleep(null),
    },
    {
      id: "Courier.WakeAll",
      label: "Courier: wake all models",
      icon: "pi pi-sun",
      function: () => courier.actions.wake(null),
    },
    {
      id: "Courier.CancelOrders",
      label: "Courier: cancel what waits",
      icon: "pi pi-times",
      function: () => courier.actions.cancel(),
    },
  ];
}

export const KEYBINDINGS = [
  { combo: { key: "s", alt: true, shift: true }, commandId: "Courier.SleepAll" },
  { combo: { key: "w", alt: true, shift: true }, commandId: "Courier.WakeAll" },
];

export const MENU = [
  { path: ["Courier"], commands: ["Courier.SleepAll", "Courier.WakeAll", "Courier.CancelOrders"] },
];

// What a render and 1,000 updates of 300 layers cost; evaluated in the page by test_panel_growth.py.
async ([url, tries]) => {
  const status = await (await fetch('/api/courier/v1/status')).json();
  const list = await (await fetch('/api/courier/v1/models')).json();
  const { Panel } = await import(new URL('panel/panel.js', url));
  const { initialState, withStatus, withEvent } = await import(new URL('panel/state.js', url));
  const { translator } = await import(new URL('panel/text.js', url));
  const nothing = () => {};
  const actions = { level: 1, said: '', pending: [], refresh: nothing };
  const doors = { actions, clock: { set: nothing, clear: nothing }, retry: nothing,
    reload: nothing, acknowledge: nothing };
  const first = [], updates = [];
  const root = document.createElement('div');
  root.style.cssText = 'position: fixed; inset: 0 auto 0 0; width: 600px; z-index: 5000';
  document.body.append(root);
  let panel = null, state = null;
  for (let run = 0; run < tries; run += 1) {
    panel?.destroy();
    const started = performance.now();
    state = withStatus(initialState(), status, list, 0);
    panel = new Panel(root, translator('en'), doors);
    panel.update(state);
    root.getBoundingClientRect();
    first.push(performance.now() - started);
  }
  const [model] = state.models;
  const nodes = root.getElementsByTagName('*').length;
  const heap = [];
  for (let run = 0; run < 1000; run += 1) {
    const at = run % model.layers.length;
    const activity = [...model.activity].map((_, i) => (i === at ? 'u' : i === at + 1 ? 'l' : '.'));
    const news = { id: model.id, state: 'running', rest: 'awake', placements: model.placements,
      activity: activity.join(''), plan: 1, measured: status.models[0].measured,
      traffic: { shipped_bytes: run * 1e9 } };
    const event = { boot_id: status.boot_id, models: [news], orders: [], orders_done: 0, loaded: 1,
      busy: true };
    const started = performance.now();
    [state] = withEvent(state, event, run * 0.2);
    panel.update(state);
    root.getBoundingClientRect();
    updates.push(performance.now() - started);
  }
  const after = root.getElementsByTagName('*').length;
  panel.destroy();
  root.remove();
  return { first, updates, nodes, after, left: root.childNodes.length };
}

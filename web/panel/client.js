// Requests to Courier's routes. Every failure is one CourierError that says what kind it is.

const READ_SECONDS = 20;

export const KINDS = Object.freeze({
  OFFLINE: "offline", // nobody answered, or not in time
  ABSENT: "absent", // there is no such route: no Courier, or an older one
  GARBAGE: "garbage", // an answer that is no JSON of ours
  REFUSED: "refused", // our own error, with a code and a sentence
  ABORTED: "aborted", // this side gave up
});

export class CourierError extends Error {
  constructor(kind, message, { status = 0, code = "", body = null } = {}) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.code = code;
    this.body = body;
  }
}

export class Client {
  /**
   * `fetchApi` is ComfyUI's own: it knows where the server is. `clientId()` is that of the websocket
   * which is to get events.
   */
  constructor(fetchApi, clientId = () => "", readSeconds = READ_SECONDS) {
    this.fetchApi = fetchApi;
    this.clientId = clientId;
    this.readSeconds = readSeconds;
  }

  status(signal) {
    return this.get("status", signal);
  }

  models(signal) {
    return this.get("models", signal);
  }

  /** An order may take as long as the queue: there is no limit of time. */
  sleep(body) {
    return this.post("sleep", body);
  }

  wake(body) {
    return this.post("wake", body);
  }

  cancel() {
    return this.post("cancel", {});
  }

  plan(body, signal) {
    return this.post("plan", body, signal);
  }

  budget(body) {
    return this.post("budget", body);
  }

  async get(name, signal) {
    const timeout = AbortSignal.timeout(this.readSeconds * 1000);
    const both = signal ? AbortSignal.any([signal, timeout]) : timeout;
    const id = this.clientId();
    const headers = id ? { "Courier-Client": id } : {};
    return this.ask(name, { cache: "no-store", headers, signal: both }, signal);
  }

  post(name, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    return this.ask(name, options, signal);
  }

  async ask(name, options, signal) {
    let answer, text;
    try {
      answer = await this.fetchApi(`/courier/v1/${name}`, options);
      text = await answer.text();
    } catch (error) {
      const kind = signal?.aborted ? KINDS.ABORTED : KINDS.OFFLINE;
      throw new CourierError(kind, String(error?.message ?? error));
    }
    return readAnswer(answer.status, answer.ok, text);
  }
}

/** The object that an answer is. Throws: CourierError. */
export function readAnswer(status, ok, text) {
  const body = parse(text);
  const fault = body?.error;
  if (!ok && typeof fault?.message === "string" && typeof fault.code === "string") {
    throw new CourierError(KINDS.REFUSED, fault.message, { status, code: fault.code, body });
  }
  if (status === 404 || status === 405) {
    throw new CourierError(KINDS.ABSENT, `HTTP ${status}`, { status });
  }
  if (!ok || body === null || typeof body !== "object" || Array.isArray(body)) {
    throw new CourierError(KINDS.GARBAGE, `HTTP ${status}`, { status });
  }
  return body;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

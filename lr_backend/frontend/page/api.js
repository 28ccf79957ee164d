// One question to /v1/chat/completions, and the events of its answer.

/** What the server said instead of an answer; `error` is the document's own. */
export class Refused extends Error {
  constructor(error) {
    super(error.message);
    this.error = error;
  }
}

/** The chunks of a streamed answer. Aborting `signal` ends the request, and with it every call behind it. */
export async function* ask(body, key, signal) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) {
    throw new Refused(await refusal(response));
  }
  for await (const { kind, data } of events(response.body)) {
    if (kind === "error") {
      throw new Refused(JSON.parse(data).error);
    }
    if (data === "[DONE]") {
      return;
    }
    yield JSON.parse(data);
  }
  throw new Error("the answer broke off before its end");
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error ?? { message: text };
  } catch {
    return { message: text || response.statusText, code: String(response.status) }; // a gateway's
  }
}

/** Server-sent events, as they come in whatever pieces. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      return;
    }
    const blocks = (waiting + value).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      yield event(block);
    }
  }
}

function event(block) {
  const lines = block.split("\n");
  const said = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2));
  return { kind: said("event")[0] ?? "message", data: said("data").join("\n") };
}

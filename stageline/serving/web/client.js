// Talks to the server: the list of models, and answers piece by piece. Knows nothing of the page.

import { say } from "./words.js";

/** What went wrong, in the server's words where it had any. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The models that the server names. */
export async function listModels(key) {
  const response = await send("v1/models", { headers: headers(key) });
  const { data } = await response.json();
  if (!data?.length) throw new ServerError(say("noModels"));
  return data;
}

/** The chunks of one answer, as they come. Aborting the signal closes the connection. */
export async function* streamChat(body, { key, signal }) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(messageOf(chunk) ?? data);
    yield chunk;
  }
  throw new ServerError(say("broken"));
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(say("unreachable", error.message));
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new ServerError(
    messageOf(content) ?? say("status", `${response.status} ${response.statusText}`),
    response.status,
  );
}

function messageOf(content) {
  const found = content?.error?.message ?? content?.error ?? content?.detail;
  return typeof found === "string" ? found : undefined;
}

/** The data of server-sent events; a piece from the network may end anywhere, also in a character. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading early closes the connection
  }
}

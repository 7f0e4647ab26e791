// What is set for all answers. Kept for this tab only: the key must not outlive it.

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "system", "stop-strings", "key", "model"];
const field = (id) => document.getElementById(id);

/** Fills the fields with what this tab had, and keeps what is typed. */
export function keepSettings() {
  for (const id of KEPT) {
    const kept = sessionStorage.getItem(`stageline.${id}`);
    if (kept !== null && id !== "model") field(id).value = kept;
    field(id).addEventListener("input", () => {
      sessionStorage.setItem(`stageline.${id}`, field(id).value);
    });
  }
}

export const apiKey = () => field("key").value.trim();
export const keptModel = () => sessionStorage.getItem("stageline.model");

/** The fields of a request body; what is empty is left to the server. */
export function requestFields() {
  const fields = {};
  for (const id of NUMBERS) {
    const value = field(id).valueAsNumber;
    if (!Number.isNaN(value)) fields[id] = value;
  }
  const lines = field("stop-strings").value.split("\n").filter((line) => line !== "");
  const stop = lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  return stop.length ? { ...fields, stop } : fields;
}

/** The system message, as messages. */
export function systemMessages() {
  const content = field("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

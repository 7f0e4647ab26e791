// What is set for all answers. Kept for this tab only: the key must not outlive it.

import { say } from "./words.js";

const NUMBERS = {
  temperature: { least: 0, most: 2 },
  top_p: { above: 0, most: 1 },
  max_tokens: { least: 1, isWhole: true }, // at most what the server takes
  seed: { least: 0, most: Number.MAX_SAFE_INTEGER, isWhole: true },
};
const CHECKS = {
  ...Object.fromEntries(Object.keys(NUMBERS).map((id) => [id, () => wrongNumber(id)])),
  "stop-strings": wrongStops,
  key: () => (/^[\x21-\x7e]*$/.test(apiKey()) ? "" : say("badKey")), // a header takes no other letters
};
const MOST_STOPS = 16; // as the server has it
const LONGEST_STOP = 1000;
const KEPT = [...Object.keys(CHECKS), "system", "model"];
const field = (id) => document.getElementById(id);

/** Fills the fields with what this tab had, keeps what is typed, and makes room for what is wrong. */
export function keepSettings() {
  for (const id of KEPT) {
    const kept = sessionStorage.getItem(`stageline.${id}`);
    if (kept !== null && id !== "model") field(id).value = kept;
    field(id).addEventListener("input", () => {
      sessionStorage.setItem(`stageline.${id}`, field(id).value);
      if (id in CHECKS) check(id);
    });
  }
  for (const id of Object.keys(CHECKS)) {
    const told = document.createElement("p");
    told.id = `${id}-wrong`;
    told.className = "wrong";
    told.setAttribute("role", "alert");
    field(id).after(told);
    const others = field(id).getAttribute("aria-describedby");
    field(id).setAttribute("aria-describedby", [told.id, others].filter(Boolean).join(" "));
  }
}

/** Shows the server's values where nothing is set, and knows its limits from now on. */
export function showServer({ id, stageline = {} }) {
  const { max_length: length, max_tokens: most, default_max_tokens, default_temperature } = stageline;
  const limits = [length, most].filter(Number.isFinite);
  NUMBERS.max_tokens.most = limits.length ? Math.min(...limits) : undefined;
  const defaults = { temperature: default_temperature, max_tokens: default_max_tokens };
  for (const [name, value] of Object.entries(defaults)) {
    field(name).placeholder = Number.isFinite(value) ? say("serverValue", value) : say("serverOwn");
  }
  const parts = [say("modelIs", id)];
  if (Number.isFinite(length)) parts.push(say("lengthIs", length));
  if (limits.length) parts.push(say("mostIs", NUMBERS.max_tokens.most));
  field("server-values").textContent = parts.join(" ");
  checkAll();
}

/** Checks the fields, says beside each what is wrong; the first wrong field, if there is one. */
export function checkAll() {
  return Object.keys(CHECKS).filter((id) => !check(id)).map(field)[0];
}

function check(id) {
  const wrong = CHECKS[id]();
  field(`${id}-wrong`).textContent = wrong;
  field(id).setAttribute("aria-invalid", String(wrong !== ""));
  return wrong === "";
}

function wrongNumber(id) {
  const { least, above, most, isWhole } = NUMBERS[id];
  const value = field(id).valueAsNumber;
  if (field(id).validity.badInput) return say("noNumber");
  if (Number.isNaN(value)) return ""; // empty
  if (isWhole && !Number.isInteger(value)) return say("noWholeNumber");
  if (value <= above) return say("notAbove", value, above);
  if (value < least) return say("tooSmall", value, least);
  return value > most ? say("tooLarge", value, most) : "";
}

function wrongStops() {
  const stops = stopStrings();
  if (stops.length > MOST_STOPS) return say("tooManyStops", stops.length, MOST_STOPS);
  const longest = Math.max(0, ...stops.map((stop) => stop.length));
  return longest > LONGEST_STOP ? say("longStop", longest, LONGEST_STOP) : "";
}

export const apiKey = () => field("key").value.trim();
export const keptModel = () => sessionStorage.getItem("stageline.model");

function stopStrings() {
  const lines = field("stop-strings").value.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
}

/** The fields of a request body; what is empty is left to the server. */
export function requestFields() {
  const fields = {};
  for (const id of Object.keys(NUMBERS)) {
    const value = field(id).valueAsNumber;
    if (!Number.isNaN(value)) fields[id] = value;
  }
  const stop = stopStrings();
  return stop.length ? { ...fields, stop } : fields;
}

/** The system message, as messages. */
export function systemMessages() {
  const content = field("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

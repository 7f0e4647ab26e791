// The conversation on this machine: a reload brings it back, pictures too. Nothing goes to the server.

const MOST_CONVERSATIONS = 5; // one a tab; older ones are forgotten
const NAME = "conversations";
const ID = "stageline.conversation"; // in the tab: two tabs have two conversations

/** The turns of this tab's conversation; in a new tab those of the last one. */
export async function keptTurns() {
  const all = await within("readonly", (store) => store.getAll());
  all.sort((one, other) => other.at - one.at);
  for (const { id } of all.slice(MOST_CONVERSATIONS)) await within("readwrite", (store) => store.delete(id));
  const own = sessionStorage.getItem(ID);
  const found = own ? all.find(({ id }) => id === own) : all[0];
  return found?.turns ?? [];
}

/** Keeps turns in place of this tab's earlier ones; none: forgets them. */
export async function keepTurns(turns) {
  const id = sessionStorage.getItem(ID) ?? `${Date.now()}.${Math.random()}`;
  sessionStorage.setItem(ID, id);
  const write = (store) => (turns.length ? store.put({ id, at: Date.now(), turns }) : store.delete(id));
  await within("readwrite", write);
}

/** Forgets the conversations of all tabs. */
export const forgetAll = () => within("readwrite", (store) => store.clear());

let opened = null; // kept open: what is written as the page goes must not wait

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("stageline", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(NAME, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  opened.catch(() => (opened = null));
  return opened;
}

async function within(mode, act) {
  const transaction = (await open()).transaction(NAME, mode);
  const asked = act(transaction.objectStore(NAME));
  transaction.commit(); // at once: the page may be going
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error ?? asked.error);
  });
}

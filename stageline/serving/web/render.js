// A model's Markdown -> DOM nodes. The text is never trusted: markup in it stays text, and what the
// libraries make of it passes DOMPurify, whose policy is the only one that the page's headers allow.

import "./vendor/katex.min.js";
import "./vendor/markdown-it.umd.min.js";
import "./vendor/purify.min.js";
import hljs from "./vendor/highlight.min.js";
import { tex } from "./vendor/mdit-plugin-tex.js";
import { copyOf, say } from "./words.js";

const { DOMPurify, katex, markdownit } = globalThis;
const MOST_LETTERS = 300_000; // of an answer; a longer one is shown as it is
const MOST_COLOURED = 50_000; // letters of one piece of code
const SAFE_URL = /^(?:https?:|mailto:)/i;
const TAGS = `p br hr h4 h5 h6 ul ol li blockquote table thead tbody tr th td pre code span strong em s a
  math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup mover munder munderover mtable mtr
  mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts`;
const ATTRIBUTES = `href class start align colspan display displaystyle scriptlevel mathvariant mathcolor
  mathbackground mathsize stretchy fence separator symmetric accent accentunder lspace rspace minsize maxsize
  movablelimits largeop linethickness width height depth voffset columnalign columnspacing columnlines
  rowspacing rowlines rowalign notation`;
const CLEAN = {
  ALLOWED_TAGS: TAGS.split(/\s+/),
  ALLOWED_ATTR: ATTRIBUTES.split(/\s+/),
  ALLOWED_URI_REGEXP: SAFE_URL,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ADD_FORBID_CONTENTS: ["annotation"], // KaTeX's copy of the source
  RETURN_DOM_FRAGMENT: true,
};

const markdown = markdownit({ breaks: true, linkify: true, highlight }).use(tex, {
  delimiters: "all",
  render: formula,
});
markdown.validateLink = (url) => SAFE_URL.test(url);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // README.md is no site
const rules = markdown.renderer.rules;
// a picture from elsewhere would tell its owner who reads: a link in its place
rules.image = (tokens, place) => {
  const { escapeHtml } = markdown.utils;
  const url = tokens[place].attrGet("src");
  return `<a href="${escapeHtml(url)}">${escapeHtml(tokens[place].content || url)}</a>`;
};
rules.heading_open = rules.heading_close = (tokens, place, options, env, self) => {
  const token = tokens[place];
  const level = Math.min(6, Number(token.tag[1]) + 3); // below the page's own
  return self.renderToken([Object.assign(token, { tag: `h${level}` })], 0, options);
};
rules.th_open = rules.td_open = (tokens, place, options, env, self) => {
  const side = tokens[place].attrGet("style")?.split(":")[1]; // inline styles are forbidden
  tokens[place].attrs = side ? [["align", side]] : null;
  return self.renderToken(tokens, place, options);
};

function highlight(code, language) {
  if (!hljs.getLanguage(language) || code.length > MOST_COLOURED) return "";
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

function formula(source, isBlock) {
  const [begin, end] = isBlock ? ['<p class="math">', "</p>"] : ["", ""];
  try {
    const options = { output: "mathml", displayMode: isBlock, strict: false, maxSize: 20 };
    return begin + katex.renderToString(source, options) + end;
  } catch {
    return `${begin}<code>${markdown.utils.escapeHtml(source)}</code>${end}`; // not whole, or no TeX
  }
}

/** Shows an answer that grows: finished blocks keep their nodes, and so a selection. */
export class Formatted {
  #element;
  #numLetters = 0; // of the blocks that no further text can change
  #numBlocks = 0;
  #env = {}; // the targets of links

  constructor(element) {
    this.#element = element;
  }

  /** @param isWhole nothing follows: all blocks are looked at again, for links that came later. */
  show(text, isWhole) {
    if (text === "") this.#env = {};
    if (text === "" || isWhole) this.#numLetters = this.#numBlocks = 0;
    try {
      if (text.length > MOST_LETTERS) throw new RangeError("too long to be formatted");
      this.#format(text.replace(/\r\n?/g, "\n").slice(this.#numLetters));
    } catch {
      // too deep for a library: the words matter more than their form
      const plain = document.createElement("p");
      plain.className = "plain";
      plain.textContent = text;
      this.#element.replaceChildren(plain);
      this.#numLetters = this.#numBlocks = 0;
    }
  }

  #format(rest) {
    const blocks = blocksOf(rest, this.#env);
    blocks.forEach(({ html }, place) => this.#put(html, this.#numBlocks + place));
    const numBlocks = this.#numBlocks + blocks.length;
    while (this.#element.children.length > numBlocks) this.#element.lastElementChild.remove();
    if (blocks.length < 2) return;
    this.#numBlocks = numBlocks - 1; // the last one may still grow
    this.#numLetters += lettersOf(rest, blocks.at(-1).line);
  }

  #put(html, place) {
    const old = this.#element.children[place];
    if (old?.html === html) return;
    const node = build(html);
    if (!old) this.#element.append(node);
    else if (!old.matches(".code") || !node.matches(".code")) old.replaceWith(node);
    else {
      // the same node while it grows: it may be scrolled or hold the focus
      for (const part of ["code", ".language"]) {
        old.querySelector(part).replaceChildren(...node.querySelector(part).childNodes);
      }
      old.html = html;
    }
  }
}

/** Text -> its outermost blocks: {html, line}. */
function blocksOf(text, env) {
  const blocks = [];
  let group = [];
  for (const token of markdown.parse(text, env)) {
    if (token.tag === "code") token.content = token.content.replace(/\n$/, ""); // fences
    group.push(token);
    if (token.level > 0 || token.nesting === 1) continue;
    const html = markdown.renderer.render(group, markdown.options, env);
    blocks.push({ html, line: group[0].map[0] });
    group = [];
  }
  return blocks;
}

/** Letters before a line. */
function lettersOf(text, line) {
  let letters = 0;
  for (; line > 0; line -= 1) letters = text.indexOf("\n", letters) + 1;
  return letters;
}

function build(html) {
  const fragment = DOMPurify.sanitize(html, CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.rel = "noopener noreferrer";
    link.target = "_blank";
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table, "table");
  for (const code of fragment.querySelectorAll("pre > code")) dress(code);
  const node = fragment.childElementCount === 1 ? fragment.firstElementChild : wrap(fragment, "block");
  return Object.assign(node, { html });
}

function wrap(inner, name) {
  const outer = document.createElement("div");
  outer.className = name;
  if (inner.parentNode) inner.replaceWith(outer);
  outer.append(inner);
  return outer;
}

/** Code -> a box with its language and a button to copy it. */
function dress(code) {
  const box = copyOf("code-block");
  const language = /^language-(\S+)/.exec(code.className);
  box.querySelector(".language").textContent = language?.[1] ?? "";
  code.parentNode.replaceWith(box);
  box.querySelector("code").replaceChildren(...code.childNodes);
  const button = box.querySelector("button");
  button.onclick = () => copyText(box.querySelector("code").textContent, button);
}

/** Copies a text; says on the button whether it worked. */
export async function copyText(text, button) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    isCopied = copyFromField(text); // no permission, or a page of another machine without https
  }
  const said = isCopied ? "copied" : "notCopied";
  document.getElementById("said").textContent = say(said);
  button.classList.add(said);
  setTimeout(() => button.classList.remove(said), 1600);
}

function copyFromField(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.className = "unseen";
  field.value = text;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    focused?.focus();
  }
}

"""Answers in Markdown for the chat page, good and hostile, and how the page displays them."""

from typing import Any

DEEP = 20_000
HOSTILE = {
    "script": "<script>document.title='x'</script>\n\n<script src=https://example.org/x.js></script>",
    "onerror": '<img src=x onerror="document.title=1"> <svg onload=alert(1)><b onclick=alert(1)>',
    "reference": "[a]\n\n[a]: javascript:alert(1)\n\n[b]\n\n[b]: data:text/html,<script>1</script>",
    "picture": '![x](https://example.org/a.png "onerror=1") ![x](javascript:alert(1))',
    "fence": '```"><img/onerror=alert(1)>\n</code></pre><img src=x onerror=alert(1)>',
    "math link": r"$\href{javascript:alert(1)}{x}$ \(\url{javascript:1}\) $$\htmlData{a=b}{x}$$",
    "math bomb": r"$\def\a{\a\a}\a$ $\def\x#1{#1#1#1}\x{\x{\x{\x{\x{\x{\x{\x{y}}}}}}}}$ $"
    + "{" * 4000
    + "$",
    "quotes": ">" * DEEP + " a",
    "stars": "*a **a " * DEEP,
    "too long": "# a\n\n<b>" * 26_000,
}


def shown(page: Any, text: str, *, pieces: int = 1) -> dict[str, Any]:
    """Return a text as the page formats it, in pieces and then whole."""
    return page.evaluate(
        """async ([text, pieces]) => {
            const { Formatted } = await import("./web/render.js");
            const element = document.createElement("div");
            document.getElementById("log").append(element);
            const formatted = new Formatted(element);
            const began = performance.now();
            for (let piece = 1; piece <= pieces; piece += 1)
                formatted.show(text.slice(0, Math.ceil(text.length * piece / pieces)), false);
            const seconds = (performance.now() - began) / 1000;
            formatted.show(text, true);
            const nodes = [...element.querySelectorAll("*")];
            const result = {
                seconds, text: element.textContent,
                names: nodes.map(one => one.localName), links: [...element.querySelectorAll("a")]
                    .map(one => [one.href, one.rel, one.target]),
                attributes: nodes.flatMap(one => one.getAttributeNames()),
            };
            element.remove();
            return result;
        }""",
        [text, pieces],
    )

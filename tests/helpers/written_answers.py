"""Answers in Markdown for the chat page, good and hostile, and how the page shows them."""

from typing import Any

RICH = r"""### Costs

| Way | Cost |
|:--|--:|
| plain | 1 |
| [link](https://example.org/a?b=1&c) | **2** |

> quoted
> > twice

1. one
   - nested
     - deeper
2. two

Inline $e^{i\pi}$, \(a_1\), $$\frac{1}{2}$$ and $5 or $6.

\[
x
= \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\]

```python
def one(): return "1"  # a comment
```

![a cat](https://example.org/cat.png) mailto:a@example.org ~~gone~~ [late]

[late]: https://example.org/late
"""
DEEP = 20_000
HOSTILE = {
    "script": "<script>document.title='x'</script>\n\n<script src=https://example.org/x.js></script>",
    "onerror": '<img src=x onerror="document.title=1"> <svg onload=alert(1)><b onclick=alert(1)>',
    "javascript link": "[a](javascript:alert(1)) <javascript:alert(1)> [b](JaVaScRiPt&colon;1)",
    "reference": "[a]\n\n[a]: javascript:alert(1)\n\n[b]\n\n[b]: data:text/html,<script>1</script>",
    "other schemes": "[a](data:text/html,PA) [b](vbscript:x) [c](file:///etc) [d](/e) ![](data:x)",
    "picture": '![x](https://example.org/a.png "onerror=1") ![x](javascript:alert(1))',
    "attributes": '[a](https://example.org/"onmouseover="alert(1) \'"onclick=x\')',
    "fence": '```"><img/onerror=alert(1)>\n</code></pre><img src=x onerror=alert(1)>',
    "open fence": "````python\n```\n<script>alert(1)</script>" + "\nx = '" * 50,
    "math link": r"$\href{javascript:alert(1)}{x}$ \(\url{javascript:1}\) $$\htmlData{a=b}{x}$$",
    "math picture": r"$$\includegraphics{https://example.org/a.png}$$ $\htmlStyle{color:red}{x}$",
    "math markup": r"$</math><img src=x onerror=alert(1)>$ $\text{<img src=x onerror=alert(1)>}$",
    "math bomb": r"$\def\a{\a\a}\a$ $\def\x#1{#1#1#1}\x{\x{\x{\x{\x{\x{\x{\x{y}}}}}}}}$ $"
    + "{" * 4000
    + "$",
    "table": "|a|\n|--|\n|<img src=x onerror=alert(1)>|" + "|\n|x" * 2000,
    "quotes": ">" * DEEP + " a",
    "lists": "".join(" " * (2 * depth) + "- a\n" for depth in range(300)),
    "brackets": "[" * DEEP + "a" + "](x)" * DEEP,
    "stars": "*a **a " * DEEP,
    "open math": "\\( $$ $a \\[ " * DEEP,
    "open math lines": "\\[ a\n" * DEEP,
    "too long": "# a\n\n<b>" * 26_000,
}


def shown(page: Any, text: str, *, pieces: int = 1) -> dict[str, Any]:
    """A text as the page formats it, in pieces and then whole."""
    return page.evaluate(
        """async ([text, pieces]) => {
            const { Formatted } = await import("./web/render.js");
            const element = document.createElement("div");
            document.getElementById("log").append(element);
            const formatted = new Formatted(element);
            const began = performance.now();
            const library = Object.getPrototypeOf(globalThis.markdownit());
            const { parse } = library;
            let parsed = 0;
            library.parse = function (some, env) {
                parsed += some.length;
                return parse.call(this, some, env);
            };
            let kept = 0;
            for (let piece = 1; piece <= pieces; piece += 1) {
                const first = element.firstElementChild;
                formatted.show(text.slice(0, Math.ceil(text.length * piece / pieces)), false);
                if (first && first === element.firstElementChild) kept += 1;
            }
            const streamed = element.innerHTML;
            library.parse = parse;
            const seconds = (performance.now() - began) / 1000;
            formatted.show(text, true);
            const nodes = [...element.querySelectorAll("*")];
            const result = {
                streamed, kept, parsed, seconds, text: element.textContent, html: element.innerHTML,
                names: nodes.map(one => one.localName), links: [...element.querySelectorAll("a")]
                    .map(one => [one.href, one.rel, one.target]),
                attributes: nodes.flatMap(one => one.getAttributeNames()),
            };
            element.remove();
            return result;
        }""",
        [text, pieces],
    )

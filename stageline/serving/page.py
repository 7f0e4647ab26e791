"""The chat page: a few files beside this one, served by the process that answers.

Nothing is built and nothing comes from elsewhere: the page works without a network. Its headers
forbid scripts, styles and requests of any other origin, and setting markup from text.
"""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "web"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # pictures that a person attaches
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the browser itself refuses innerHTML
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again with its tag: files change with the version
}
# what a browser fetches before a person can type a key: open even where the API is not
FILES = {
    "/" if path.name == "index.html" else f"/web/{path.name}": path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in KINDS
}
PATHS = frozenset(FILES)


def add_page(app: Any) -> None:
    """Mounts the page at `/` of a FastAPI app, and its files under `/web/`.

    They are no part of the app's OpenAPI document.
    """
    for path, file in FILES.items():
        app.add_api_route(path, _endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)


def _endpoint(file: Path) -> Any:
    from fastapi.responses import FileResponse

    async def send() -> FileResponse:
        return FileResponse(file, media_type=KINDS[file.suffix], headers=HEADERS)

    return send

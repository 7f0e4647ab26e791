"""The chat page in a headless Chromium, in front of the true server with a fake engine."""

import hashlib
import io
import itertools
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from prompt_fn import auto, chat
from stageline.errors import UserError
from stageline.inference.decoding.request import Request
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.tiny_models import tiny_processor
from tests.helpers.written_answers import HOSTILE, shown

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
if CHROMIUM is None:
    pytest.skip("no chromium: apt-get install chromium", allow_module_level=True)

PROCESSOR = tiny_processor("internvl")
EVIL = "<script>document.title = 1</script><img src=x onerror='document.title=1'>[a](javascript:1)"
CODE = "A **sum**:\n\n```python\nprint(1 < 2)\n```\nand `more`."
LONG = " ".join(str(number) for number in range(140))


def text_of(request: Request) -> str:
    return PROCESSOR.tokenizer.decode(request.prompt["input_ids"][0])


def reply(request: Request) -> str | Exception:
    last = text_of(request).rpartition("user\n")[2]
    if "too long" in last:
        return UserError("the prompt is <b>too</b> long for this model")
    if "count" in last:
        return LONG
    if "code" in last:
        return CODE
    if "evil" in last:
        return EVIL
    if "pixel_values" in request.prompt:
        return "A picture of a seven."
    return f"Turn {text_of(request).count('user')}: \u4f60\u597d \U0001f600"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def engine():
    with FakeEngine(PROCESSOR, reply=reply, seconds=0.002) as running:
        yield running


@pytest.fixture(scope="module")
def server(engine):
    from tests.helpers.served import served

    with served(engine, render=chat, image_token=auto) as running:
        yield running


@pytest.fixture
def open_page(browser):
    """Opens the page in a context of its own; afterwards no script may have failed."""
    faults: list[str] = []
    contexts = []

    def open_one(url: str, **options):
        contexts.append(browser.new_context(**{"locale": "en-GB", **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda told: (
                told.type == "error"
                and "Failed to load" not in told.text
                and "TrustedHTML" not in told.text
                and faults.append(told.text)
            ),
        )
        page.goto(url)
        return page

    open_one.faults = faults
    yield open_one
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(server, open_page):
    opened = open_page(server.url)
    opened.wait_for_selector("#welcome-model:not(:empty)")
    return opened


def ask(page, text: str) -> None:
    page.fill("#message", text)
    page.keyboard.press("Enter")


def last_answer(page):
    return page.locator(".turn:last-child .answer .text")


def wait_for_answers(page, count: int) -> None:
    page.wait_for_function(
        "count => document.querySelectorAll('.foot:not([hidden])').length === count", arg=count
    )


def digit_png(size: tuple[int, int] = (16, 16)) -> bytes:
    picture = Image.new("RGB", size, "white")
    ImageDraw.Draw(picture).line([(4, 3), (12, 3), (6, 13)], fill="black", width=2)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_a_conversation_comes_in_parts(page, engine, tmp_path):
    seen = []
    page.fill("#message", "Please count")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("to 140")
    page.keyboard.press("Enter")
    while not page.locator(".foot:visible").count():
        seen.append(last_answer(page).inner_text())
        page.wait_for_timeout(20)
    sizes = sorted({len(text) for text in seen if text})
    assert len(sizes) > 2, "the text grows"
    assert all(LONG.startswith(text) for text in seen) and last_answer(page).inner_text() == LONG
    assert "Please count\nto 140" in text_of(engine.asked[-1])
    figures = page.locator(".figures").inner_text()
    assert "tokens/s" in figures and "in the prompt" in figures
    ask(page, "Hello")
    wait_for_answers(page, 2)
    assert last_answer(page).inner_text() == "Turn 2: \u4f60\u597d \U0001f600"
    assert LONG in text_of(engine.asked[-1]), "the history goes along"
    page.screenshot(path=tmp_path / "page.png")
    picture = Image.open(tmp_path / "page.png").convert("L")
    assert len(picture.getcolors()) > 20 and picture.size == (1280, 720)
    page.click("#new")
    assert page.locator(".turn").count() == 0 and page.is_visible("#welcome")
    ask(page, "Hello")
    wait_for_answers(page, 1)
    assert last_answer(page).inner_text().startswith("Turn 1:")


def test_a_stop_frees_the_engine_and_keeps_the_text(page, engine):
    num_before = len(engine.cancelled)
    ask(page, "Please count")
    page.wait_for_function("() => document.querySelector('.answer .text').textContent.length > 20")
    page.click("#stop")
    wait_for_answers(page, 1)
    text = last_answer(page).inner_text()
    assert LONG.startswith(text) and 20 < len(text) < len(LONG)
    assert "Stopped" in page.locator(".figures").inner_text()
    for _ in range(200):
        if len(engine.cancelled) > num_before:
            break
        page.wait_for_timeout(20)
    assert len(engine.cancelled) == num_before + 1 and engine.stats().running == 0
    ask(page, "Hello")
    wait_for_answers(page, 2)
    assert text in text_of(engine.asked[-1]), "what was said stays in the conversation"


def test_an_error_shows_the_servers_words_and_can_be_tried_again(page, engine):
    ask(page, "this is too long")
    page.wait_for_selector(".error:visible")
    assert "the prompt is <b>too</b> long" in page.locator(".error").inner_text()
    assert page.locator(".error b").count() == 0
    page.click('[data-act="edit"]')
    assert page.input_value("#message") == "this is too long"
    assert page.locator(".turn").count() == 0
    ask(page, "Hello")
    wait_for_answers(page, 1)
    assert "too long" not in text_of(engine.asked[-1])
    num_asked = len(engine.asked)
    page.click('[data-act="retry"]')
    page.wait_for_function("() => document.querySelector('.running') === null")
    wait_for_answers(page, 1)
    assert len(engine.asked) == num_asked + 1
    assert text_of(engine.asked[-1]) == text_of(engine.asked[-2])
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hello")
    page.wait_for_selector(".error:visible")
    assert "cannot be reached" in page.locator(".error:visible").inner_text()
    page.unroute("**/v1/chat/completions")
    ask(page, "And now?")
    wait_for_answers(page, 3)
    assert text_of(engine.asked[-1]).count("user\n") == 2, "what failed is no part of the chat"


def test_a_hostile_answer_makes_nothing_but_text(page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    for text, pieces in itertools.product(HOSTILE.values(), (1, 3)):
        result = shown(page, text, pieces=pieces)
        assert not {"script", "img", "svg", "iframe", "b", "style", "object"} & set(result["names"])
        assert not [one for one in result["attributes"] if one.startswith("on") or one == "style"]
        for link in result["links"]:
            assert link[0].startswith("https://example.org/")
            assert link[1:] == ["noopener noreferrer", "_blank"]
        assert result["seconds"] < 60 and result["text"].strip()
    assert asked == [] and page.title() == "Stageline"


def test_vendored_files_are_those_that_are_named():
    folder = Path(__file__).parents[2] / "stageline/serving/web/vendor"
    lines = (folder / "README.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines if "SHA" not in line]
    sums = {row[1]: row[5] for row in rows if len(row) > 5 and "." in row[1]}
    files = sorted(folder.glob("*.js"))
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == sums
    assert all((folder / f"{file.name.partition('.')[0]}.LICENSE").exists() for file in files)


def test_a_reload_brings_the_conversation_back(page, engine):
    png = {"name": "7.png", "mimeType": "image/png", "buffer": digit_png()}
    page.set_input_files("#files", png)
    page.wait_for_selector("#thumbnails img")
    ask(page, "Which digit?")
    wait_for_answers(page, 1)
    ask(page, "code")
    wait_for_answers(page, 2)
    figures = page.locator(".figures").all_inner_texts()
    page.reload()
    wait_for_answers(page, 2)
    assert page.locator(".question .text").all_inner_texts() == ["Which digit?", "code"]
    assert page.locator(".question img").evaluate("one => one.naturalWidth") == 16
    assert last_answer(page).locator("strong").inner_text() == "sum"
    assert page.locator(".figures").all_inner_texts() == figures
    ask(page, "Please count")
    page.wait_for_function(
        "() => document.querySelectorAll('.answer .text')[2]?.innerText.length > 20"
    )
    assert "A picture of a seven." in text_of(engine.asked[-1])
    assert engine.asked[-1].prompt["pixel_values"].shape[0] == 1
    page.reload()  # the page reloads during an answer
    wait_for_answers(page, 3)
    text = last_answer(page).inner_text()
    assert LONG.startswith(text) and 20 < len(text) < len(LONG)
    assert page.locator(".figures").last.inner_text().startswith("Stopped")
    other = page.context.new_page()
    other.goto(page.url)
    wait_for_answers(other, 3)
    other.click("#new")
    ask(other, "Hello")
    wait_for_answers(other, 1)
    page.reload()
    wait_for_answers(page, 3)  # each tab has its own
    page.click("#open-settings")
    page.click("#forget")
    page.wait_for_function(
        "() => document.getElementById('notice').textContent.includes('No conv')"
    )
    assert page.locator(".turn").count() == 0
    for one in (page, other):
        one.reload()
        one.wait_for_selector("#welcome-model:not(:empty)")
        one.wait_for_timeout(300)
        assert one.locator(".turn").count() == 0


def test_pictures_are_picked_pasted_and_dropped(page, engine):
    png = digit_png()
    page.set_input_files("#files", {"name": "7.png", "mimeType": "image/png", "buffer": png})
    page.evaluate(
        """bytes => {
            const carry = new DataTransfer();
            carry.items.add(new File([new Uint8Array(bytes)], "8.png", {type: "image/png"}));
            const options = {bubbles: true, cancelable: true};
            const drop = new DragEvent("drop", {...options, dataTransfer: carry});
            document.body.dispatchEvent(drop);
            const paste = new ClipboardEvent("paste", {...options, clipboardData: carry});
            document.body.dispatchEvent(paste);
        }""",
        list(png),
    )
    page.wait_for_function("() => document.querySelectorAll('#thumbnails img').length === 3")
    page.locator("#thumbnails button").first.click()
    ask(page, "Which digits?")
    wait_for_answers(page, 1)
    assert last_answer(page).inner_text() == "A picture of a seven."
    assert page.locator(".question img").count() == 2
    assert engine.asked[-1].prompt["pixel_values"].shape[0] == 2
    assert not page.is_visible("#thumbnails")
    large = digit_png((3000, 30))
    page.set_input_files("#files", {"name": "9.png", "mimeType": "image/png", "buffer": large})
    page.wait_for_function("() => document.querySelector('#thumbnails img')?.naturalWidth === 2048")
    page.set_input_files("#files", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"x"})
    page.wait_for_selector("#notice:visible")
    assert "a.txt is no PNG" in page.locator("#notice").inner_text()


def test_settings_reach_the_engine_and_stay_in_the_tab(page, engine):
    page.click("#open-settings")
    values = {"#system": "Be a cat.", "#temperature": "0.5", "#top_p": "0.9", "#max_tokens": "7"}
    for field, value in {**values, "#seed": "3", "#stop-strings": "END\n\\n\\n"}.items():
        page.fill(field, value)
    page.keyboard.press("Escape")
    ask(page, "Please count")
    wait_for_answers(page, 1)
    sampling = engine.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.stop) == (3, ("END", "\n\n"))
    assert "Be a cat." in text_of(engine.asked[-1])
    assert "Cut at the longest length" in page.locator(".figures").inner_text()
    page.reload()
    assert page.input_value("#system") == "Be a cat."
    assert page.evaluate("localStorage.length") == 0


def test_a_key_is_asked_for(engine, open_page):
    from tests.helpers.served import served

    with served(engine, render=chat, image_token=auto, api_keys=("secret",)) as running:
        page = open_page(running.url)
        page.wait_for_selector("#notice:visible")
        assert "API key" in page.locator("#notice").inner_text()
        page.click("#open-settings")
        page.fill("#key", "secret")
        page.keyboard.press("Escape")
        page.wait_for_selector("#welcome-model:not(:empty)")
        ask(page, "Hello")
        wait_for_answers(page, 1)
        assert last_answer(page).inner_text().startswith("Turn 1")


def test_chinese_on_a_narrow_screen(server, open_page):
    page = open_page(server.url, locale="zh-CN", viewport={"width": 360, "height": 640})
    page.wait_for_selector("#welcome-model:not(:empty)")
    assert "对话" in page.locator("#welcome-model").inner_text()
    assert page.get_attribute("#message", "placeholder") == "输入消息"
    assert page.get_attribute("html", "lang") == "zh-Hans"
    ask(page, "code")
    wait_for_answers(page, 1)
    assert "个 token" in page.locator(".figures").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    untold = page.evaluate(
        "[...document.querySelectorAll('button, textarea, input:not([hidden]), select')]"
        ".filter(one => !one.ariaLabel && !one.labels?.length && !one.textContent.trim()).length"
    )
    assert untold == 0, "a screen reader has a name for everything"
    refused = page.evaluate("import('./web/words.js').then(m => m.isChinese)")
    assert refused is True

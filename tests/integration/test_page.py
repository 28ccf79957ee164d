"""The page at the front door in a browser: before a real server, and before the client's fake one for what must wait or fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_core_python.base import AXE_SCRIPT
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from lr_backend.serve.warmup import ANSWER, QUESTION
from tests.support import browser as chromium
from tests.support.browser import Browser
from tests.support.deployed import Served, serving
from tests.support.fake_lookahead import Fail, FakeServer, Reply
from tests.support.fake_lookahead import Gate as Pause
from tests.support.frontend import DEPLOYED, frontend
from tests.support.frontend import Served as Fronted

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(chromium.missing()), reason=f"no browser (Debian's packages: {chromium.missing()})"),
]

KEY = "a-key-of-twenty-char"
MARKUP = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
PACE = "h200_sxm"
LIGHT, DARK = "light", "dark"


def step(index: int, origin: str, text: str, **more: object) -> Reply:
    return Reply(step={"index": index, "origin": origin, "text": text, "reason": "none", "num_tokens": 3, **more})


def ending(reason: str = "stop", **counts: object) -> Reply:
    usage = {"prompt_tokens": 2, "completion_tokens": 9, "reasoning_tokens": 3, "num_steps": 2, "seed": 7}
    return Reply(finish=reason, usage={**usage, **counts})


FINISH = ending()
BEGUN = [step(0, "draft", "<think>one", target_text="uno"), Reply(text="<think>one")]
ENDED = [step(1, "target", "</think>two"), Reply(text="</think>two"), FINISH]


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium.browser() as one:
        yield one


@pytest.fixture
def browser(window: Browser) -> Browser:
    """As a person finds it: wide, light, and with nothing said on the console."""
    window.resize(1280, 1000)
    window.prefers(prefers_color_scheme=LIGHT)
    window.errors()
    return window


# ------------------------------------------------------------------------------------------------------- before a real server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--pace", PACE) as running:
        yield running


@pytest.fixture
def page(browser: Browser, served: Served) -> Browser:
    browser.open(served.address)
    browser.choose("#mode", "lr_sd")
    browser.fill("#temperature", "0")
    return browser


def answered(page: Browser) -> Browser:
    page.one("#ask").click()
    page.said("Answered in")
    return page


def outcomes(page: Browser, track: str) -> list[str]:
    return [str(bar.get_attribute("data-outcome")) for bar in page.all(f"g[data-track={track}] > g")]


def test_the_question_is_there_and_the_pace_is_said(page: Browser) -> None:
    assert page.one("#question").get_property("value") == QUESTION
    assert "demo" in page.text("#model")
    assert page.text("#pace").startswith("Production pace:") and f"not a run on {PACE}" in page.text("#pace")
    assert not page.one("#key").is_displayed()


def test_an_answer_shows_where_its_steps_come_from(page: Browser) -> None:
    answered(page)
    assert f"\\boxed{{{ANSWER}}}" in page.text(".content") and "\\boxed" not in page.text(".reasoning")
    steps = page.all(".step")
    origins = [str(one.get_attribute("class")).split()[1] for one in steps]
    assert "draft" in origins and set(origins) <= {"draft", "correction", "target"}
    assert page.texts(".step .origin") == origins  # said, not only coloured
    assert set(origins) <= set(page.texts("#origins .origin"))
    colours = {page.run("return getComputedStyle(arguments[0]).borderLeftColor", one) for one in steps}
    assert len(colours) == len(set(origins))
    figures = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    accepted, compared = map(int, re.findall(r"(\d+) of (\d+)", figures["Steps accepted"])[0])
    assert accepted == origins.count("draft") and accepted <= compared
    assert int(figures["Tokens a second"].split()[0]) > 0 and "target" in figures["Calls"]
    assert page.errors() == []


def test_the_timeline_has_every_call_of_its_roles(page: Browser) -> None:
    answered(page)
    drawn = [(role, outcome) for role in ("draft", "target", "judge") for outcome in outcomes(page, role)]
    assert {role for role, _ in drawn} == {"draft", "target", "judge"}
    assert page.texts(".roles div") == ["answer", "draft", "target", "judge"]
    page.one(".timeline summary").click()
    table = [tuple(row.text.split()) for row in page.all(".timeline tbody tr")]
    assert len(table) == len(drawn)
    assert sorted(role for role, _ in drawn) == sorted(row[0] for row in table)
    label = page.one(".timeline svg").get_attribute("aria-label") or ""
    assert f"{len(outcomes(page, 'judge'))} of the judge" in label
    boxes = [bar.rect for bar in page.all("g[data-track] rect")]
    assert all(box["width"] >= 1 and box["height"] > 8 for box in boxes)


def test_a_race_ends_with_two_answers_and_a_ratio(page: Browser) -> None:
    page.one("#race").click()
    assert not page.one("#verdict").is_displayed()
    page.said("over")
    assert page.texts(".lane h2") == ["lr_sd", "ar"]
    assert all(f"\\boxed{{{ANSWER}}}" in text for text in page.texts(".lane .content"))
    clocks = [float(text.removesuffix(" s")) for text in page.texts(".clock")]
    ratio = float(page.text(".ratio").removesuffix("×"))
    assert ratio == pytest.approx(max(clocks) / min(clocks), rel=0.05) and ratio >= 1
    fastest = [name for name, clock in zip(("lr_sd", "ar"), clocks, strict=True) if clock == min(clocks)]
    assert page.text(".sentence").partition(" answered")[0] in fastest
    one, two = (lane.rect for lane in page.all(".lane"))
    assert one["y"] == two["y"] and one["x"] + one["width"] < two["x"]
    assert {origin for origin in page.texts(".lane:nth-child(2) .step .origin")} == {"target"}
    assert page.errors() == []


def test_axe_finds_nothing(page: Browser) -> None:
    """At each width and in each scheme, with nothing asked, an answer, and a race. A page draws anew for a new width."""
    page.prefers(prefers_color_scheme=LIGHT, prefers_reduced_motion="reduce")
    assert_nothing_is_found(page)
    answered(page)
    assert_nothing_is_found(page)
    page.one("#race").click()
    page.said("over")
    assert_nothing_is_found(page)


def assert_nothing_is_found(page: Browser) -> None:
    for width in (1280, 390):
        page.resize(width, 900)
        for scheme in (LIGHT, DARK):
            page.prefers(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
            assert violations(page) == [], (width, scheme)
            assert page.run("return document.documentElement.scrollWidth") <= width, (width, scheme)


def violations(page: Browser) -> list[str]:
    """What axe-core says, by rule and place."""
    page.run(AXE_SCRIPT)
    found: Any = page.driver.execute_async_script(
        "axe.run({resultTypes: ['violations', 'passes']}).then(arguments[arguments.length - 1])"
    )
    assert len(found["passes"]) > 10 and "color-contrast" in {rule["id"] for rule in found["passes"]}
    return [f"{rule['id']}: {node['html']}" for rule in found["violations"] for node in rule["nodes"]]


# ---------------------------------------------------------------------------------------------------------- before a fake one


@pytest.fixture
def pause() -> Pause:
    return Pause()


@pytest.fixture
def fake(pause: Pause) -> Iterator[Any]:
    markup = [
        step(0, "correction", MARKUP, drafted_text=f"{MARKUP}?"),
        Reply(text=f"<think>{MARKUP}</think>"),
        Reply(text=MARKUP),
    ]
    scripts = {
        "q": [*BEGUN, *ENDED],
        "failed drafts": [
            *BEGUN,
            ending(num_steps_accepted=1, num_steps_late=1, num_steps_rejected={"judge": 2, "draft_error": 3}),
        ],
        "code": [step(0, "target", "\n    if x:\n"), *map(Reply, ["\n  ", "  if", " x:\n", "        y\n"]), FINISH],
        **{reason: [*BEGUN, ending(reason)] for reason in ("length", "deadline")},
        "held": [*BEGUN, pause, *ENDED],
        "held again": [*BEGUN, Pause(), *ENDED],
        "markup": [*markup, FINISH],
        "refused": [Fail(f"LR_INVALID_REQUEST: text_input={MARKUP}: too short"), Pause()],
        "fails midway": [*BEGUN, Fail("LR_TARGET_UNAVAILABLE: gone"), Pause()],
    }
    with FakeServer(scripts) as running:
        yield running


@pytest.fixture
def fronted(fake: Any) -> Iterator[Fronted]:
    with frontend(fake.url, deployed=DEPLOYED.model_copy(update={"default_tokens": 80, "default_temperature": 0.6})) as running:
        yield running


@pytest.fixture
def asking(browser: Browser, fronted: Fronted) -> Browser:
    browser.open(f"127.0.0.1:{fronted.port}")
    return browser


def ask(page: Browser, question: str, ends: str) -> str:
    page.fill("#question", question)
    page.one("#ask").click()
    return page.said(ends)


def test_the_answer_may_be_as_long_as_without_a_limit(asking: Browser) -> None:
    assert asking.one("#max-tokens").get_property("value") == "80"


def test_the_temperature_is_the_deployments_unless_it_is_filled_in(asking: Browser, fake: Any) -> None:
    assert asking.one("#temperature").get_property("placeholder") == "0.6"
    ask(asking, "q", "Answered")
    assert "temperature" not in fake.request().inputs


def test_what_is_filled_in_is_what_is_asked(asking: Browser, fake: Any) -> None:
    asking.choose("#mode", "lossless")
    for field, value in {"#max-tokens": "50", "#temperature": "0.7", "#seed": "11"}.items():
        asking.fill(field, value)
    ask(asking, "q", "Answered")
    inputs = fake.request().inputs
    assert {name: inputs[name] for name in ("mode", "max_tokens", "seed", "trace")} == {
        "mode": ["lossless"],
        "max_tokens": [50],
        "seed": [11],
        "trace": [True],
    }
    assert inputs["temperature"] == [pytest.approx(0.7)]


def test_both_of_a_race_have_one_seed(asking: Browser, fake: Any) -> None:
    asking.fill("#question", "q")
    asking.one("#race").click()
    asking.said("over")
    first, second = fake.request(0).inputs, fake.request(1).inputs
    assert first["seed"] == second["seed"] and {first["mode"][0], second["mode"][0]} == {"auto", "ar"}


def test_a_draft_that_failed_was_compared_with_nothing(asking: Browser) -> None:
    ask(asking, "failed drafts", "Answered")
    assert dict(zip(asking.texts("dt"), asking.texts("dd"), strict=True))["Steps accepted"].split("\n") == ["25 %", "1 of 4"]


def test_indentation_and_blanks_between_pieces_are_kept(asking: Browser) -> None:
    ask(asking, "code", "Answered")
    assert asking.one(".step .text").get_property("textContent") == "    if x:\n        y"


@pytest.mark.parametrize(("reason", "cut"), [("length", "cut at 9 tokens"), ("deadline", "cut by time, at 9 tokens")])
def test_an_answer_that_was_cut_says_so(asking: Browser, reason: str, cut: str) -> None:
    assert ask(asking, reason, "Answered").endswith(f", but {cut}.")
    assert asking.text(".cut") == f"This answer was {cut}."
    assert "cut" not in ask(asking, "q", "Answered") and not asking.one(".cut").is_displayed()


def test_a_race_of_answers_cut_at_one_place_says_so(asking: Browser) -> None:
    asking.fill("#question", "length")
    asking.one("#race").click()
    assert "times as fast" in asking.said("over")
    assert asking.text(".note").endswith("Both answers were cut at 9 tokens.") and asking.one(".ratio").is_displayed()


def test_a_race_of_answers_cut_at_different_places_has_no_winner(
    asking: Browser, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"auto": [*ENDED[:-1], ending("length")], "ar": ENDED}
    monkeypatch.setattr(fake, "_script", lambda seen: [*BEGUN, *ends[seen.inputs["mode"][0]]])
    asking.one("#race").click()
    cuts = "auto was cut at 9 tokens, ar was not cut."
    assert asking.said("over") == f"The race is over without a winner: {cuts}"
    assert asking.text(".sentence") == f"No winner: {cuts}" and not asking.one(".ratio").is_displayed()


def test_steps_are_seen_before_the_answer_ends_and_stop_ends_it(asking: Browser, fake: Any, pause: Pause) -> None:
    asking.fill("#question", "held")
    asking.one("#ask").click()
    asking.wait(lambda: asking.texts(".step .text") == ["one"])  # a step is there a frame before its text
    assert not asking.all(".content .step")
    assert asking.one(".lane").get_attribute("aria-busy") == "true"
    before = asking.text(".clock")
    asking.wait(lambda: asking.text(".clock") != before)

    asking.one("#stop").click()
    asking.said("Stopped")
    assert fake.request().was_cancelled()
    assert asking.texts(".step .text") == ["one"]  # what has come stays
    assert not asking.all(".lane[aria-busy]")
    ask(asking, "q", "Answered")


def test_markup_of_a_model_is_text(asking: Browser) -> None:
    ask(asking, "markup", "Answered")
    asking.one(".step details summary").click()
    assert asking.texts(".step .text") == [MARKUP, MARKUP] and asking.text(".step details p") == f"{MARKUP}?"
    assert not asking.all("#results img, #results b") and asking.driver.title == "lookahead: demo"
    assert asking.errors() == []


def test_the_browser_itself_refuses_markup_from_scripts(asking: Browser) -> None:
    with pytest.raises(JavascriptException, match="TrustedHTML"):
        asking.run("document.body.innerHTML = '<b>bold</b>'")
    assert not asking.all("b")


def test_errors_are_shown_as_they_are_said(asking: Browser) -> None:
    assert MARKUP in ask(asking, "refused", "too short")
    shown = asking.text(".failure")
    assert shown.startswith(f"messages: {MARKUP}: too short" if shown.startswith("messages") else f"text_input={MARKUP}")
    assert "invalid_value" in shown and not asking.all("#results img, #results b")
    assert "the target is down" in ask(asking, "fails midway", "target is down")
    assert "unavailable" in asking.text(".failure") and asking.texts(".step .text") == ["one"]
    asking.fill("#temperature", "9")
    assert "temperature" in ask(asking, "q", "temperature")


def test_a_server_that_is_gone_is_said(asking: Browser, fake: Any) -> None:
    fake.die()
    ask(asking, "q", "does not answer")
    assert "unavailable" in asking.text(".failure")


def test_a_page_whose_server_does_not_answer_says_so(browser: Browser, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.frontend.static.ABOUT", "elsewhere.json")
    with frontend(fake.url) as running:
        browser.open(f"127.0.0.1:{running.port}")
        assert browser.text("#status") == "The server does not answer. Reload the page to try again."
        assert not browser.one("#asking").is_displayed()


def test_a_key_is_asked_for_where_there_are_keys(browser: Browser, fake: Any) -> None:
    with frontend(fake.url, keys=[KEY]) as running:
        browser.open(f"127.0.0.1:{running.port}")
        assert browser.one("#key").is_displayed() and browser.one("#key").get_attribute("type") == "password"
        assert "send a key" in ask(browser, "q", "send a key")
        browser.fill("#key", KEY)
        ask(browser, "q", "Answered")
        assert browser.run("return [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        browser.open(f"127.0.0.1:{running.port}")
        assert browser.one("#key").get_property("value") == ""


def test_a_keyboard_is_enough(asking: Browser, fake: Any) -> None:
    def press(*keys: str) -> None:
        ActionChains(asking.driver).send_keys(*keys).perform()

    def focused() -> str:
        element = asking.driver.switch_to.active_element
        ring = asking.run("const s = getComputedStyle(arguments[0]); return [s.outlineStyle, s.outlineWidth]", element)
        assert ring == ["solid", "3px"], element.get_attribute("outerHTML")
        return element.get_attribute("id") or element.get_attribute("class") or ""

    order = []
    for _ in range(10):
        press(Keys.TAB)
        order.append(focused())
    assert order == ["skip", "theme", "question", "mode", "rival", "max-tokens", "temperature", "seed", "ask", "race"]

    asking.fill("#question", "held")
    ActionChains(asking.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    asking.wait(lambda: asking.all(".step"))
    press(*[Keys.TAB] * 8)
    assert focused() == "stop"
    press(Keys.ENTER)
    asking.said("Stopped")
    assert fake.request(0).was_cancelled()

    asking.fill("#question", "q")
    press(*[Keys.TAB] * 6)
    assert focused() == "ask"
    press(Keys.ENTER)
    asking.said("Answered")
    press(Keys.TAB)
    press(Keys.SPACE)
    asking.said("over")

    asking.fill("#question", "held again")
    asking.one("#ask").send_keys(Keys.ENTER)
    asking.wait(lambda: asking.all(".step"))
    press(Keys.ESCAPE)
    asking.said("Stopped")


def test_dark_is_the_systems_wish_or_the_readers(asking: Browser) -> None:
    def seen() -> tuple[int, str | None]:
        background = asking.run("return getComputedStyle(document.body).backgroundColor")
        return max(map(int, re.findall(r"\d+", background)[:3])), asking.one("#theme").get_attribute("aria-pressed")

    light, pressed = seen()
    assert light > 200 and pressed == "false"
    asking.prefers(prefers_color_scheme=DARK)
    dark, pressed = asking.wait(lambda: seen() if seen()[1] == "true" else None)
    assert dark < 60
    asking.one("#theme").click()
    assert seen() == (light, "false")
    asking.one("#theme").click()
    assert seen() == (dark, "true")


def test_a_wish_for_less_motion_is_heeded(asking: Browser) -> None:
    def moves() -> bool:
        ask(asking, "q", "Answered")
        return bool(asking.run("return getComputedStyle(arguments[0]).animationName !== 'none'", asking.all(".step")[0]))

    asking.prefers(prefers_reduced_motion="no-preference")
    assert moves()
    asking.prefers(prefers_reduced_motion="reduce")
    assert not moves()

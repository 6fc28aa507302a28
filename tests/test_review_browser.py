"""The review page in a browser: reviewed from the first suspect to the exported file, by mouse and by keys."""

import csv
import re
import time

import numpy as np
import pytest
from common import chromium
from reviews import NASTY, decoded, review
from test_report import Page

from bilevel.report.page import read as source
from bilevel.report.review_page import Suspect, render_review


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH; name one in BILEVEL_CHROMIUM")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open the page of a review; at the end there must have been no error and no request."""
    contexts, troubles = [], []

    def open_(wanted, *, before="", **options):
        address = tmp_path / "report.html"
        address.write_text(render_review(wanted), encoding="utf-8")
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_default_timeout(5000)
        context.add_init_script(before)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        local = ("file:", "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(local) or troubles.append(request.url))
        page.goto(address.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


def wait(page, expression):
    """Until it is true. (The page forbids the evaluation of text, which `wait_for_function` does.)"""
    end = time.monotonic() + 5
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def card(page, index):
    return page.locator(f'.suspect:has(.index:text-is("#{index}"))')


def verdict(page, index):
    return card(page, index).locator(".verdict").inner_text()


def press(page, index, name):
    card(page, index).get_by_role("button", name=name, exact=True).click()


def progress(page):
    return page.locator("#progress").inner_text()


def focused(page):
    """The index on the card that has the focus."""
    return page.evaluate("document.activeElement.querySelector('.index')?.textContent ?? document.activeElement.id")


def indexes(page):
    return [int(text[1:]) for text in page.locator(".suspect .index").all_inner_texts()]


def exported(page):
    with page.expect_download() as download:
        page.locator("#bar [data-save]").click()
    assert download.value.suggested_filename == "decisions.csv"
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_mouse_decisions_show_on_the_card_and_in_the_progress_and_are_undone_one_by_one(visit):
    page = visit(review())
    assert progress(page) == "0 of 30 reviewed: 0 kept, 0 dropped, 0 relabelled"
    assert page.locator("#undo").is_disabled()
    press(page, 0, "Relabel")
    press(page, 10, "Keep")
    press(page, 20, "Drop")
    assert [verdict(page, i) for i in (0, 10, 20, 30)] == ["Relabelled as dog", "Kept", "Dropped", "Undecided"]
    assert progress(page) == "3 of 30 reviewed: 1 kept, 1 dropped, 1 relabelled"
    assert card(page, 20).get_by_role("button", name="Drop").get_attribute("aria-pressed") == "true"
    press(page, 20, "Relabel")
    assert verdict(page, 20) == "Relabelled as cat"
    press(page, 10, "Keep")
    assert verdict(page, 10) == "Undecided"  # the same again takes it back
    undone = []
    while page.locator("#undo").is_enabled():
        page.locator("#undo").click()
        undone.append(progress(page)[:1] + verdict(page, 10)[0] + verdict(page, 20)[0])
    assert undone == ["3KR", "3KD", "2KU", "1UU", "0UU"]


def test_keys_decide_and_move_on(visit):
    page = visit(review())
    page.locator("#bar").scroll_into_view_if_needed()
    card(page, 0).click(position={"x": 4, "y": 4})
    for key in "rkd":
        page.keyboard.press(key)
    assert [verdict(page, i) for i in (0, 10, 20)] == ["Relabelled as dog", "Kept", "Dropped"]
    assert focused(page) == "#30"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert focused(page) == "#40"
    columns = page.evaluate("getComputedStyle(document.querySelector('.chunk')).gridTemplateColumns.split(' ').length")
    page.keyboard.press("ArrowDown")
    assert focused(page) == f"#{40 + 10 * columns}"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Control+z")
    assert focused(page) == "#20"
    assert verdict(page, 20) == "Undecided"
    page.keyboard.press("u")
    assert verdict(page, 10) == "Undecided"
    page.keyboard.press("n")
    assert focused(page) == "#20"
    assert progress(page).startswith("1 of 30")


def in_sight(page, index):
    top = "e => e.getBoundingClientRect().top >= document.querySelector('#bar').getBoundingClientRect().bottom"
    whole = f"e => ({top})(e) && e.getBoundingClientRect().bottom <= innerHeight"
    return card(page, index).evaluate(whole)


@pytest.mark.parametrize(("place", "key"), [("top", "r"), ("amid", "k"), ("end", "d"), ("top", "l")])
def test_the_first_key_brings_up_the_first_undecided_wherever_the_page_is_scrolled(visit, place, key):
    page = visit(review(count=300), viewport={"width": 360, "height": 780})
    page.get_by_role("button", name="Undo").scroll_into_view_if_needed()
    press(page, 0, "Keep")  # so that the first undecided is another
    page.evaluate(f"scrollTo(0, {{top: 0, amid: 0.5, end: 1}}.{place} * document.documentElement.scrollHeight)")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(key)
    assert focused(page) == "#10"
    assert in_sight(page, 10)
    assert progress(page) == "1 of 300 reviewed: 1 kept, 0 dropped, 0 relabelled"  # nothing is decided unseen
    assert page.locator("#message").inner_text() == "Press the key again to decide on this one."
    page.keyboard.press(key)
    if key == "l":
        page.keyboard.type("cow")
        page.keyboard.press("Enter")
    assert verdict(page, 10) == {"r": "Relabelled as cow", "k": "Kept", "d": "Dropped", "l": "Relabelled as cow"}[key]
    assert focused(page) == "#20"
    assert in_sight(page, 20)
    assert page.locator("#message").inner_text() == ""


def test_a_card_in_hand_that_was_scrolled_away_comes_back_before_a_key_decides_on_it(visit):
    page = visit(review(count=300))
    card(page, 50).click(position={"x": 4, "y": 4})
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("d")
    assert focused(page) == "#50"
    assert in_sight(page, 50)
    assert progress(page).startswith("0 of 300")
    page.keyboard.press("d")
    assert verdict(page, 50) == "Dropped"
    assert focused(page) == "#60"


def test_a_key_does_not_take_back_a_decision_where_no_card_has_the_focus(visit):
    page = visit(review())
    press(page, 0, "Keep")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("k")
    assert verdict(page, 0) == "Kept"
    assert focused(page) == "#10"


def test_keys_say_when_all_are_reviewed(visit):
    page = visit(review())
    page.get_by_role("button", name="Keep all 30").click()
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    page.keyboard.press("r")
    assert progress(page) == "30 of 30 reviewed: 30 kept, 0 dropped, 0 relabelled"
    assert page.locator("#message").inner_text() == "All are reviewed."


def test_the_legend_names_every_key_and_where_they_begin():
    page = Page(render_review(review()))
    text = " ".join(" ".join(page.texts).split())
    assert "If no suspect is in view, the first press shows the first undecided one, and the second decides" in text
    keys = re.findall(r"const acts = \{([^}]*)\}", source("review.js"))[0]
    for key in re.findall(r"(\w): ", keys):
        assert key.upper() in page.texts


def test_another_label_is_chosen_by_writing_its_name(visit):
    page = visit(review(classes=[f"kind {i}" for i in range(200)]))
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("l")
    assert focused(page) == "wanted"
    assert page.locator("#choices li").count() == 200
    page.keyboard.press("Enter")  # nothing is chosen yet
    assert page.locator("#chooser").is_visible()
    page.keyboard.type("kind 15")
    assert page.locator("#choices li").all_inner_texts()[:3] == ["kind 15", "kind 150", "kind 151"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert verdict(page, 0) == "Relabelled as kind 150"
    assert focused(page) == "#10"
    page.keyboard.press("l")
    page.keyboard.type("d")  # a letter of the name, not the key that drops
    page.keyboard.press("Escape")
    assert verdict(page, 10) == "Undecided"
    assert focused(page) == "#10"
    press(page, 20, "Other…")
    page.locator("#choices li", has_text=re.compile("^kind 7$")).click()
    assert verdict(page, 20) == "Relabelled as kind 7"
    assert card(page, 20).get_by_role("button", name="Other…").get_attribute("aria-pressed") == "true"


def test_keys_are_left_alone_in_inputs_with_modifiers_and_when_switched_off(visit):
    page = visit(review())
    page.locator("#search").click()
    page.keyboard.type("dkru")
    assert page.locator("#search").input_value() == "dkru"
    page.locator("#clear").click()
    page.locator("#state").focus()
    page.keyboard.press("k")
    card(page, 0).click(position={"x": 4, "y": 4})
    for key in ("Control+d", "Alt+k", "Shift+R", "Meta+k"):
        page.keyboard.press(key)
    page.locator("#keys").uncheck()
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("d")
    assert progress(page).startswith("0 of 30")
    page.locator("#keys").check()
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("d")
    assert progress(page).startswith("1 of 30")


def test_a_suggestion_that_is_the_given_label_is_not_relabelled(visit):
    page = visit(review(suspects=[Suspect(i, str(i), 0, i, 0.1 * i, 0.5) for i in range(3)]))
    assert card(page, 0).get_by_role("button", name="Relabel").is_disabled()
    card(page, 0).click(position={"x": 4, "y": 4})
    page.keyboard.press("r")
    assert "is the given one" in page.locator("#message").inner_text()
    page.get_by_role("button", name="Relabel all 2 as suggested").click()
    assert [verdict(page, i) for i in range(3)] == ["Undecided", "Relabelled as dog", "Relabelled as cow"]


def test_filters_by_given_and_suggested_label_state_and_name(visit):
    page = visit(review())
    page.locator("#given").select_option(label="dog (10)")
    assert indexes(page) == list(range(10, 300, 30))
    page.locator("#suggested").select_option(label="cat (10)")
    assert indexes(page) == []
    assert page.locator("#nothing").is_visible()
    page.locator("#clear").click()
    wait(page, "document.querySelector('#shown').innerText === '30 of 30 shown, 30 of them undecided.'")
    page.locator("#search").fill("FILE-1")
    wait(page, "document.querySelectorAll('.suspect').length === 11")
    assert indexes(page) == [10, *range(100, 200, 10)]
    page.locator("#search").fill("290")
    wait(page, "document.querySelectorAll('.suspect').length === 1")
    assert indexes(page) == [290]
    page.locator("#clear").click()
    press(page, 20, "Drop")
    page.locator("#state").select_option("decided")
    assert indexes(page) == [20]
    page.locator("#state").select_option("undecided")
    assert page.locator("#shown").inner_text() == "29 of 30 shown, 29 of them undecided."
    press(page, 30, "Keep")  # it leaves, and the focus goes to the one in its place
    assert 30 not in indexes(page)
    assert focused(page) == "#40"
    page.keyboard.press("u")
    assert focused(page) == "#30"


def test_a_number_of_the_matrix_shows_its_suspects(visit):
    page = visit(review())
    page.locator('.pair[data-given="1"]').click()
    assert indexes(page) == list(range(10, 300, 30))
    assert focused(page) == "#10"
    assert page.locator("#suggested").input_value() == "2"
    page.locator('.pair[tabindex="0"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.given") == "1"


def test_a_number_of_the_matrix_whose_suspects_are_not_on_the_page_says_so(visit):
    page = visit(review())
    page.evaluate("Object.assign(document.querySelector('.pair').dataset, {given: '0', suggested: '0'})")
    page.locator('.pair[data-given="0"][data-suggested="0"]').click()
    assert page.locator("#shown").inner_text().startswith("30 of 30 shown")
    assert page.locator("#message").inner_text() == "None of them is among the 30 worst on this page."


def test_bulk_decisions_leave_those_made_by_hand_and_are_undone_as_one(visit):
    page = visit(review())
    press(page, 0, "Keep")
    page.locator("#given").select_option(label="cat (10)")
    page.get_by_role("button", name="Relabel all 9 as suggested").click()
    assert progress(page) == "10 of 30 reviewed: 1 kept, 0 dropped, 9 relabelled"
    assert page.get_by_role("button", name="Drop all 0").is_disabled()
    page.locator("#clear").click()
    page.get_by_role("button", name="Drop all 20").click()
    assert progress(page) == "30 of 30 reviewed: 1 kept, 20 dropped, 9 relabelled"
    page.locator("#undo").click()
    assert progress(page) == "10 of 30 reviewed: 1 kept, 0 dropped, 9 relabelled"
    page.locator("#undo").click()
    assert progress(page) == "1 of 30 reviewed: 1 kept, 0 dropped, 0 relabelled"


def test_progress_is_kept_over_a_reload_and_under_the_name_of_the_run(visit, tmp_path):
    page = visit(review())
    press(page, 0, "Relabel")
    press(page, 20, "Drop")
    page.reload()
    assert progress(page) == "2 of 30 reviewed: 0 kept, 1 dropped, 1 relabelled"
    assert verdict(page, 20) == "Dropped"
    page.keyboard.press("n")
    assert focused(page) == "#10"
    page.keyboard.press("n")
    assert focused(page) == "#30"
    (tmp_path / "report.html").write_text(render_review(review(run="another")), encoding="utf-8")
    page.reload()
    assert progress(page).startswith("0 of 30")


def test_two_windows_of_one_run_agree(visit):
    page = visit(review())
    other = page.context.new_page()
    other.goto(page.url)
    press(other, 0, "Drop")
    wait(page, "document.querySelector('#progress').textContent.startsWith('1 of')")
    assert verdict(page, 0) == "Dropped"


def test_what_the_browser_kept_is_not_trusted(visit):
    broken = 'localStorage.setItem("bilevel-review:a run", \'{"0": 99, "10": "x", "77": 1, "20": -1}\')'
    assert progress(visit(review(), before=broken)).startswith("1 of 30")
    assert progress(visit(review(), before='localStorage.setItem("bilevel-review:a run", "{")')).startswith("0 of 30")


@pytest.mark.parametrize(
    "denied",
    [
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})",
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }",
    ],
    ids=["denied", "full"],
)
def test_without_the_browsers_memory_the_page_says_so_and_exports(visit, denied):
    page = visit(review(), before=denied)
    assert page.locator("#forgetful").is_visible()
    press(page, 0, "Drop")
    assert exported(page)[1:] == [["0", "file-0.png", "drop", ""]]
    assert not visit(review()).locator("#forgetful").is_visible()


def test_the_export_holds_every_decision_in_the_order_of_the_index(visit):
    suspects = [Suspect(9 - i, key, 0, 1, 0.01 * i, 0.5) for i, key in enumerate(NASTY)]
    classes = ["cat", 'dog, "large"', "🐄"]
    page = visit(review(suspects=suspects, classes=classes, pictures=np.zeros((10, 4, 4), dtype=np.uint8)))
    assert page.title() == "A title"
    assert page.locator("#bar [data-save]").is_disabled()
    press(page, 9, "Relabel")
    page.get_by_role("button", name="Keep all 9").click()
    press(page, 4, "Drop")
    press(page, 3, "Other…")
    page.locator("#choices li").nth(2).click()
    rows = exported(page)
    assert rows[0] == ["index", "key", "decision", "label"]
    decisions = {9: ["relabel", 'dog, "large"'], 4: ["drop", ""], 3: ["relabel", "🐄"]}
    assert rows[1:] == [[str(i), NASTY[9 - i], *decisions.get(i, ["keep", "cat"])] for i in range(10)]


def test_a_saved_file_is_read_back_and_what_does_not_fit_is_skipped(visit, tmp_path):
    suspects = [Suspect(i, key, 0, 1, 0.01 * i, 0.5) for i, key in enumerate([*NASTY, "caf\udce9"])]
    page = visit(review(suspects=suspects))
    page.get_by_role("button", name="Relabel all 11").click()
    press(page, 3, "Drop")
    press(page, 4, "Keep")
    rows = exported(page)
    fresh = visit(review(suspects=suspects, run="fresh"))
    path = tmp_path / "decisions.csv"

    def read(rows):
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file).writerows(rows)
        fresh.locator("#file").set_input_files(path)
        wait(fresh, "document.querySelector('#file').value === ''")
        return fresh.locator("#message").inner_text()

    assert read(rows) == "11 decisions read."
    assert progress(fresh) == "11 of 11 reviewed: 1 kept, 1 dropped, 9 relabelled"
    assert exported(fresh) == rows
    fresh.locator("#undo").click()
    assert progress(fresh).startswith("0 of 11")
    strange = [["0", "other.png", "drop", ""], ["99", "x", "drop", ""], ["1", NASTY[1], "relabel", "bird"]]
    strange += [["2", NASTY[2], "burn", ""], ["3", NASTY[3], "relabel", "cow"]]
    assert read([rows[0], *strange]) == (
        "1 decisions read. 4 skipped: they do not name a suspect of this page and a label."
    )
    assert verdict(fresh, 3) == "Relabelled as cow"
    assert 'no column "index"' in read([["a", "b"]])


def test_names_that_look_like_markup_or_run_from_right_to_left_are_shown_as_they_are(visit):
    suspects = [Suspect(i, key, 0, 1, 0.01 * i, 0.5) for i, key in enumerate(NASTY)]
    page = visit(review(suspects=suspects, fields=[[(key, key)] for key in NASTY], title="</title><b>"))
    assert page.locator(".suspect .key").all_text_contents() == NASTY
    assert page.locator(".features dd").all_text_contents() == NASTY
    assert page.title() == "</title><b>"


def test_pictures_are_drawn_to_the_pixel(visit):
    pictures = np.random.default_rng(0).integers(0, 256, (30, 7, 5, 3), dtype=np.uint8)
    page = visit(review(pictures=pictures))
    for i in (0, 1, 29):
        page.evaluate(f"scrollTo(0, {i} * 9999)")
        canvas, end = card(page, 10 * i).locator("canvas"), time.monotonic() + 5
        while not (found := decoded(canvas.evaluate("c => c.toDataURL()"))[1]).any() and time.monotonic() < end:
            page.wait_for_timeout(20)
        np.testing.assert_array_equal(found[..., :3], pictures[i])


def test_many_fields_are_folded(visit):
    page = visit(review(fields=[[(f"f{k}", str(k)) for k in range(20)]] * 30))
    first = card(page, 0)
    assert first.locator(".features dt").count() == 8
    first.get_by_text("12 more").click()
    wait(page, "document.querySelector('.suspect').querySelectorAll('.features dt').length === 20")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_in_light_and_dark(visit, width, scheme):
    classes = [f"a class with a long name {i}" for i in range(20)]
    suspects = [Suspect(i, "W" * 300, i % 20, i % 7, 0.01 * i, 0.5) for i in range(40)]
    fields = [[("name" * 30, "v" * 300)]] * 40
    viewport = {"width": width, "height": 800}
    command = "bilevel denoise --apply " + "d" * 200
    wanted = review(suspects=suspects, classes=classes, fields=fields, command=command)
    page = visit(wanted, viewport=viewport, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    right = "e => e.getBoundingClientRect().right"
    inside = f"e => ({right})(e) <= ({right})(e.closest('.suspect')) - 8"
    assert page.evaluate(f"[...document.querySelectorAll('.suspect *')].every({inside})")
    press(page, 0, "Other…")
    assert page.evaluate("document.querySelector('#chooser').getBoundingClientRect().right") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 27)"}[scheme]


def test_no_line_ends_within_the_name_of_an_option(visit):
    command = "bilevel denoise table.csv --apply decisions.csv --label diagnosis --out cleaned.csv"
    page = visit(review(command=command, notes=["Use --trusted " * 40]), viewport={"width": 360, "height": 800})
    lines = page.evaluate("[...document.querySelectorAll('.unbroken')].map(e => e.getClientRects().length)")
    assert lines == [1] * 43
    assert page.locator("pre").inner_text() == command
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_only_the_current_card_is_a_stop_of_the_tab_key(visit):
    page = visit(review())
    page.locator("#bar [data-save]").evaluate("e => e.disabled = false")
    page.locator("#bar [data-save]").focus()
    stops = []
    for _ in range(6):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.dataset.do ?? document.activeElement.className"))
    assert stops[:5] == ["suspect current", "relabel", "keep", "drop", "other"]
    assert not page.evaluate("document.querySelector('#feed').contains(document.activeElement)")


def test_five_thousand_suspects_open_at_once_and_few_of_them_are_elements(visit):
    pictures = np.random.default_rng(0).integers(0, 256, (5000, 28, 28), dtype=np.uint8)
    page = visit(review(count=5000, pictures=pictures))
    opened = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
    print(f"5,000 suspects: interactive after {opened:.0f} ms")
    count = "document.querySelectorAll('.suspect').length"
    assert page.evaluate(count) <= 100
    seen = "e => e.getBoundingClientRect().top > 200 && e.getBoundingClientRect().bottom < innerHeight"
    for share in (0.5, 0.9, 0.2, 0.7, 0.4, 1.0):
        page.evaluate(f"scrollTo(0, {share} * document.documentElement.scrollHeight)")
        if share < 1:
            wait(page, f"[...document.querySelectorAll('.suspect')].some({seen})")
            page.evaluate(f"[...document.querySelectorAll('.suspect')].find({seen}).click()")
        wait(page, f"{count} <= 150")
    assert page.evaluate("document.querySelectorAll('*').length") < 6_000
    page.locator("#search").fill("49990")
    wait(page, f"{count} === 1")
    page.locator("#clear").click()
    page.get_by_role("button", name="Drop all 5,000").click()
    assert progress(page) == "5,000 of 5,000 reviewed: 0 kept, 5,000 dropped, 0 relabelled"


def test_printing_shows_cards_and_no_blank_space(visit):
    page = visit(review(count=1000))
    pdf = page.pdf()
    assert page.locator("#printed").text_content() == "288 of 1,000 suspects are printed."
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) < 30

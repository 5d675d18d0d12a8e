"""The browser: real pages in a real Chromium, shown and acted on; one of it serves all tests that do not end it."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from broker.contract.browser_events import BrowserOutputObservation, FileDownloadObservation
from tests.browser_parts import SETTINGS, Site, Surfer, opened_site
from tests.integration.workspace_hosts import opened

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONVERSATION = "conversation-1"
SAYS = "onclick=\"document.querySelector('output').textContent += this.id + ' '\""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser") / "node"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with opened_site() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def surf(folder: Path) -> AsyncIterator[Surfer]:
    async with opened(folder, **SETTINGS) as workspaces:
        yield Surfer(await workspaces.open(CONVERSATION))


@pytest.fixture
def workspace(folder: Path, surf: Surfer) -> Path:
    return folder / CONVERSATION / "workspace"


def picture(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))


async def test_a_page_is_shown_as_a_tree_and_as_pictures(surf: Surfer, site: Site) -> None:
    url = site.page("/shop", "<h1>Shop</h1><p>Open <b>today</b></p><button>Buy</button><div onclick='1'>Look</div>")
    shown = await surf(f"goto({url!r})")
    assert (shown.url, shown.open_pages_urls, shown.active_page_index) == (url, (url,), 0)
    assert shown.last_browser_action == f"goto({url!r})"
    assert "RootWebArea '/shop'" in shown.content
    assert f"[{surf.bid('heading')}] heading 'Shop'" in shown.content
    assert "StaticText 'today'" in shown.content
    assert f"[{surf.bid('Buy')}] button 'Buy', clickable\n" in shown.content
    assert ", clickable\n\t\tStaticText 'Look'" in shown.content
    plain, marked = picture(shown.screenshot), picture(shown.set_of_marks)
    assert plain.size == marked.size == (1280, 720)
    assert marked.tobytes() != plain.tobytes()


async def test_a_form_is_filled_in_and_sent(surf: Surfer, site: Site, workspace: Path) -> None:
    (workspace / "letter.txt").write_text("Dear all")
    url = site.page(
        "/order",
        "<form action=/form method=post enctype=multipart/form-data><input name=name aria-label=Name value=old>"
        "<textarea name=text aria-label=Text></textarea><select name=kind aria-label=Kind><option value=t>Tea"
        "<option value=c>Coffee</select><input type=checkbox name=now aria-label=Now><input type=file name=letter "
        "aria-label=Letter><button>Send</button></form>",
    )
    await surf(f"goto({url!r})")
    name, text, kind = surf.bid("textbox 'Name'"), surf.bid("textbox 'Text'"), surf.bid("combobox 'Kind'")
    await surf(
        f"fill({name!r}, 'Ada')\nclear({text!r})\nfill({text!r}, 'two words')\nselect_option({kind!r}, 'Coffee')"
    )
    assert "textbox 'Name' value='Ada'" in surf.latest
    missing = await surf.failing(f"upload_file({surf.bid('Letter')!r}, 'no.txt')")
    assert missing == "There is no file 'no.txt' in the workspace."
    await surf(f"upload_file({surf.bid('Letter')!r}, 'letter.txt')\nclick({surf.bid('Now')!r})")
    await surf(f"press({name!r}, 'Enter')")
    await surf.until("Thank you.")
    assert site.forms[-1] == {
        "name": "Ada",
        "text": "two words",
        "kind": "c",
        "now": "on",
        "letter": "letter.txt: Dear all",
    }


async def test_mouse_actions(surf: Surfer, site: Site) -> None:
    url = site.page(
        "/mouse",
        "<output style='float:right'></output><button ondblclick=\"document.querySelector('output').textContent += 'twice '\">D</button>"
        "<button onmouseenter=\"document.querySelector('output').textContent += 'over '\">H</button>"
        "<button oncontextmenu=\"document.querySelector('output').textContent += 'right '\">R</button>"
        "<p id=from draggable=true role=button aria-label=From style='width:99px'>F</p>"
        "<p role=button aria-label=To ondragover='event.preventDefault()' "
        "ondrop=\"document.querySelector('output').textContent += 'dropped '\">T</p><input aria-label=Field>"
        "<div style='height:5000px'></div><p></p>"
        "<script>onscroll = () => { document.querySelector('p:last-of-type').textContent = 'scrolled' }</script>",
    )
    await surf(f"goto({url!r})")
    bids = {name: surf.bid(f"button '{name}'") for name in ("D", "H", "R", "From", "To")}
    shown = await surf(
        f"dblclick({bids['D']!r})\nhover({bids['H']!r})\nclick({bids['R']!r}, 'right')\n"
        f"drag_and_drop({bids['From']!r}, {bids['To']!r})\nfocus({surf.bid('Field')!r})"
    )
    assert shown.focused_element_bid == surf.bid("Field")
    await surf.until("StaticText 'twice over right dropped'")
    await surf("scroll(0, 2000)")
    await surf.until("StaticText 'scrolled'")


async def test_frames_of_this_site_and_of_another_and_shadows(surf: Surfer, site: Site) -> None:
    site.page("/inner", f"<output></output><button id=far {SAYS}>Far</button>")
    shadow = "<script>document.querySelector('x-y').attachShadow({mode: 'open'}).innerHTML = '<button>Deep</button>'"
    near = f"<output></output><button id=near {SAYS}>Near</button>".replace('"', "&quot;")
    url = site.page(
        "/frames",
        f'<p>Two</p><iframe srcdoc="{near}"></iframe><iframe src="{site.url("/inner", "localhost")}"></iframe>'
        f"<x-y></x-y>{shadow}</script>",
    )
    await surf(f"goto({url!r})")
    await surf.until("button 'Far'")
    near_bid, far_bid = surf.bid("button 'Near'"), surf.bid("button 'Far'")
    assert (near_bid[0], far_bid[0]) == ("a", "b")
    assert surf.bid("button 'Deep'").isdigit()
    await surf(f"click({near_bid!r})\nclick({far_bid!r})\nclick({surf.bid('Deep')!r})")
    await surf.until("StaticText 'near'")
    await surf.until("StaticText 'far'")
    assert surf.bid("button 'Far'") == far_bid  # an element keeps its id


async def test_tabs_and_history(surf: Surfer, site: Site) -> None:
    two = site.page("/two", "two")
    one = site.page("/one", f"<a href={two} target=_blank>new</a> <a href={two}>here</a>")
    await surf(f"goto({one!r})")
    await surf(f"click({surf.bid(repr('new'))!r})")
    shown = await surf.until("RootWebArea '/two'")
    assert (shown.url, shown.open_pages_urls, shown.active_page_index) == (two, (one, two), 1)
    shown = await surf("tab_focus(0)")
    assert shown.url == one
    assert f"  1: {two}" in shown.content
    assert await surf.failing("tab_focus(7)") == "There is no tab 7: they are numbered from 0 to 1."
    await surf("tab_focus(1)\ntab_close()")
    await surf(f"click({surf.bid(repr('here'))!r})")
    await surf.until("RootWebArea '/two'")
    assert (await surf("go_back()")).url == one
    assert (await surf("go_forward()")).url == two
    shown = await surf("new_tab()\ntab_close()\ntab_close()")
    assert shown.open_pages_urls == ("about:blank",)  # there is always one


async def test_dialogs_do_not_wait_for_anybody(surf: Surfer, site: Site) -> None:
    script = "this.textContent = `${confirm('Sure?')} ${prompt('Who?', 'x')}`; alert('told')"
    url = site.page("/ask", f'<button onclick="{script}">Ask</button>')
    await surf(f"goto({url!r})")
    told = (await surf(f"click({surf.bid('Ask')!r})")).content
    while "[The page showed a dialog (alert), which was accepted: told]" not in told:
        told += (await surf("noop(100)")).content
    assert "[The page showed a dialog (confirm), which was dismissed: Sure?]" in told
    await surf(f"answer_dialogs(True, 'Ada')\nclick({surf.bid('button')!r})")
    await surf.until("button 'true Ada'")
    await surf("answer_dialogs(False)")


async def test_files_are_downloaded_into_the_workspace(surf: Surfer, site: Site, workspace: Path) -> None:
    url = site.page("/files", "<a href=/numbers.csv>numbers</a>")
    await surf(f"goto({url!r})")
    told = ""
    for count in (1, 2):  # with any names by the server, they are in the workspace and overwrite nothing
        told += (await surf(f"click({surf.bid('link')!r})")).content
        while told.count("[Downloaded to ") < count:
            told += (await surf("noop(100)")).content
    found = sorted(workspace.glob("*numbers*.csv"))
    assert [f"[Downloaded to {path}]" in told for path in found] == [True, True]
    assert all(path.read_text() == "1,2\n" for path in found)
    paper = await surf.any(f"goto({site.url('/paper.pdf')!r})")
    assert isinstance(paper, FileDownloadObservation)
    assert paper.file_path == str(workspace / "paper.pdf")
    assert Path(paper.file_path).read_bytes().startswith(b"%PDF")
    assert f"[Current URL: {url}]" in paper.content


async def test_a_download_that_never_ends_holds_up_one_action_only(surf: Surfer, site: Site, workspace: Path) -> None:
    told = await surf.any(f"goto({site.url('/endless')!r})", timeout=4.0)
    assert f"[The download of {site.url('/endless')} was given up: it did not end in time." in told.content
    begun = asyncio.get_running_loop().time()
    assert "given up" not in (await surf("noop()", timeout=60.0)).content
    assert asyncio.get_running_loop().time() - begun < 30.0
    assert not list(workspace.glob("endless*"))


async def test_oversized_download_is_abandoned_early(surf: Surfer, site: Site, workspace: Path) -> None:
    told = await surf.any(f"goto({site.url('/flood')!r})", timeout=60.0)
    assert f"[The download of {site.url('/flood')} was given up: it has more than 256 MiB." in told.content
    assert not list(workspace.glob("flood*"))


async def test_an_address_of_a_megabyte_is_shortened(surf: Surfer, site: Site) -> None:
    url = site.page("/far", "<script>history.pushState({}, '', '/' + 'u'.repeat(1_000_000))</script><h1>Far</h1>")
    shown = await surf(f"goto({url!r})")
    assert "heading 'Far'" in shown.content
    assert len(shown.content) < 10_000
    assert len(shown.url) < 3_000
    assert all(len(url) < 3_000 for url in shown.open_pages_urls)


async def test_a_page_is_read_as_text(surf: Surfer, site: Site) -> None:
    url = site.page("/news", "<h1>News</h1><p>Nothing <i>new</i>.</p><script>1</script>")
    read = await surf.read(url)
    assert isinstance(read, BrowserOutputObservation)
    assert (read.trigger_by_action, read.url, read.screenshot) == ("browse", url, "")
    assert "News\n\nNothing new.\n" in read.content


async def test_page_too_large_for_a_tree_is_words_and_picture(surf: Surfer, site: Site) -> None:
    url = site.page("/all", "<button>Top</button>" + "<p><a href=/x>Chapter</a> <b>one</b></p>" * 20_000)
    shown = await surf(f"goto({url!r})")
    assert "these are its words.]\nTop\n\nChapter one" in shown.content
    assert shown.open_pages_urls == (url,)
    assert picture(shown.screenshot).tobytes() != picture(shown.set_of_marks).tobytes()
    assert (await surf(f"goto({site.page('/part', '<h1>Part</h1>')!r})")).error is False
    assert surf.bid("heading 'Part'")


async def test_files_of_the_workspace_are_pages(surf: Surfer, workspace: Path) -> None:
    (workspace / "report.html").write_text("<h1>Report</h1>")
    assert "heading 'Report'" in (await surf(f"goto('file://{workspace}/report.html')")).content


async def test_impossible_actions_are_reported(surf: Surfer, site: Site) -> None:
    url = site.page(
        "/hidden",
        "<button style='visibility:hidden' aria-label=x>H</button><button>Under</button><button>Free</button>"
        "<div style='position:fixed;inset:0;width:90px;background:red'></div>",
    )
    await surf(f"goto({url!r})")
    covered = await surf.failing(f"click({surf.bid('Under')!r})")
    assert covered.startswith("Timeout 5000ms exceeded.\n")
    assert "intercepts pointer events" in covered
    told = await surf.failing("click('9999')\nnoop()")
    assert told.startswith("click('9999'): There is no element with the bid '9999' on the page.")
    assert told.endswith("The 1 actions after it were not carried out.")
    assert "There is no action 'fly'" in await surf.failing("fly()")
    assert "cannot be opened: an address begins with http://" in await surf.failing("goto('chrome://version')")
    assert "net::ERR_" in await surf.failing("goto('http://127.0.0.1:1/')")


async def test_page_that_never_loads_is_limited_in_time(surf: Surfer, site: Site) -> None:
    await surf(f"goto({site.page('/first', 'Chromium has started')!r})")  # which may take longer than two seconds
    told = await surf.failing(f"goto({site.url('/never')!r})", timeout=2.0)
    assert told == "The action did not end within 2 seconds and was given up."
    await surf(f"goto({site.page('/way', '<a href=/never>there</a>')!r})")
    shown = await surf(f"click({surf.bid('link')!r})", timeout=8.0)
    assert "[The page that was asked for did not come in time" in shown.content
    assert f"[{surf.bid('link')}] link 'there'" in shown.content


async def test_a_cancel_is_answered_at_once(surf: Surfer, site: Site) -> None:
    site.held.clear()
    running = asyncio.create_task(surf.any(f"goto({site.url('/never')!r})"))
    async with asyncio.timeout(30.0):
        await site.held.wait()
        loop = asyncio.get_running_loop()
        asked = loop.time()
        # The ids of this surfer count up from 1, and the latest is the one that runs.
        (action_id,) = (await surf.workspace.connection.ping()).running
        assert await surf.workspace.interrupt(action_id)
        stopped = await running
    assert loop.time() - asked < 20.0
    assert isinstance(stopped, BrowserOutputObservation)
    assert stopped.last_browser_action_error == "The action was cancelled. It may have taken effect in part."
    assert "heading" in (await surf(f"goto({site.page('/after', '<h1>After</h1>')!r})")).content


async def test_errors_and_failed_requests_of_a_page_are_shown_once(surf: Surfer, site: Site) -> None:
    script = (
        "console.log('hello'); console.error('broken', 1); fetch('/missing'); fetch('http://127.0.0.1:1/x'); cart()"
    )
    url = site.page("/failing", f"<button onclick=\"console.warn('careful')\">Go</button><script>{script}</script>")
    shown = (await surf(f"goto({url!r})\nnoop(500)")).content
    assert "[Console:]\n" in shown
    assert "\n  error: broken 1\n" in shown
    assert "\n  uncaught: cart is not defined\n" in shown
    assert f"\n  GET {site.url('/missing')} failed: 404 Not Found\n" in shown
    assert "\n  GET http://127.0.0.1:1/x failed: net::ERR_" in shown
    assert "hello" not in shown
    again = (await surf(f"click({surf.bid('Go')!r})")).content
    assert "[Console:]" not in again
    everything = (await surf("console()")).content
    assert "\n  log: hello\n" in everything
    assert "\n  warning: careful\n" in everything
    assert "[Console:]" not in (await surf("noop(1)")).content


async def test_page_flooding_its_console_is_still_shown(surf: Surfer, site: Site) -> None:
    script = "for (let i = 0; i < 5000; i++) console.error('x'.repeat(10000) + i)"
    shown = await surf(f"goto({site.page('/flood-of-words', f'<h1>There</h1><script>{script}</script>')!r})")
    assert "heading 'There'" in shown.content
    assert len(shown.content) < 10_000

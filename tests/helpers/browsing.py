"""What tests of the page share."""

MARKUP = "<img src=x onerror=alert(1)>"


def first_is(page, key: str) -> None:
    page.wait_for_function(
        "key => document.querySelector('.hit .key')?.textContent === key", arg=key
    )


def loaded(page) -> None:
    page.wait_for_function(
        "() => [...document.querySelectorAll('.hit img')].every(image => image.complete &&"
        " image.naturalWidth > 0)"
    )


def keys_of(page, place: str = ".hit") -> list[str]:
    return page.locator(f"{place} .key").all_inner_texts()


def count_is(page, count: int) -> None:
    page.wait_for_function("count => document.querySelectorAll('.hit').length === count", arg=count)


def search(page, image) -> None:
    # An image that is chosen before the page knows the index is searched for twice, and the second
    # answer takes the focus away.
    page.wait_for_function("() => document.querySelector('#about').textContent")
    page.set_input_files("#file", str(image))
    answered(page)


def answered(page) -> None:
    """Wait for the hits of a search, which take the place of the wall of all items."""
    page.wait_for_selector("#answers:not(.wall):not(.stale) .hit")


def results(server, index: str = "", **request) -> list[dict]:
    """Return the hits of a search by a request of `httpx`."""
    return server.client.post(f"/v1{index}/search", **request).json()["results"]


def shows(page, items: list[dict], place: str = ".hit") -> bool:
    return keys_of(page, place) == [item["key"] for item in items]


def listed(server, **parameters) -> list[dict]:
    """Return a page of the list of items."""
    return server.client.get("/v1/items", params=parameters).json()["items"]


def fits(page) -> bool:
    """Whether nothing is wider than the window."""
    return page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")

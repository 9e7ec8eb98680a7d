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
    page.wait_for_selector(".hit")


def fits(page) -> bool:
    """Whether nothing is wider than the window."""
    return page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")

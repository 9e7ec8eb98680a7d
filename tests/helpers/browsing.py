"""What tests of the page share."""

from __future__ import annotations

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
